"""What functions take, whatever their annotations name."""

from __future__ import annotations

import inspect
import sys
from typing import Any

import pytest

from moe_autograd._signatures import signature_of

NAMES_NOTHING = "def step(self, closure: ForTypeCheckersAlone = None): pass"


@pytest.mark.skipif(sys.version_info < (3, 14), reason="evaluates annotations of functions as it makes them")
def test_a_function_tells_what_it_takes_where_its_annotations_name_what_is_not_there() -> None:
    made: dict[str, Any] = {}
    exec(compile(NAMES_NOTHING, "made", "exec", dont_inherit=True), made)
    with pytest.raises(NameError):
        inspect.signature(made["step"])
    assert [*signature_of(made["step"]).parameters] == ["self", "closure"]


def test_of_others_it_is_the_signature() -> None:
    assert signature_of(signature_of) == inspect.signature(signature_of)
    with pytest.raises(ValueError, match="no signature found"):
        signature_of(min)
