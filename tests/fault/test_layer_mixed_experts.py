"""A layer that drops experts is the plain loop over the survivors, however its experts are reached, and whoever fails.

By themselves, which are called together; wrapped, or with a hook, which are called alone; over two connections; on
servers that keep a graph, recompute, or answer a backward before its weights' gradients are there.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from experts_server import ExpertsServer
from experts_server.configuration.config import MemoryConfig, ServingConfig
from moe_autograd.errors import InvalidCallError
from moe_autograd.moe.layer import MixtureOfExperts
from moe_autograd.moe.routers import TopKRouter
from moe_autograd.remote import RemoteExpert, RemoteOptimizer, connect
from tests.support.fragile import Fragile
from tests.support.survivors import combine_survivors

NUM_EXPERTS, D_MODEL, LR, NUM_ROUNDS = 6, 4, 1e-3, 40
SAVINGS = [MemoryConfig(), MemoryConfig(recompute=True), MemoryConfig(recompute=True, split_backward=True)]


@pytest.fixture(scope="module")
def modules() -> list[Fragile]:
    torch.manual_seed(0)
    return [Fragile(D_MODEL) for _ in range(NUM_EXPERTS)]


@pytest.fixture(scope="module")
def experts(modules: list[Fragile]) -> Iterator[list[RemoteExpert]]:
    def serve(place: int) -> ExpertsServer:
        named = {f"ffn.{i}": modules[i] for i in range(place, NUM_EXPERTS, len(SAVINGS))}
        config = ServingConfig(memory=SAVINGS[place])
        return ExpertsServer(named, optimizer=lambda p: torch.optim.SGD(p, lr=LR), config=config)

    with (
        serve(0) as first,
        serve(1) as second,
        serve(2) as third,
        connect([first.address, second.address]) as some,
        connect(third.address) as others,
    ):
        by_name = {**some, **others}
        yield [by_name[f"ffn.{i}"] for i in range(NUM_EXPERTS)]


def close(actual: Tensor | None, expected: Tensor, what: str) -> None:
    found = torch.zeros_like(expected) if actual is None else actual
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6, msg=lambda text: f"{what}: {text}")


@pytest.mark.parametrize("seed", range(NUM_ROUNDS))
def test_it_is_the_plain_loop_over_the_survivors(
    experts: list[RemoteExpert], modules: list[Fragile], seed: int
) -> None:
    chance = random.Random(seed)
    torch.manual_seed(seed)
    top_k = chance.randint(1, 3)
    min_experts, recompute = chance.randint(1, top_k), chance.random() < 0.3
    fates = chance.choices(["", "forward", "backward"], [2, 1, 1], k=NUM_EXPERTS)
    ways = chance.choices(["alone", "wrapped", "hooked"], [2, 1, 1], k=NUM_EXPERTS)
    lost = {phase: {i for i, fate in enumerate(fates) if fate == phase} for phase in ("forward", "backward")}
    shown = f"top_k={top_k}, min_experts={min_experts}, recompute={recompute}, {list(zip(ways, fates, strict=True))}"
    router = TopKRouter(D_MODEL, NUM_EXPERTS, top_k).double()
    x = torch.randn(16, D_MODEL, dtype=torch.float64, requires_grad=True)
    own_x, own_router = x.detach().clone().requires_grad_(), copy.deepcopy(router)
    linears = [copy.deepcopy(module.linear) for module in modules]
    plain = [
        nn.Sequential(nn.Tanh(), linear) if way == "wrapped" else linear
        for way, linear in zip(ways, linears, strict=True)
    ]
    expected_y = combine_survivors(
        x,
        router(x),
        plain,
        lost_in_forward=lost["forward"],
        lost_in_backward=lost["backward"],
        min_experts=min_experts,
    )
    expected_y.square().sum().backward()

    handles = [
        expert.register_forward_hook(lambda *_: None)
        for expert, way in zip(experts, ways, strict=True)
        if way == "hooked"
    ]
    called = [
        nn.Sequential(nn.Tanh(), expert) if way == "wrapped" else expert
        for expert, way in zip(experts, ways, strict=True)
    ]
    optimizer = RemoteOptimizer(experts)
    optimizer.zero_grad()
    for module, fate in zip(modules, fates, strict=True):
        module.fails_in = fate
    try:
        layer = MixtureOfExperts(
            own_router,
            called,
            on_failure="drop",
            min_experts=min_experts,
            allow_zero_outputs=True,
            recompute=recompute,
        )
        y, routing = layer(own_x, return_routing=True)
        y.square().sum().backward()
    finally:
        for handle in handles:
            handle.remove()
    optimizer.step()
    close(y, expected_y, f"y, {shown}")
    close(own_x.grad, x.grad, f"gradient of x, {shown}")
    close(own_router.weight.grad, router.weight.grad, f"gradient of the router, {shown}")
    for index, (linear, module) in enumerate(zip(linears, modules, strict=True)):
        grad = torch.zeros_like(linear.weight) if linear.weight.grad is None else linear.weight.grad
        close((linear.weight - module.linear.weight) / LR, grad, f"update of expert {index}, {shown}")
    is_called = routing.tokens_per_expert > 0
    assert {failure.expert_index for failure in routing.failures if failure.phase == "forward"} == {
        index for index in lost["forward"] if is_called[index]
    }
    assert {failure.expert_index for failure in routing.failures if failure.phase == "backward"} <= lost[
        "backward"
    ]


def test_an_error_that_is_raised_all_the_same_names_the_kind_of_expert(experts: list[RemoteExpert]) -> None:
    layer = MixtureOfExperts(TopKRouter(D_MODEL, 1, top_k=1), experts[:1], on_failure="drop")
    with pytest.raises(InvalidCallError) as raised:
        layer(torch.randn(2, D_MODEL))
    assert "raised by call 0 (RemoteExpert) of 1" in str(raised.value.__notes__)
