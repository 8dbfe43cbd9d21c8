"""What tests of the split backward share."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Recorded(torch.autograd.Function):
    """The identity; writes down each of its backwards."""

    calls: list[str] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
        ctx.name = name
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        Recorded.calls.append(ctx.name)
        return grad, None


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))


def an_input(*shape: int) -> Tensor:
    return torch.randn(shape, requires_grad=True)
