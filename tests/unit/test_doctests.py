"""The examples in docstrings run, and print what they say."""

from __future__ import annotations

import doctest
import importlib
import warnings

import pytest
import torch

from tests.unit.test_doors import SOURCES

WITH_EXAMPLES = [name for name, path in SOURCES.items() if ">>> " in path.read_text(encoding="utf-8")]


@pytest.mark.parametrize("module", WITH_EXAMPLES)
def test_examples_in_docstrings_print_what_they_say(module: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.manual_seed(0)
        failed, tried = doctest.testmod(importlib.import_module(module), verbose=False)
    assert (failed, tried > 0) == (0, True)
