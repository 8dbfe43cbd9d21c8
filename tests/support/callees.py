"""A module whose methods compute, and one that waits in one of them."""

from __future__ import annotations

import threading
from typing import Any

import torch
from torch import Tensor, nn

from tests.support.readable import wait


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.act, self.norms = nn.Linear(4, 4), nn.GELU(), nn.ModuleList([nn.LayerNorm(4)] * 2)
        self.scale, self.weight = 0.5, nn.Parameter(torch.randn(4, 4))
        self.barrier = threading.Barrier(1)

    def gate(self, x: Tensor) -> Any:
        return self.act(x) @ self.weight * self.scale

    def mlp(self, x: Tensor) -> Any:
        for norm in self.norms:
            x = norm(x)
        return self.inner(self.gate(x))

    def wait(self, x: Tensor) -> Tensor:
        self.barrier.wait()
        return x

    def forward(self, x: Tensor) -> Any:
        return self.mlp(x)


class Other(Block):
    def mlp(self, x: Tensor) -> Any:
        return wait(x)
