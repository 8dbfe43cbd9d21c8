"""Offloaded experts under autocast, the caller's or their own, have the gradients of plain modules."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe_autograd import MixtureOfExperts, TopKRouter
from tests.support.offloading import OPTIMIZERS, assert_same_gradients, both, ffn

PAGE = (Path(__file__).parents[2] / "docs/offload.md").read_text(encoding="utf-8")


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("optimizer", ["momentum", "adam", "adamw fused"])
def test_a_grad_scaler_is_used_as_the_page_says_and_leaves_out_steps_that_are_not_finite(
    optimizer: str, dtype: torch.dtype
) -> None:
    make = OPTIMIZERS[optimizer]
    experts, plain = both(ffn, optimizer=make)
    routers = [TopKRouter(8, 5, top_k=2) for _ in range(2)]
    routers[1].load_state_dict(routers[0].state_dict())
    layers = [MixtureOfExperts(routers[0], experts), MixtureOfExperts(routers[1], plain)]
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
    of_router, of_all = make(routers[0].parameters()), make(layers[1].parameters())
    page: dict[str, Any] = {"torch": torch, "experts": experts}
    clipping, scaling = (
        part.removeprefix("python") for part in PAGE.split("## Clipping")[1].split("```")[1:4:2]
    )
    exec(clipping.split("def clip")[0], page)
    exec(scaling.replace('("cpu")', '("cpu", init_scale=64.0)'), page)
    for step in range(5):
        x, losses = torch.randn(12, 8), []
        for layer in layers:
            with torch.autocast("cpu", dtype=dtype):
                losses.append(layer(x).float().square().mean() * (float("inf") if step == 2 else 1.0))
        page["train"](losses[0], of_router)
        scaler.scale(losses[1]).backward()
        scaler.step(of_all)
        scaler.update()
        for one in (experts, of_router, of_all):
            one.zero_grad()
        got = [routers[0].state_dict(), *(experts.state_dict(i) for i in range(5))]
        want = [module.state_dict() for module in (routers[1], *plain)]
        # one bit of float32 decides between two neighbours in half precision
        torch.testing.assert_close(got, want, rtol=0, atol=1e-3)
        assert page["scaler"].get_scale() == scaler.get_scale() == (64.0 if step < 2 else 32.0)
