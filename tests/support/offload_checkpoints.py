"""Offloaded experts in a folder that are trained step by step, so that their checkpoints can be compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from moe_autograd.autograd.offload import OffloadedExperts


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def build(folder: Path, num: int = 4, width: int = 8) -> OffloadedExperts:
    torch.manual_seed(0)
    experts = (nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width)) for _ in range(num))
    return OffloadedExperts(experts, adam, max_resident_bytes=2000, store=folder)


def train(experts: OffloadedExperts, steps: range) -> None:
    for step in steps:
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
        for expert in experts:
            expert(x).square().sum().backward()
        experts.step()
        experts.zero_grad()


def states(experts: OffloadedExperts) -> list[dict[str, torch.Tensor]]:
    return [experts.state_dict(i) for i in range(len(experts))]


def assert_equal(got: list[dict[str, torch.Tensor]], want: list[dict[str, torch.Tensor]]) -> None:
    for one, other in zip(got, want, strict=True):
        assert one.keys() == other.keys()
        for name in one:
            assert torch.equal(one[name], other[name]), name
