"""What holds for all tests on a device."""

from __future__ import annotations

import pytest

from moe_autograd.autograd import parallel


@pytest.fixture(autouse=True)
def nothing_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else calls of known modules would be made in turn, on the caller's stream."""
    monkeypatch.setattr(parallel, "call_in_turn", lambda *_: None)
