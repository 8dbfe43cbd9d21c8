"""Offloaded experts whose weights are parametrized, within `parametrize.cached()`."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import weight_norm

from moe_autograd.autograd.offload import OffloadedExperts
from tests.support.offloading import OPTIMIZERS


def offloaded(module: nn.Module, **options: Any) -> OffloadedExperts:
    return OffloadedExperts([module], OPTIMIZERS["sgd"], max_resident_bytes=10_000, **options)


def test_a_second_call_within_parametrize_cached_is_refused() -> None:
    """It would share the graph of what the first has computed of the weights."""
    experts = offloaded(weight_norm(nn.Linear(4, 4)))
    x = torch.ones(2, 4)
    for _ in range(2):
        with parametrize.cached():
            y = experts[0](x)
            with pytest.raises(RuntimeError, match="expected one call within parametrize"):
                experts[0](x)
        y.sum().backward()


class Same(nn.Module):
    """Gives the weight itself: memory that is used again for other experts."""

    def forward(self, weight: Tensor) -> Tensor:
        return weight


class Doubled(nn.Module):
    """Counts how often it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.num_computed = 0

    def forward(self, weight: Tensor) -> Tensor:
        self.num_computed += 1
        return weight * 2


@pytest.mark.parametrize("parametrization", [Same, Doubled])
def test_without_gradients_calls_share_what_parametrize_cached_keeps(
    parametrization: type[nn.Module],
) -> None:
    """To a copy PyTorch gives what it keeps of the module that was copied."""

    def three() -> list[nn.Module]:
        torch.manual_seed(0)
        modules = [nn.Linear(4, 4) for _ in range(3)]
        for module in modules:
            parametrize.register_parametrization(module, "weight", parametrization())
        return modules

    plain, experts = three(), OffloadedExperts(three(), OPTIMIZERS["sgd"], max_resident_bytes=170)
    x = torch.randn(2, 4)
    with torch.no_grad(), parametrize.cached():
        for i in [0, 1, 2, 0, 1, 2]:
            assert torch.equal(experts[i](x), plain[i](x))
    if parametrization is Doubled:
        counts = [m.parametrizations["weight"][0].num_computed for m in (plain[0], experts[0].stands_for)]
        assert counts[0] == counts[1]


def test_a_second_call_of_a_copy_is_refused_as_well() -> None:
    experts = offloaded(copy.deepcopy(weight_norm(nn.Linear(4, 4))))
    with parametrize.cached():
        experts[0](torch.ones(2, 4))
        with pytest.raises(RuntimeError, match="expected one call within parametrize"):
            experts[0](torch.ones(2, 4))


def test_micro_batches_within_parametrize_cached_are_refused() -> None:
    experts = offloaded(weight_norm(nn.Linear(4, 4)), num_microbatches=2)
    with parametrize.cached(), pytest.raises(RuntimeError, match="a micro-batch counts"):
        experts[0](torch.ones(2, 4))


def test_parametrize_cached_within_an_experts_forward_is_as_in_plain_pytorch() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = weight_norm(nn.Linear(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            with parametrize.cached():
                return self.cell(self.cell(x))

    torch.manual_seed(0)
    plain = Recurrent()
    experts = offloaded(copy.deepcopy(plain), num_microbatches=2)
    for module in (plain, experts[0]):
        (module(torch.ones(2, 4)).sum() + module(torch.ones(2, 4)).sin().sum()).backward()
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(experts.gradients(0)[name], parameter.grad)
