"""Forwards whose graph is gone stay on no server: it hears of them with the client's next pass."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from experts_server import ExpertsServer
from moe_autograd import parallel_apply
from moe_autograd.errors import (
    DeadlineExceededError,
    ExpertFailedError,
    ServerUnavailableError,
)
from moe_autograd.remote import HedgePolicy, RemoteExpert, RemoteOptimizer, RetryPolicy, closing, connect
from tests.support.held import Held
from tests.support.hosting import sgd
from tests.support.proxy import Proxy
from tests.support.servers import START_S, WireClient, num_kept, tokens, wait_until, wait_until_inside

D = 4


@pytest.fixture(scope="module")
def server() -> Iterator[ExpertsServer]:
    with ExpertsServer({"a": nn.Linear(D, D), "b": nn.Linear(D, D)}, optimizer=sgd) as server:
        yield server


@pytest.fixture(autouse=True)
def last_words_may_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine they do."""
    monkeypatch.setattr(closing, "_LAST_WORD_S", 60.0)


@pytest.fixture
def expert(server: ExpertsServer) -> Iterator[RemoteExpert]:
    with connect(server.address) as experts:
        yield experts["a"]


class Broken(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise ArithmeticError("a bug on the server")


def checkpointed(use_reentrant: bool) -> Callable[[RemoteExpert], None]:
    def train(expert: RemoteExpert) -> None:
        x = torch.ones(2, D, requires_grad=True)
        y = checkpoint(lambda x: expert(torch.relu(expert(x))), x, use_reentrant=use_reentrant)
        y.sum().backward()

    return train


def looked_at(expert: RemoteExpert) -> None:
    expert(torch.ones(2, D)).sum().detach()


def retained(expert: RemoteExpert) -> None:
    y = expert(torch.ones(2, D)).sum()
    y.backward(retain_graph=True)
    y.backward(retain_graph=True)


def refused(expert: RemoteExpert) -> None:
    y = expert(torch.ones(2, D))
    y.register_hook(lambda grad: grad / 0)
    with pytest.raises(RuntimeError, match="finite"):
        y.sum().backward()


def test_a_server_forgets_what_it_has_of_calls_some_of_whose_experts_have_moved_away(
    server: ExpertsServer,
) -> None:
    with WireClient(server.address) as client:
        for name in ("a", "b"):
            client.forward(name, tokens(2, D))
        client.forget(a=1, gone=1, b=1)
    assert num_kept(server) == 0


@pytest.mark.usefixtures("no_gc")
@pytest.mark.parametrize("program", [checkpointed(True), checkpointed(False), looked_at, retained, refused])
def test_what_has_no_backward_any_more_is_forgotten(
    server: ExpertsServer, expert: RemoteExpert, program: Callable[[RemoteExpert], None]
) -> None:
    for _ in range(3):
        program(expert)
    expert(torch.ones(1, D)).sum().backward()
    wait_until(lambda: num_kept(server) == 0)


@pytest.mark.usefixtures("no_gc")
def test_a_forward_that_was_repeated_after_its_connection_broke_is_forgotten(server: ExpertsServer) -> None:
    with Proxy(server.address) as proxy, connect(proxy.address) as experts:
        proxy.cut_after("answers", 1)
        looked_at(experts["a"])
        assert proxy.num_cut == 1
        experts["b"](torch.ones(1, D)).sum().backward()
        wait_until(lambda: num_kept(server) == 0)


@pytest.mark.usefixtures("no_gc")
def test_what_is_lost_on_its_way_is_told_once_more(server: ExpertsServer) -> None:
    with Proxy(server.address) as proxy, connect(proxy.address) as experts:
        left = experts["a"]._connection.left_forwards
        looked_at(experts["a"])
        kept = num_kept(server)
        proxy.is_gone = True
        proxy.cut()
        left.tell()
        wait_until(lambda: len(left) == 1)  # it did not arrive
        assert num_kept(server) == kept
        proxy.is_gone = False
        experts["b"](torch.ones(1, D)).sum().backward()
        wait_until(lambda: num_kept(server) == 0)


class FirstWaits(nn.Linear):
    """Of all its copies, the one that is called first waits."""

    def __init__(self, *, is_first: threading.Semaphore, may_go: threading.Event) -> None:
        super().__init__(D, D)
        self.is_first, self.may_go = is_first, may_go

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_first.acquire(blocking=False):
            assert self.may_go.wait(START_S)
        return super().forward(x)


@pytest.mark.usefixtures("no_gc")
def test_a_forward_that_another_server_answered_first_is_forgotten() -> None:
    is_first, may_go = threading.Semaphore(1), threading.Event()
    replicas = [FirstWaits(is_first=is_first, may_go=may_go) for _ in range(2)]
    hedge = HedgePolicy(first_after_s=0.01)
    with (
        ExpertsServer({"e": replicas[0]}, optimizer=sgd) as one,
        ExpertsServer({"e": replicas[1]}, optimizer=sgd) as other,
        connect([one.address, other.address], hedge=hedge) as experts,
    ):
        looked_at(experts["e"])
        may_go.set()

        def are_forgotten() -> bool:
            experts["e"](torch.ones(1, D)).sum().backward()
            return num_kept(one) + num_kept(other) == 0

        wait_until(are_forgotten)


class Begins(nn.Linear):
    """Calls `begin` first."""

    begin = staticmethod(lambda: None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.begin()
        return super().forward(x)


@pytest.mark.usefixtures("no_gc")
@pytest.mark.parametrize("hedge", [False, HedgePolicy(first_after_s=0.01)])
def test_a_forward_whose_answer_was_lost_before_a_replica_answered_is_forgotten(
    hedge: HedgePolicy | bool,
) -> None:
    replicas = [Begins(D, D), Begins(D, D)]
    optimizer = sgd if hedge else None  # else a forward of a training goes to no replica
    with (
        ExpertsServer({"e": replicas[0]}, optimizer=optimizer) as one,
        ExpertsServer({"e": replicas[1]}, optimizer=optimizer) as other,
        Proxy(one.address) as to_one,
        Proxy(other.address) as to_other,
        connect([to_one.address, to_other.address], timeout_s=START_S, hedge=hedge) as experts,
    ):
        is_one = experts["e"].hosted.addresses[0] == to_one.address
        asked_first, proxy = (one, to_one) if is_one else (other, to_other)
        first, second = replicas if is_one else replicas[::-1]
        if hedge:
            has_begun = threading.Event()
            first.begin = lambda: has_begun.wait(START_S)
            second.begin = lambda: (has_begun.set(), wait_until(lambda: proxy.num_cut == 1))
        proxy.cut_after("answers", 100_000)  # in the middle of the answer: it has been computed
        proxy.is_gone = True
        y = experts["e"](torch.ones(1 << 14, D, requires_grad=True))
        assert proxy.num_cut == 1
        assert num_kept(asked_first) == 1
        first.begin = second.begin = lambda: None
        y.sum().backward()
        proxy.is_gone = False

        def are_forgotten() -> bool:
            experts["e"](torch.ones(1, D, requires_grad=True)).sum().backward()
            return num_kept(one) + num_kept(other) == 0

        wait_until(are_forgotten)


def test_what_answered_in_a_pass_that_failed_is_forgotten(
    server: ExpertsServer, expert: RemoteExpert
) -> None:
    with ExpertsServer({"broken": Broken()}) as other, connect([server.address, other.address]) as experts:
        for _ in range(3):
            with pytest.raises(ExpertFailedError):
                parallel_apply([experts["a"], experts["broken"]], [(torch.ones(2, D),)] * 2)
        assert num_kept(server) > 0
        experts["b"](torch.ones(1, D)).sum().backward()
        wait_until(lambda: num_kept(server) == 0)


def test_a_graph_goes_with_an_update_however_many_later_ones_were_forgotten() -> None:
    module = nn.Sequential(nn.Linear(D, D), nn.Sigmoid(), nn.Linear(D, D))
    with (
        ExpertsServer({"e": module}, optimizer=sgd) as server,
        connect(server.address) as experts,
        connect(server.address) as others,
    ):
        x = torch.ones(2, D, requires_grad=True)
        y = experts["e"](x)
        for _ in range(40):
            looked_at(experts["e"])
        others["e"](torch.ones(1, D)).sum().backward()
        RemoteOptimizer(others).step()
        (expected,) = torch.autograd.grad(module(x).sum(), x)
        y.sum().backward()
        torch.testing.assert_close(x.grad, expected)


def test_a_server_that_was_lost_hears_of_it_when_it_is_back(server: ExpertsServer) -> None:
    retry = RetryPolicy(patience_s=0.0)
    with Proxy(server.address) as proxy, connect(proxy.address, retry=retry) as experts:

        def answers() -> bool:
            try:
                experts["a"](torch.ones(1, D)).sum().backward()
            except ServerUnavailableError:
                return False
            return True

        y = experts["a"](torch.ones(2, D))
        proxy.is_gone = True
        proxy.cut()
        with pytest.raises(ServerUnavailableError):
            y.sum().backward()
        del y
        gc.collect()
        assert not answers()
        assert num_kept(server) == 1
        proxy.is_gone = False
        wait_until(answers)
        assert answers()
        wait_until(lambda: num_kept(server) == 0)


def test_what_nobody_waits_for_when_it_is_computed_is_not_kept() -> None:
    held = Held("forward")
    with ExpertsServer({"held": held}) as server, connect(server.address, timeout_s=0.5) as experts:
        with pytest.raises(DeadlineExceededError):
            experts["held"](torch.ones(1, D, requires_grad=True))
        assert held.begun.wait(START_S)
        wait_until_inside(server, 0)
        held.may_go.set()
        assert server._server is not None
        queue = server._server.registry["held"]
        wait_until(lambda: queue.computing_since is None)
        assert num_kept(server) == 0


def test_what_may_have_a_backward_is_kept(server: ExpertsServer, expert: RemoteExpert) -> None:
    x = torch.ones(2, D, requires_grad=True)
    y = expert(x)
    looked_at(expert)
    expert(torch.ones(1, D)).sum().backward()
    wait_until(lambda: num_kept(server) == 1)
    y.sum().backward(retain_graph=True)
    assert num_kept(server) == 1
    y.sum().backward()
    assert num_kept(server) == 0
    assert x.grad is not None
    del y
    assert len(expert._connection.left_forwards) == 0, "nobody is to be told: it is gone there"


def test_a_client_forgets_its_own_forwards_only(server: ExpertsServer) -> None:
    with WireClient(server.address) as one, WireClient(server.address, client_id=b"other") as other:
        one.forward("a", tokens(2, D), call_id=7)
        other.forget(a=7, b=7)
        assert num_kept(server) == 1
        one.forget(a=7, b=7)
        assert num_kept(server) == 0


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_what_can_have_no_backward_is_not_kept(
    server: ExpertsServer, expert: RemoteExpert, mode: Callable[[], torch.no_grad]
) -> None:
    num_before = num_kept(server)
    with mode():
        expert(torch.ones(2, D))
    assert num_kept(server) <= num_before
