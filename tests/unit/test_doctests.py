"""The examples in docstrings run, and print what they say."""

from __future__ import annotations

import doctest
import importlib
import warnings

import pytest
import torch

from tests.unit.test_doors import SOURCES

RUNNABLE = [name for name in SOURCES if not name.endswith(("__main__", "wire.generate"))]


@pytest.mark.parametrize("module", RUNNABLE)
def test_examples_in_docstrings_print_what_they_say(module: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.manual_seed(0)
        failed, _ = doctest.testmod(importlib.import_module(module), verbose=False)
    assert failed == 0
