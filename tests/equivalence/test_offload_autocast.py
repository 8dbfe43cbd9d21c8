"""Offloaded experts under autocast, the caller's or their own, have the gradients of plain modules."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.support.offloading import OPTIMIZERS, assert_same_gradients, both, ffn


def test_autocast_and_half_precision_experts() -> None:
    experts, plain = both(lambda: ffn().to(torch.bfloat16), optimizer=OPTIMIZERS["sgd"])
    for modules in (experts, plain):
        modules[0](torch.ones(4, 8, dtype=torch.bfloat16)).sum().backward()
    assert_same_gradients(experts, plain)
    experts, plain = both(ffn)
    for modules in (experts, plain):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = modules[0](torch.ones(4, 8))
        y.float().sum().backward()
    assert_same_gradients(experts, plain)


def test_gradients_of_an_input_that_autocast_converts_twice_are_added_up_in_its_own_precision() -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.a(x).sigmoid() * self.b(x)

    experts, plain = both(Gated)
    x = torch.randn(40, 8, requires_grad=True)
    found = []
    for modules in (experts, plain):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = modules[0](x * 1.0)
        found.append(torch.autograd.grad(y.float().square().sum(), x)[0])
    assert torch.equal(*found)


def test_gradients_of_a_weight_that_autocast_converts_twice_are_those_of_a_plain_module_without_a_cache() -> (
    None
):
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(self.linear(x).relu())

    experts, plain = both(Tied, num=1)
    x = torch.randn(40, 8)
    for modules, caches in ((experts, True), (plain, False)):
        with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=caches):
            y = modules[0](x)
        y.float().square().sum().backward()
    assert torch.equal(experts.gradients(0)["linear.weight"], plain[0].linear.weight.grad)


def test_an_expert_that_runs_under_an_autocast_of_its_own_caches_what_it_converts() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return (self.linear(x).relu() + self.linear(x * 2)).float()

    experts, plain = both(Twice, num=1)
    x = torch.randn(40, 8)
    for modules in (experts, plain):
        modules[0](x).square().sum().backward()
    assert torch.equal(experts.gradients(0)["linear.weight"], plain[0].linear.weight.grad)
