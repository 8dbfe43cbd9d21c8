"""A layer whose experts fail when they are told to."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from moe_autograd.errors import (
    ServerUnavailableError,
)
from moe_autograd.moe.layer import MixtureOfExperts
from moe_autograd.moe.routers import TopKRouter
from tests.support.survivors import combine_survivors

D_MODEL, NUM_EXPERTS = 6, 5


class Unreliable(nn.Module):
    """A linear layer that raises `error` in its forward, or in its backward, while it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D_MODEL, D_MODEL)
        self.fails_in = ""
        self.error: Exception = ServerUnavailableError("the cable is out")
        self.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        if self.fails_in == "forward":
            raise self.error
        y = self.linear(x)
        if self.fails_in == "backward" and y.requires_grad:
            y.register_hook(self._fail)
        return y

    def _fail(self, grad: Tensor) -> None:
        raise self.error


class Clock:
    """Stands for the `time` of the module that decides how long an expert is left alone."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


def layer_of(top_k: int = 2, *, fails: dict[int, str] | None = None, **options: Any) -> MixtureOfExperts:
    torch.manual_seed(1)
    experts = [Unreliable() for _ in range(NUM_EXPERTS)]
    for index, phase in (fails or {}).items():
        experts[index].fails_in = phase
    router = TopKRouter(D_MODEL, NUM_EXPERTS, top_k)
    return MixtureOfExperts(router, experts, **{"on_failure": "drop", **options}).double()


def tokens(num_tokens: int = 30) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(num_tokens, D_MODEL, dtype=torch.float64, generator=generator).requires_grad_()


def gradients(y: Tensor, layer: MixtureOfExperts, x: Tensor) -> dict[str, Tensor | None]:
    named = {"x": x, **dict(layer.named_parameters())}
    grads = torch.autograd.grad(y.square().sum(), list(named.values()), allow_unused=True)
    return dict(zip(named, grads, strict=True))


def expected_of(layer: MixtureOfExperts, x: Tensor, **lost: Any) -> Tensor:
    linears = [expert.linear for expert in layer.experts]
    return combine_survivors(x, layer.router(x), linears, **lost)


def assert_same_gradients(actual: dict[str, Tensor | None], expected: dict[str, Tensor | None]) -> None:
    """Equal to 1e-6, and none where none is."""
    assert {name for name, grad in actual.items() if grad is None} == {
        name for name, grad in expected.items() if grad is None
    }
    for name, grad in expected.items():
        torch.testing.assert_close(
            actual[name], grad, rtol=1e-6, atol=1e-6, msg=lambda text, n=name: f"{n}: {text}"
        )
