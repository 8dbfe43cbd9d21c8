"""Experts that tests host, and how they are trained."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

LR = 0.1


def make_modules(*indices: int) -> dict[str, nn.Module]:
    """Return `ffn.0` and so on, of width 4; the same weights every time."""
    torch.manual_seed(0)
    return {f"ffn.{index}": nn.Linear(4, 4) for index in indices}


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Return the optimizer that servers hold, and twins here."""
    return torch.optim.SGD(parameters, lr=LR)


class ShowsItsMask(nn.Module):
    """Returns its input where dropout leaves it; its weights have a part in the graph, and none in the values."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        masked: Tensor = self.dropout(self.linear(x) * 0 + x)
        return masked


class Changes(nn.Module):
    """Changes its input in place, and so that to do it twice shows."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.linear(x.mul_(3))
        return result
