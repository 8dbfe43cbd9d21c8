"""Compute as torch computes within the forward of an autograd function: nothing is recorded."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from torch import _C

T = TypeVar("T")


def unrecorded(compute: Callable[[], T]) -> T:
    """Return what `compute` returns, with gradients and forward-mode differentiation off meanwhile.

    `torch.no_grad()` ends in Python, and Ctrl-C that comes there leaves gradients off for good. Here it comes behind
    the functions of C that put back what was.
    """
    records, makes_tangents = _C.is_grad_enabled(), _C._is_fwd_grad_enabled()
    try:
        _C._set_grad_enabled(False)
        _C._set_fwd_grad_enabled(False)
        return compute()
    finally:
        try:
            _C._set_grad_enabled(records)
        finally:
            _C._set_fwd_grad_enabled(makes_tangents)
