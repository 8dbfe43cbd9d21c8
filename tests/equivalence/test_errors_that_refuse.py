"""An exception that refuses attributes, as a frozen dataclass does, comes out itself of whatever it passes through."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from moe_autograd import (
    MixtureOfExperts,
    TopKRouter,
    parallel_apply,
    run_isolated_backward,
    run_isolated_forward,
    split_backward,
)
from moe_autograd.autograd.offload import OffloadedExperts
from moe_autograd.timeline import record_timeline
from tests.support.functions_waiting import Calls

D = 4


@dataclass(frozen=True, eq=False)
class Frozen(Exception):
    """Refuses attributes, those of Python's own as well."""

    code: int


class Refusing(nn.Linear):
    def __init__(self, where: str) -> None:
        super().__init__(D, D)
        self.where = where

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        if self.where == "forward":
            refuse()
        if self.where == "backward":
            y.register_hook(refuse)
        return y


def refuse(*_: object) -> Any:
    raise Frozen(7)


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def mapped(modules: list[nn.Module], x: Tensor, **options: Any) -> Tensor:
    return torch.stack(parallel_apply(modules, [(x,)] * len(modules), **options)).sum()


def layered(modules: list[nn.Module], x: Tensor, **options: Any) -> Tensor:
    loss: Tensor = MixtureOfExperts(TopKRouter(D, len(modules), len(modules)), modules, **options)(x).sum()
    return loss


def recorded(modules: list[nn.Module], x: Tensor) -> Tensor:
    with record_timeline():
        return mapped(modules, x)


def offloaded(modules: list[nn.Module], x: Tensor, **options: Any) -> Tensor:
    return mapped(OffloadedExperts(modules, sgd, max_resident_bytes=10**6, **options)[:], x)  # type: ignore[arg-type]


WAYS: dict[str, Callable[[list[nn.Module], Tensor], Tensor]] = {
    "a map": mapped,
    "recompute": lambda modules, x: mapped(modules, x, recompute=True),
    "deferred": lambda modules, x: mapped(modules, x, defer_weight_grads=True),
    "one at a time": lambda modules, x: mapped(modules, x, max_concurrency=1),
    "a layer": layered,
    "a layer with recompute": lambda modules, x: layered(modules, x, recompute=True),
    "a layer that drops": lambda modules, x: layered(modules, x, on_failure="drop"),
    "a timeline": recorded,
    "offloaded": offloaded,
    "offloaded, with updates in backwards": lambda modules, x: offloaded(modules, x, update="on_backward"),
    "offloaded, with slices": lambda modules, x: offloaded(modules, x, num_microbatches=2),
}


@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("way", WAYS)
def test_what_a_module_raises_that_refuses_attributes_is_raised_itself(way: str, where: str) -> None:
    x = torch.randn(6, D, requires_grad=True)
    with pytest.raises(Frozen):
        WAYS[way]([Refusing(where), Refusing(where)], x).backward()


@pytest.mark.parametrize("way", WAYS)
def test_what_unpacks_a_saved_tensor_may_raise_what_refuses_attributes(way: str) -> None:
    x = torch.randn(6, D, requires_grad=True)
    with saved_tensors_hooks(lambda tensor: tensor, refuse):
        loss = WAYS[way]([Refusing("nowhere"), Refusing("nowhere")], x)
    with pytest.raises(Frozen):
        loss.backward()


@pytest.mark.parametrize("update", ["on_step", "on_backward"])
def test_what_an_optimizer_raises_that_refuses_attributes_is_raised_itself(update: Any) -> None:
    def train() -> None:
        experts[0](torch.ones(2, D)).sum().backward()
        experts.step()

    class Optimizer(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            refuse()

    experts = OffloadedExperts(
        [nn.Linear(D, D)], lambda p: Optimizer(p, lr=0.1), max_resident_bytes=10**6, update=update
    )
    with pytest.raises(Frozen):
        train()


def test_the_halves_of_a_call_and_of_a_backward_raise_what_refuses_attributes_itself() -> None:
    x = torch.ones(2, requires_grad=True)
    with pytest.raises(Frozen):
        run_isolated_forward(Calls, x, refuse, None)
    context, _ = run_isolated_forward(Calls, x, None, refuse)
    with pytest.raises(Frozen):
        run_isolated_backward(Calls, context, torch.ones(2))
    module, inputs = Refusing("backward"), torch.ones(2, D, requires_grad=True)
    with pytest.raises(Frozen):
        split_backward([module(inputs)], [torch.ones(2, D)], [inputs], list(module.parameters()))
