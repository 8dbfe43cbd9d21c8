"""A layer with a timeout for stragglers goes on without experts that take too long, and their servers let them be."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from experts_server import ExpertsServer
from moe_autograd.autograd.offload import OffloadedExperts
from moe_autograd.moe.experts import FeedForwardExpert
from moe_autograd.moe.layer import MixtureOfExperts
from moe_autograd.moe.routers import TopKRouter
from moe_autograd.remote import HedgePolicy, RemoteExperts, connect
from tests.support.proxy import Proxy
from tests.support.servers import WireClient
from tests.support.survivors import combine_survivors

NUM_EXPERTS, D_MODEL = 4, 4
LONG_S = 120.0


class Held(nn.Module):
    """A linear layer that can be held in its forward or backward until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D_MODEL, D_MODEL).double()
        self.held_in = ""
        self.is_reached, self.may_go = threading.Event(), threading.Event()
        self.shapes: list[tuple[int, ...]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.shapes.append(tuple(x.shape))
        if self.held_in == "forward":
            self._hold()
        y = self.linear(x)
        if self.held_in == "backward":
            y.register_hook(lambda grad: self._hold())
        return y

    def _hold(self) -> None:
        self.is_reached.set()
        assert self.may_go.wait(LONG_S)


@dataclass(frozen=True)
class Hosted:
    modules: list[Held]
    experts: RemoteExperts
    other: RemoteExperts  # another client of the same server
    router: TopKRouter

    def layer(self, **options) -> MixtureOfExperts:
        return MixtureOfExperts(self.router, self.experts, on_failure="drop", **options)

    def tokens(self) -> Tensor:
        """Return tokens that go to expert 0 and one other each: none of the others can be given up before it."""
        generator = torch.Generator().manual_seed(1)
        x = torch.randn(64, D_MODEL, dtype=torch.float64, generator=generator)
        x = x[(self.router(x).expert_index == 0).any(dim=1)]
        assert (self.router(x).tokens_per_expert > 0).all()
        return x.requires_grad_()

    def expected(self, x: Tensor, **lost) -> Tensor:
        return combine_survivors(x, self.router(x), [module.linear for module in self.modules], **lost)


@pytest.fixture
def hosted() -> Iterator[Hosted]:
    torch.manual_seed(0)
    modules = [Held() for _ in range(NUM_EXPERTS)]
    router = TopKRouter(D_MODEL, NUM_EXPERTS, top_k=2).double()
    named = {f"ffn.{index}": module for index, module in enumerate(modules)}
    with (
        ExpertsServer(named) as server,
        connect(server.address, timeout_s=LONG_S) as experts,
        connect(server.address, timeout_s=LONG_S) as other,
    ):
        try:
            yield Hosted(modules, experts, other, router)
        finally:
            for module in modules:
                module.may_go.set()


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_straggler_is_a_failure_with_a_reason(hosted, phase):
    hosted.modules[0].held_in = phase
    x = hosted.tokens()
    y, routing = hosted.layer(timeout_after_min_s=0.05)(x, return_routing=True)
    expected_y = hosted.expected(x, **{f"lost_in_{phase}": {0}})
    actual = torch.autograd.grad(y.square().sum(), [x, hosted.router.weight])
    expected = torch.autograd.grad(expected_y.square().sum(), [x, hosted.router.weight])
    torch.testing.assert_close((y, *actual), (expected_y, *expected), rtol=1e-6, atol=1e-6)
    (failure,) = routing.failures
    assert (failure.expert, failure.phase) == ("ffn.0", phase)
    assert failure.reason.startswith("StragglerError: expert 'ffn.0' at 127.0.0.1")
    assert failure.reason.endswith(
        "given up 0.05 s after every token had what it needs (min_experts=1, timeout_after_min_s=0.05)"
    )


def test_a_straggler_that_is_asked_for_twice_is_one_all_the_same(hosted):
    hosted.modules[0].held_in = "forward"
    named = {f"ffn.{index}": module for index, module in enumerate(hosted.modules)}
    addresses, soon = hosted.experts.connection.addresses, HedgePolicy(first_after_s=0.01)
    with (
        ExpertsServer(named) as replica,
        connect([*addresses, replica.address], timeout_s=LONG_S, hedge=soon) as experts,
    ):
        layer = MixtureOfExperts(hosted.router, experts, on_failure="drop", timeout_after_min_s=0.05)
        x = hosted.tokens()
        y, routing = layer(x, return_routing=True)
        hosted.modules[0].may_go.set()
    torch.testing.assert_close(y, hosted.expected(x, lost_in_forward={0}), rtol=1e-6, atol=1e-6)
    (failure,) = routing.failures
    assert failure.reason.startswith("StragglerError: expert 'ffn.0' at 127.0.0.1")


def test_a_straggler_is_given_up_also_where_what_the_others_need_was_sent_again(hosted):
    """Their server has let go of the forwards, and answers when it has computed these once more."""
    hosted.modules[0].held_in = "backward"
    x = hosted.tokens()
    y, routing = hosted.layer(timeout_after_min_s=0.05)(x, return_routing=True)
    connection = hosted.experts.connection
    with WireClient(connection.addresses[0], connection.numbering.client_id) as client:
        client.forget(**{f"ffn.{index}": index + 1 for index in range(NUM_EXPERTS)})
    y.sum().backward()
    assert [len(module.shapes) for module in hosted.modules[1:]] == [2] * (NUM_EXPERTS - 1)
    (failure,) = routing.failures
    assert (failure.expert, failure.phase) == ("ffn.0", "backward")
    assert failure.reason.startswith("StragglerError: expert 'ffn.0' at 127.0.0.1")


@pytest.mark.parametrize("recompute", [False, True])
def test_a_straggler_is_given_up_beside_an_offloaded_expert_that_has_answered(hosted, recompute):
    hosted.modules[0].held_in = "forward"
    offloaded = OffloadedExperts(
        [nn.Linear(D_MODEL, D_MODEL).double()],
        lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        max_resident_bytes=1 << 20,
    )
    with offloaded:
        layer = MixtureOfExperts(
            TopKRouter(D_MODEL, 2, top_k=2).double(),
            [hosted.experts["ffn.0"], offloaded[0]],
            on_failure="drop",
            timeout_after_min_s=0.05,
            recompute=recompute,
        )
        x = torch.randn(3, D_MODEL, dtype=torch.float64, requires_grad=True)
        y, routing = layer(x, return_routing=True)
        (failure,) = routing.failures
        assert (failure.expert, failure.reason[:16]) == ("ffn.0", "StragglerError: ")
        torch.testing.assert_close(y, offloaded[0](x))
        y.sum().backward()


def test_an_expert_that_some_token_needs_is_waited_for(hosted):
    """With two of two needed, all others may have answered long ago: nobody is given up."""
    hosted.modules[0].held_in = "forward"

    def let_go() -> None:
        assert hosted.modules[0].is_reached.wait(LONG_S)
        for _ in range(20):  # whoever gives up does it meanwhile
            hosted.other["ffn.1"](x.detach())
        hosted.modules[0].may_go.set()

    x = hosted.tokens()
    thread = threading.Thread(target=let_go)
    thread.start()
    y, routing = hosted.layer(min_experts=2, timeout_after_min_s=0.0)(x, return_routing=True)
    thread.join()
    assert routing.failures == []
    torch.testing.assert_close(y, hosted.expected(x))


def test_a_straggler_that_has_not_begun_never_does(hosted):
    module, x = hosted.modules[0], hosted.tokens()
    module.held_in = "forward"
    one_row, three_rows = torch.ones(1, D_MODEL).double(), torch.ones(3, D_MODEL).double()
    first = threading.Thread(target=lambda: hosted.other["ffn.0"](one_row))
    first.start()
    assert module.is_reached.wait(LONG_S)
    _, routing = hosted.layer(timeout_after_min_s=0.05)(x, return_routing=True)
    assert [failure.expert for failure in routing.failures] == ["ffn.0"]
    for _ in range(20):  # behind the cancellation, on the same connection: the server has heard of it
        hosted.experts["ffn.1"](one_row)
    module.may_go.set()
    hosted.experts["ffn.0"](three_rows)
    first.join()
    assert module.shapes == [(1, D_MODEL), (3, D_MODEL)]


def test_a_server_that_falls_silent_is_not_waited_for():
    torch.manual_seed(0)
    here, there = FeedForwardExpert(D_MODEL), FeedForwardExpert(D_MODEL)
    with (
        ExpertsServer({"ffn.0": there}) as server,
        Proxy(server.address) as proxy,
        connect(proxy.address, timeout_s=LONG_S) as experts,
    ):
        layer = MixtureOfExperts(
            TopKRouter(D_MODEL, 2, top_k=2),
            [here, experts["ffn.0"]],
            on_failure="drop",
            timeout_after_min_s=0.05,
        )
        x = torch.randn(8, D_MODEL)
        proxy.is_black_hole = True
        y, routing = layer(x, return_routing=True)
        assert [failure.expert for failure in routing.failures] == ["ffn.0"]
        torch.testing.assert_close(y, here(x))


@pytest.mark.parametrize("num_connections", [1, 2])
def test_backwards_of_two_threads_through_one_pass_wait_each_for_its_own_calls(hosted, num_connections):
    straggler = hosted.modules[0]
    straggler.held_in = "backward"
    straggler.may_go.set()
    x = hosted.tokens()
    experts = list(hosted.experts.values())
    if num_connections == 2:  # several groups: their backwards run on workers
        experts[1:] = list(hosted.other.values())[1:]
    layer = MixtureOfExperts(hosted.router, experts, on_failure="drop", timeout_after_min_s=0.05)
    y, routing = layer(x, return_routing=True)
    both_began, is_first_over = threading.Barrier(2), threading.Event()
    grads: dict[str, Tensor] = {}

    def follow(grad: Tensor) -> None:
        both_began.wait(LONG_S)
        if threading.current_thread() is second:
            assert is_first_over.wait(LONG_S)
            straggler.may_go.clear()

    def go_backward() -> None:
        (grads[threading.current_thread().name],) = torch.autograd.grad(y.sum(), [x], retain_graph=True)

    y.register_hook(follow)
    first = threading.Thread(target=go_backward, name="first", daemon=True)
    second = threading.Thread(target=go_backward, name="second", daemon=True)
    first.start()
    second.start()
    first.join(LONG_S / 2)
    assert not routing.failures
    is_first_over.set()
    second.join(LONG_S / 4)
    (failure,) = routing.failures
    assert (failure.expert, failure.phase) == ("ffn.0", "backward")
    for name, lost in (("first", set()), ("second", {0})):
        (expected,) = torch.autograd.grad(hosted.expected(x, lost_in_backward=lost).sum(), [x])
        torch.testing.assert_close(grads[name], expected, rtol=1e-6, atol=1e-6)


def test_no_thread_is_left_behind(hosted):
    layer = hosted.layer(timeout_after_min_s=LONG_S)
    layer(hosted.tokens()).sum().backward()
    for thread in threading.enumerate():
        if isinstance(thread, threading.Timer):
            thread.join(LONG_S / 2)
            assert not thread.is_alive()
