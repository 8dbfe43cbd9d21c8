"""What tests of recomputation share: experts, what is to be equal, and what counts operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    checkpoint,
)

WORKERS = [1, 2, 16]


def experts_of(make: Callable[[], nn.Module], num: int = 8) -> list[nn.Module]:
    torch.manual_seed(0)
    return [make() for _ in range(num)]


def ffn(dropout: float = 0.0) -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Dropout(dropout), nn.Linear(8, 4))


def gradients(modules: list[nn.Module]) -> list[Tensor | None]:
    return [parameter.grad for module in modules for parameter in module.parameters()]


def assert_same(got: Any, want: Any) -> None:
    assert len(got) == len(want)
    for one, other in zip(got, want, strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            torch.testing.assert_close(one, other)


def one_after_another_checkpointed(calls: Sequence[Callable[..., Any]], inputs: Sequence[Any]) -> list[Any]:
    return [checkpoint(call, *x, use_reentrant=False) for call, x in zip(calls, inputs, strict=True)]


class Checkpointed(nn.Module):
    """What a user writes: a module that checkpoints its inside."""

    def __init__(self, inside: nn.Module, **options: Any) -> None:
        super().__init__()
        self.inside, self.options = inside, options

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.inside, x, use_reentrant=False, **self.options)
