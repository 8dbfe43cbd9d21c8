"""An expert whose numbers have the same bits everywhere.

A matrix product adds up in an order that depends on the number of threads and on where in memory its arguments begin;
an expert that has to be the same bit for bit here and on a server has none.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Scale(nn.Module):
    """Multiplies and shifts each feature by a weight of its own."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(num_features))
        self.bias = nn.Parameter(torch.randn(num_features))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight + self.bias
