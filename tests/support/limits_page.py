"""What the tests of docs/limits.md have in common: the page, and the smallest calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from moe_autograd import parallel_apply

PAGE = " ".join((Path(__file__).parents[2] / "docs/limits.md").read_text(encoding="utf-8").split())


def of(text: str) -> Callable[[Any], Any]:
    """Say which point of the page a test is about."""
    assert text in PAGE
    return lambda test: test


def leaf() -> Tensor:
    return torch.ones(2, requires_grad=True)


class Doubles(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


def in_loop(functions: Sequence[Callable[..., Any]], inputs: Sequence[tuple[Any, ...]]) -> list[Any]:
    return [function(*args) for function, args in zip(functions, inputs, strict=True)]


def in_call(function: Callable[[Tensor], Any], x: Tensor) -> Any:
    """Return what one of two calls returns."""
    return parallel_apply([function] * 2, [(x,), (leaf(),)])[0]
