"""Layers of experts on a device: the numbers of the plain loop, for every kind of expert, router and option.

Where there is a GPU, kernels are held up on their streams: a missing order between streams shows in the numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck

from moe_autograd import MixtureOfExperts, TopKRouter
from tests.support.devices import DEVICE
from tests.support.experts_held_up import (
    EXPERTS,
    ROUTERS,
    assert_equals_plain_loop,
    layer_of,
    step,
    tokens,
)
from tests.support.plain_layer import plain_loop

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("kind", EXPERTS)
def test_every_kind_of_expert_has_the_numbers_of_the_plain_loop(kind: str) -> None:
    assert_equals_plain_loop(lambda: layer_of(EXPERTS[kind]), tokens())


@pytest.mark.parametrize("kind", ROUTERS)
def test_every_router_has_the_numbers_of_the_plain_loop(kind: str) -> None:
    make_router = ROUTERS[kind]
    assert_equals_plain_loop(lambda: layer_of(EXPERTS["feed-forward"], make_router), tokens())


@pytest.mark.parametrize("num_tokens", [1, 300])
@pytest.mark.parametrize(
    "options",
    [
        {"max_concurrency": 2},
        {"recompute": True},
        {"defer_weight_grads": True},
        {"on_failure": "drop"},
        {"on_failure": "drop", "timeout_after_min_s": 60.0},
        {"zero_grads_for_idle_experts": True},
    ],
    ids=str,
)
def test_no_option_changes_a_number(options: dict[str, Any], num_tokens: int) -> None:
    ours, theirs = (layer_of(EXPERTS["swiglu"], **own) for own in (options, {}))
    x = tokens(num_tokens)
    got, expected = step(ours, ours, x), step(lambda x: plain_loop(theirs, x), theirs, x)
    idle = {name: torch.zeros_like(p) for name, p in ours.named_parameters()} if num_tokens < 2 else {}
    torch.testing.assert_close({**idle, **got}, {**idle, **expected})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["feed-forward", "attention"])
def test_under_autocast_a_layer_has_the_numbers_of_a_plain_loop_there(kind: str, dtype: torch.dtype) -> None:
    x = tokens(dtype=torch.float32).to(dtype)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        assert layer_of(EXPERTS[kind], dtype=torch.float32)(x).dtype is dtype
        make = lambda: layer_of(EXPERTS[kind], dtype=torch.float32)  # noqa: E731
        assert_equals_plain_loop(make, x, tolerance=5e-2)


def test_losses_of_the_routing_lead_to_the_router() -> None:
    layer, x = layer_of(EXPERTS["feed-forward"]), tokens()
    _, routing = layer(x, return_routing=True)
    alone, weights = layer.router(x), list(layer.router.parameters())
    of_layer = torch.autograd.grad(routing.load_balancing_loss + routing.z_loss, weights)
    of_router = torch.autograd.grad(alone.load_balancing_loss + alone.z_loss, weights)
    torch.testing.assert_close(of_layer, of_router)


@pytest.mark.parametrize("check", [gradcheck, gradgradcheck])
def test_derivatives_through_a_layer_are_exact(check: Callable[..., bool]) -> None:
    torch.manual_seed(5)
    experts = [nn.Sequential(nn.Linear(3, 3), nn.Tanh()) for _ in range(3)]
    layer = MixtureOfExperts(TopKRouter(3, 3, top_k=2), experts).to(DEVICE, torch.float64)
    names = ("router.weight", "experts.0.0.weight", "experts.2.0.bias")

    def call(x: Tensor, *values: Tensor) -> Tensor:
        y: Tensor = torch.func.functional_call(layer, dict(zip(names, values, strict=True)), (x,))
        return y

    leaves = [torch.randn(4, 3, dtype=torch.float64).to(DEVICE), *map(layer.get_parameter, names)]
    leaves = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    assert check(call, leaves, fast_mode=True, nondet_tol=1e-12)
