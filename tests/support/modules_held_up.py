"""Modules whose kernels come late on a GPU, and comparisons of programs of them with plain loops."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from moe_autograd import FeedForwardExpert, MixtureOfExperts, TopKRouter, parallel_apply
from tests.support.comparison import one_after_another
from tests.support.devices import DEVICE, hold_up

Apply = Callable[..., Any]  # called like `parallel_apply`
NUM_CALLS, WIDTH = 8, 16
SHORT = 3_000_000  # cycles of a GPU's clock: some 2 ms


class Delay(Function):
    """A copy that comes late, in the backward too; it saves something."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        hold_up(SHORT)
        ctx.save_for_backward(x * 1)
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        hold_up(SHORT)
        saved: Tensor = ctx.saved_tensors[0]
        return grad + saved * 0


def delayed(x: Tensor) -> Tensor:
    late: Tensor = Delay.apply(x)  # type: ignore[no-untyped-call]  # torch's own gap
    return late


class Late(nn.Module):
    """Its input and output come late."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.second(delayed(self.first(x)).tanh())
        return y


def experts(make: Callable[[], nn.Module] = Late, device: str = DEVICE) -> list[nn.Module]:
    torch.manual_seed(1)
    return [make().to(device, torch.float64) for _ in range(NUM_CALLS)]


def inputs(device: str = DEVICE) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    drawn = [torch.randn(4 + i, WIDTH, generator=generator, dtype=torch.float64) for i in range(NUM_CALLS)]
    return [x.to(device).requires_grad_() for x in drawn]


def parameters(modules: Iterable[nn.Module]) -> list[nn.Parameter]:
    return [p for module in modules for p in module.parameters()]


def grads_of(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [tensor.grad * 1 for tensor in tensors if tensor.grad is not None]


def values_of(tensors: Iterable[Tensor]) -> list[Tensor]:
    return [tensor.detach() * 1 for tensor in tensors]


def loss_of(outputs: Iterable[Tensor]) -> Tensor:
    return delayed(torch.cat(list(outputs))).square().sum()


def assert_same_of_modules(program: Callable[[Apply], Any]) -> None:
    torch.testing.assert_close(program(parallel_apply), program(one_after_another))


def layer(**options: Any) -> MixtureOfExperts:
    torch.manual_seed(3)
    made = [nn.Sequential(Late(), FeedForwardExpert(WIDTH)) for _ in range(4)]
    return MixtureOfExperts(TopKRouter(WIDTH, 4, top_k=2), made, **options).to(DEVICE, torch.float64)


def tokens() -> Tensor:
    return torch.cat(inputs()).detach()


def gradients_of(module: nn.Module, function: Callable[[Tensor], Tensor]) -> list[Tensor]:
    x = tokens().requires_grad_()
    for _ in range(2):  # the second adds to what the first has left
        loss_of([function(delayed(x))]).backward()
    return grads_of([x, *module.parameters()])
