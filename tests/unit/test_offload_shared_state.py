"""What of an offloaded optimizer's state shares memory is refused by name; what shares none trains as in memory."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe_autograd.autograd.offload import OffloadedExperts
from tests.support.offloading import assert_same_weights, both


class Momentum(torch.optim.Optimizer):
    """Finds what it has summed up of gradients in one place, and reads it in another."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        parameters = self.param_groups[0]["params"]
        if not self.state:
            self.begin(parameters)
        for index, parameter in enumerate(parameters):
            self.written(index, parameter).add_(parameter.grad.view(-1))
            parameter.sub_(self.state[parameter]["sum"].view(parameter.shape), alpha=0.1)

    def begin(self, parameters: list[Tensor]) -> None:
        for parameter in parameters:
            self.state[parameter]["sum"] = torch.zeros(parameter.numel())

    def written(self, index: int, parameter: Tensor) -> Tensor:
        written: Tensor = self.state[parameter]["sum"]
        return written


class OfAView(Momentum):
    def begin(self, parameters: list[Tensor]) -> None:
        super().begin(parameters)
        for parameter in parameters:
            self.state[parameter]["written"] = self.state[parameter]["sum"].view(-1)

    def written(self, index: int, parameter: Tensor) -> Tensor:
        written: Tensor = self.state[parameter]["written"]
        return written


class InATuple(Momentum):
    def begin(self, parameters: list[Tensor]) -> None:
        super().begin(parameters)
        for parameter in parameters:
            self.state[parameter]["sums"] = (self.state[parameter]["sum"],)

    def written(self, index: int, parameter: Tensor) -> Tensor:
        written: Tensor = self.state[parameter]["sums"][0]
        return written


class Flat(Momentum):
    """As apex and Megatron: one buffer, of which each tensor of the state is a view."""

    def begin(self, parameters: list[Tensor]) -> None:
        sizes = [parameter.numel() for parameter in parameters]
        self.keep(torch.zeros(sum(sizes)).split(sizes))
        for index, parameter in enumerate(parameters):
            self.state[parameter]["sum"] = self.written(index, parameter).view_as(parameter)

    def keep(self, flat: tuple[Tensor, ...]) -> None:
        self.flat = flat

    def written(self, index: int, parameter: Tensor) -> Tensor:
        return self.flat[index]


class FlatFromTheStart(Flat):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.begin(self.param_groups[0]["params"])


class FlatInAGroup(Flat):
    def keep(self, flat: tuple[Tensor, ...]) -> None:
        self.param_groups[0]["flat"] = flat[0]._base

    def written(self, index: int, parameter: Tensor) -> Tensor:
        flat: Tensor = self.param_groups[0]["flat"]
        return flat[:6] if parameter.dim() == 2 else flat[6:]


class OfTheWeights(Momentum):
    def begin(self, parameters: list[Tensor]) -> None:
        for parameter in parameters:
            self.state[parameter]["sum"] = parameter

    def written(self, index: int, parameter: Tensor) -> Tensor:
        return parameter.view(-1)


@pytest.mark.parametrize("update", ["on_step", "on_backward"])
@pytest.mark.parametrize("make", [OfAView, InATuple, Flat, FlatFromTheStart, FlatInAGroup, OfTheWeights])
def test_state_that_is_found_elsewhere_too_is_refused(make: Any, update: Any) -> None:
    """It had been torn apart, and the weights were others."""
    with pytest.raises(
        TypeError, match=r"expert-00000\.optimizer: expected tensors of the sta.*, got 'sum\."
    ):
        train(OffloadedExperts([nn.Linear(3, 2)], make, max_resident_bytes=1000, update=update))


def train(experts: OffloadedExperts) -> None:
    with experts:
        experts[0](torch.ones(1, 3)).sum().backward()
        experts.step()


class Rows(Momentum):
    """Its tensors come from one, and are not in each other's memory."""

    def begin(self, parameters: list[Tensor]) -> None:
        for parameter in parameters:
            state = self.state[parameter]
            state["sum"], state["other"] = torch.zeros(2, parameter.numel()).unbind(0)


class Columns(Momentum):
    def begin(self, parameters: list[Tensor]) -> None:
        for parameter in parameters:
            state = self.state[parameter]
            state["sum"], state["other"] = torch.zeros(parameter.numel(), 2).unbind(1)


class OneTable(Momentum):
    """As those of bitsandbytes: each state has a table that is an attribute of the optimizer."""

    def begin(self, parameters: list[Tensor]) -> None:
        super().begin(parameters)
        self.tables = {"rates": torch.ones(3)}
        for parameter in parameters:
            self.state[parameter]["rates"] = self.tables["rates"]


class Returns(Momentum):
    """As sharpness-aware ones: what a weight was before goes back there, without a copy."""

    def begin(self, parameters: list[Tensor]) -> None:
        super().begin(parameters)
        for parameter in parameters:
            self.state[parameter]["before"] = parameter.data

    def written(self, index: int, parameter: Tensor) -> Tensor:
        state = self.state[parameter]
        state["before"] = parameter.data
        parameter.data = parameter + 1
        parameter.data = state["before"]
        return super().written(index, parameter)


@pytest.mark.parametrize("make", [Rows, Columns, OneTable, Returns])
def test_state_that_shares_no_memory_trains_as_in_memory(make: Any) -> None:
    assert_trains(make)


def all_of_torch() -> Iterator[Any]:
    """Yield torch's optimizers that step by dense gradients, with each way of computing that they have."""
    for name, kind in inspect.getmembers(torch.optim, inspect.isclass):
        if name in ("Optimizer", "LBFGS", "SparseAdam"):
            continue
        takes = inspect.signature(kind).parameters
        for options in ({}, {"foreach": True}, {"fused": True}, {"amsgrad": True}, {"momentum": 0.9}):
            if options.keys() <= takes.keys():
                yield pytest.param(kind, options, id=" ".join([name, *options]))


@pytest.mark.parametrize(("kind", "options"), [*all_of_torch()])
def test_no_optimizer_of_torch_is_refused(kind: Any, options: dict[str, Any]) -> None:
    assert_trains(lambda parameters: kind([p for p in parameters if p.dim() == 2], lr=0.01, **options))


def assert_trains(make: Any) -> None:
    experts, plain = both(lambda: nn.Linear(3, 2), 2, make, max_resident_bytes=400)
    optimizers = [make(module.parameters()) for module in plain]
    with experts:
        for _ in range(3):
            x = torch.randn(4, 3)
            for modules in (experts, plain):
                torch.stack([module(x) for module in modules]).sum(0).square().mean().backward()
            for one in (experts, *optimizers):
                one.step()
                one.zero_grad()
        assert_same_weights(experts, plain)
