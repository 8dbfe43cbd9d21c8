"""Whichever of eight servers are lost, a layer goes on as the plain loop over the experts of the others."""

from __future__ import annotations

import copy
import random
from collections.abc import Collection, Iterator

import pytest
import torch
from torch import Tensor, nn

from experts_server import ExpertsServer
from moe_autograd.moe.layer import MixtureOfExperts
from moe_autograd.moe.routers import TopKRouter
from moe_autograd.remote import RemoteExperts, RemoteOptimizer, RetryPolicy, connect, link
from tests.support.hosting import LR, sgd
from tests.support.proxy import Proxy
from tests.support.survivors import combine_survivors

NUM_SERVERS, EACH, D_MODEL = 8, 2, 8
NUM_EXPERTS = NUM_SERVERS * EACH
ALL = frozenset(range(NUM_SERVERS))
SINGLE = [frozenset({server}) for server in ALL]
# All 256 have been tried.
SUBSETS = [
    *[frozenset[int](), ALL, *SINGLE[::3], *(ALL - single for single in SINGLE[1::3])],
    *(frozenset(random.Random(seed).sample(range(NUM_SERVERS), 2 + seed % 5)) for seed in range(10)),
]


class Fleet:
    """Eight servers of two experts, each behind a proxy, and a client of them."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.modules = [nn.Linear(D_MODEL, D_MODEL).double() for _ in range(NUM_EXPERTS)]
        self.router = TopKRouter(D_MODEL, NUM_EXPERTS, top_k=2).double()
        self.servers = [ExpertsServer(self.hosted_by(server), optimizer=sgd).start() for server in ALL]
        self.proxies = [Proxy(server.address).__enter__() for server in self.servers]

    def hosted_by(self, server: int) -> dict[str, nn.Module]:
        return {f"ffn.{index}": self.modules[index] for index in experts_of({server})}

    def close(self) -> None:
        for proxy, server in zip(self.proxies, self.servers, strict=True):
            proxy.__exit__()
            server.stop()

    def lose(self, lost: Collection[int]) -> None:
        for server in lost:
            self.proxies[server].is_gone = True
            self.proxies[server].cut()

    def give_back(self) -> None:
        for proxy in self.proxies:
            proxy.is_gone = False

    @property
    def num_updates(self) -> list[int]:
        return [self.servers[index // EACH].num_updates[f"ffn.{index}"] for index in range(NUM_EXPERTS)]


def experts_of(servers: Collection[int]) -> set[int]:
    return {server * EACH + place for server in servers for place in range(EACH)}


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    fleet = Fleet()
    yield fleet
    fleet.close()


@pytest.fixture
def experts(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> Iterator[RemoteExperts]:
    """Without pings: a server that is too busy to answer one would be lost as well."""
    without_pings = tuple(option for option in link.CHANNEL_OPTIONS if "keepalive" not in option[0])
    monkeypatch.setattr(link, "CHANNEL_OPTIONS", without_pings)
    fleet.give_back()
    retry = RetryPolicy(patience_s=0.0)
    with connect([proxy.address for proxy in fleet.proxies], retry=retry) as experts:
        yield experts


def tokens() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(128, D_MODEL, dtype=torch.float64, generator=generator).requires_grad_()


def close(actual: Tensor, expected: Tensor, what: str) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6, msg=lambda text: f"{what}: {text}")


@pytest.mark.parametrize("phase", ["forward", "backward", "step"])
@pytest.mark.parametrize("servers", SUBSETS, ids=lambda servers: "".join(map(str, sorted(servers))) or "none")
def test_whichever_servers_are_lost_the_layer_is_the_plain_loop_over_the_survivors(
    fleet: Fleet, experts: RemoteExperts, servers: frozenset[int], phase: str
) -> None:
    """Values, gradients, failures, and the updates: each is made once, or not at all, and then said to have failed."""
    lost, x, router = experts_of(servers), tokens(), copy.deepcopy(fleet.router)
    plain = [copy.deepcopy(module) for module in fleet.modules]
    in_phase = {f"lost_in_{phase}": lost} if phase != "step" else {}
    expected_y = combine_survivors(x, fleet.router(x), plain, **in_phase)
    of_x, of_router, *of_weights = torch.autograd.grad(
        expected_y.square().mean(),
        [x, fleet.router.weight, *(module.weight for module in plain)],
        allow_unused=True,
        materialize_grads=True,
    )
    layer = MixtureOfExperts(router, experts, on_failure="drop", allow_zero_outputs=True)
    optimizer = RemoteOptimizer(experts, on_failure="drop")
    optimizer.zero_grad()
    assert optimizer.failures == []
    num_before = fleet.num_updates

    if phase == "forward":
        fleet.lose(servers)
    y, routing = layer(x, return_routing=True)
    assert (routing.tokens_per_expert > 0).all()
    assert routing.failures == [] or phase == "forward"
    if phase == "backward":
        fleet.lose(servers)
    y.square().mean().backward()
    if phase == "step":
        fleet.lose(servers)
    optimizer.step()

    close(y, expected_y, "y")
    assert x.grad is not None and router.weight.grad is not None  # noqa: PT018
    close(x.grad, of_x, "gradient of x")
    close(router.weight.grad, of_router, "gradient of the router")
    assert {(failure.expert_index, failure.phase) for failure in routing.failures} == {
        (index, phase) for index in lost if phase != "step"
    }
    assert len(optimizer.failures) == (0 if phase == "forward" else len(servers))
    for index, (before, now) in enumerate(zip(num_before, fleet.num_updates, strict=True)):
        assert now - before == (index not in lost)
        update = -LR * of_weights[index] if index not in lost else torch.zeros_like(of_weights[index])
        close(fleet.modules[index].weight - plain[index].weight, update, f"update of expert {index}")
