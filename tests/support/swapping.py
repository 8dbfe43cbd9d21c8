"""Functions that swap a module's weights, in a file that is not their callers'."""

from __future__ import annotations

from typing import Any

from torch import Tensor, func, nn


def run_with(template: nn.Module, weights: dict[str, Tensor], x: Tensor) -> Any:
    return func.functional_call(template, weights, (x,))


def run_with_from_elsewhere(template: nn.Module, weights: dict[str, Tensor], x: Tensor) -> Any:
    return run_with(template, weights, x)
