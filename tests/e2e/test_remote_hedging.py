"""Hedged forwards: a second request overtakes a slow server, changes no number, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from experts_server import ExpertsServer
from experts_server.hosting.calls import BackwardCall, Call
from experts_server.hosting.kept import KeptForwards
from experts_server.serving.streams import PassStream
from moe_autograd.autograd.parallel import parallel_apply
from moe_autograd.errors import DeadlineExceededError, ExpertFailedError, ServerUnavailableError
from moe_autograd.remote import (
    HedgePolicy,
    RemoteExperts,
    RemoteOptimizer,
    RetryPolicy,
    connect,
    hedging,
    in_thread,
)
from moe_autograd.remote.calls import Request
from moe_autograd.remote.cancelling import Cancellation
from moe_autograd.remote.channel import Channel
from moe_autograd.remote.deadline import Deadline
from moe_autograd.remote.hedging import Hedging, Latencies
from moe_autograd.remote.operations import Operation
from moe_autograd.remote.retry import RetryBudget
from moe_autograd.wire import experts_pb2 as pb
from tests.support.servers import wait_until, wait_until_inside

SOON = HedgePolicy(first_after_s=0.05)
PATIENCE_S = 120.0


class Gated(nn.Module):
    """A linear layer that waits while its gate is closed."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.gate, self.begun = threading.Event(), threading.Event()
        self.gate.set()
        self.num_calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.num_calls += 1
        self.begun.set()
        assert self.gate.wait(2 * PATIENCE_S)
        return self.linear(x)


@dataclass
class Replica:
    server: ExpertsServer
    modules: dict[str, Gated]

    @property
    def kept(self) -> KeptForwards:
        assert self.server._server is not None
        return self.server._server.memory.kept


def make_replica() -> Replica:
    torch.manual_seed(0)
    modules = {f"ffn.{index}": Gated() for index in range(2)}
    server = ExpertsServer(modules, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0))
    return Replica(server.start(), modules)


@pytest.fixture
def replicas() -> Iterator[list[Replica]]:
    made = [make_replica(), make_replica()]
    yield made
    for replica in made:
        for module in replica.modules.values():
            module.gate.set()
        replica.server.stop()


def connected(replicas: list[Replica], **options) -> tuple[RemoteExperts, Replica, Replica]:
    """Connect; return the experts, the replica that this client asks first, and the other."""
    options = {"hedge": SOON, "timeout_s": PATIENCE_S, **options}
    experts = connect([replica.server.address for replica in replicas], **options)
    asked_first, _ = experts.connection._finding.hosts_of("ffn.0")
    first, other = sorted(replicas, key=lambda replica: replica.server.address != asked_first)
    return experts, first, other


def test_a_replica_overtakes_a_slow_server_with_the_same_numbers(replicas):
    experts, first, other = connected(replicas)
    with experts:
        first.modules["ffn.0"].gate.clear()
        x = torch.randn(3, 4, requires_grad=True)
        y = experts["ffn.0"](x)
        y.square().sum().backward()

        local_x = x.detach().clone().requires_grad_()
        local_y = first.modules["ffn.0"].linear(local_x)
        local_y.square().sum().backward()
        assert torch.equal(y, local_y)
        assert torch.equal(x.grad, local_x.grad)
        assert first.modules["ffn.0"].begun.wait(PATIENCE_S)
        assert other.modules["ffn.0"].num_calls == 1


def test_the_second_request_comes_after_what_most_forwards_take(replicas):
    """Not after the first time limit, which is endless here: ten quick forwards have taught how long they take."""
    experts, first, other = connected(replicas, hedge=HedgePolicy(first_after_s=1e6), timeout_s=1e6)
    with experts, torch.no_grad():
        for _ in range(10):
            experts["ffn.0"](torch.ones(1, 4))
        latencies = experts["ffn.0"]._connection._delivery._hedging.latencies
        # The last answer may be here before its thread has noted how long it took.
        wait_until(lambda: latencies.usual_s(first.server.address) < 1e6)
        num_before = other.modules["ffn.0"].num_calls
        first.modules["ffn.0"].gate.clear()
        assert torch.equal(
            experts["ffn.0"](torch.ones(1, 4)), first.modules["ffn.0"].linear(torch.ones(1, 4))
        )
        assert other.modules["ffn.0"].num_calls == num_before + 1


def test_the_server_that_lost_keeps_no_graph(replicas):
    experts, first, _ = connected(replicas)
    forwards = first.server._server.registry["ffn.0"].stats.kinds["forward"]
    with experts:
        slow = first.modules["ffn.0"]
        slow.gate.clear()
        y = experts["ffn.0"](torch.randn(3, 4, requires_grad=True))
        assert slow.begun.wait(PATIENCE_S)
        slow.gate.set()
        wait_until(lambda: forwards.num_calls == 1)  # what has begun ends
        wait_until(lambda: len(first.kept) == 0)
        y.sum().backward()


def test_nor_does_one_that_has_computed_it_and_whose_answer_never_arrives(replicas, monkeypatch):
    experts, first, other = connected(replicas)
    take_result = PassStream.take_result

    def take_of_other(stream: PassStream, call: Call, result: Any) -> None:
        if stream._settings is other.server._server.service or isinstance(call, BackwardCall):
            take_result(stream, call, result)

    monkeypatch.setattr(PassStream, "take_result", take_of_other)
    other.modules["ffn.0"].gate.clear()
    opening = threading.Thread(target=lambda: open_when(other.modules["ffn.0"], lambda: len(first.kept) == 1))
    opening.start()
    with experts:
        y = experts["ffn.0"](torch.randn(3, 4, requires_grad=True))
        wait_until(lambda: len(first.kept) == 0)
        y.sum().backward()
    opening.join(PATIENCE_S)


def open_when(module: Gated, is_so: Callable[[], bool]) -> None:
    wait_until(is_so)
    module.gate.set()


def test_the_request_that_lost_is_cancelled(replicas):
    """Neither its deadline nor the gate would end it before the wait for its end is over."""
    experts, first, _ = connected(replicas, timeout_s=1e6)
    first.modules["ffn.0"].gate.clear()
    with experts:
        experts["ffn.0"](torch.ones(1, 4))
        wait_until_inside(first.server, 0)


def test_requests_that_lost_count_as_slow_ones(replicas):
    experts, first, _ = connected(replicas)
    latencies = experts.connection._delivery._hedging.latencies
    first.modules["ffn.0"].gate.clear()
    with experts, torch.no_grad():
        for _ in range(10):
            experts["ffn.0"](torch.ones(1, 4))
        wait_until(lambda: latencies.usual_s(first.server.address) > SOON.first_after_s)


def test_only_calls_without_an_answer_are_asked_twice(replicas):
    experts, first, other = connected(replicas, hedge=HedgePolicy(first_after_s=2.0))
    with experts:
        first.modules["ffn.0"].gate.clear()
        outputs = parallel_apply(list(experts.values()), [(torch.ones(1, 4),)] * 2)
        for output, module in zip(outputs, first.modules.values(), strict=True):
            assert torch.equal(output, module.linear(torch.ones(1, 4)))
        assert [module.num_calls for module in other.modules.values()] == [1, 0]


def test_updates_count_once_however_often_forwards_are_asked(replicas):
    always = HedgePolicy(first_after_s=1e-9)
    experts, first, other = connected(replicas, hedge=always, retry=RetryPolicy(budget=1000.0))
    with experts:
        optimizer = RemoteOptimizer([experts["ffn.0"]])
        for _ in range(8):
            optimizer.zero_grad()
            experts["ffn.0"](torch.ones(1, 4)).sum().backward()
            optimizer.step()
        assert sum(replica.server.num_updates["ffn.0"] for replica in (first, other)) == 8


def test_hedging_ends_with_the_budget_of_retries(replicas):
    retry = RetryPolicy(budget=1.0, budget_per_success=0.0)
    experts, first, other = connected(replicas, retry=retry)
    with experts, torch.no_grad():
        slow = first.modules["ffn.0"]
        slow.gate.clear()
        x = torch.ones(1, 4)
        expected = slow.linear(x)
        assert torch.equal(experts["ffn.0"](x), expected)
        became: list[Tensor] = []
        second = threading.Thread(target=lambda: became.append(experts["ffn.0"](x)))
        second.start()
        second.join(10 * SOON.first_after_s)
        assert second.is_alive()
        slow.gate.set()
        second.join(PATIENCE_S)
        assert torch.equal(became[0], expected)
        assert other.modules["ffn.0"].num_calls == 1


def test_a_replica_that_is_gone_does_not_harm_the_first_request(replicas):
    experts, first, other = connected(replicas)
    with experts, torch.no_grad():
        other.server.stop()
        slow = first.modules["ffn.0"]
        slow.gate.clear()
        threading.Timer(10 * SOON.first_after_s, slow.gate.set).start()
        assert torch.equal(experts["ffn.0"](torch.ones(1, 4)), slow.linear(torch.ones(1, 4)))


def test_an_error_of_the_expert_is_raised_as_without_hedging(replicas):
    experts, *both = connected(replicas)
    for replica in both:
        replica.modules["ffn.0"].linear = nn.Linear(5, 5)
    with experts, pytest.raises(ExpertFailedError, match=r"expert 'ffn\.0' at .*, forward"):
        experts["ffn.0"](torch.ones(1, 4))


def test_what_a_server_could_not_compute_is_not_asked_of_another(replicas):
    experts, first, other = connected(replicas, hedge=HedgePolicy(first_after_s=1e6))
    first.modules["ffn.0"].linear = nn.Linear(5, 5)
    with experts, pytest.raises(ExpertFailedError):
        experts["ffn.0"](torch.ones(1, 4))
    assert other.modules["ffn.0"].num_calls == 0


def call_and_note(experts: RemoteExperts, became: list[BaseException]) -> None:
    try:
        experts["ffn.0"](torch.ones(1, 4))
    except BaseException as error:
        became.append(error)


def test_closing_ends_a_call_that_both_servers_keep_waiting(replicas):
    experts, first, other = connected(replicas)
    for replica in (first, other):
        replica.modules["ffn.0"].gate.clear()
    became: list[BaseException] = []
    thread = threading.Thread(target=call_and_note, args=(experts, became))
    thread.start()
    assert other.modules["ffn.0"].begun.wait(PATIENCE_S)
    experts.close()
    thread.join(PATIENCE_S)
    assert isinstance(became[0], ServerUnavailableError)
    with pytest.raises(ServerUnavailableError, match="closed"):
        experts["ffn.1"](torch.ones(1, 4))


def test_cancelling_a_task_ends_its_call_that_both_servers_keep_waiting(replicas):
    experts, first, other = connected(replicas)
    for replica in (first, other):
        replica.modules["ffn.0"].gate.clear()
    became: list[BaseException] = []

    async def cancel_it() -> None:
        task = asyncio.create_task(in_thread(call_and_note, experts, became))
        assert await asyncio.to_thread(other.modules["ffn.0"].begun.wait, PATIENCE_S)
        task.cancel()

    with experts:
        asyncio.run(cancel_it())  # which waits for its threads
    assert isinstance(became[0], ServerUnavailableError), "and not only with its deadline"


@pytest.mark.parametrize("policy", [SOON, HedgePolicy(first_after_s=1e6)], ids=str)
def test_a_call_ends_with_its_deadline_whatever_its_requests_do(monkeypatch, policy):
    never = threading.Event()
    monkeypatch.setattr(hedging, "exchange", lambda *_: never.wait())
    sender = Hedging(policy, RetryBudget(RetryPolicy()), Channel, lambda *_: None)
    operation = Operation(Deadline(0.2), Cancellation())
    request = Request("ffn.0", pb.ForwardCall(), [])
    ((address, outcome),) = sender.send("127.0.0.1:1", [request], ["127.0.0.1:2"], operation)
    never.set()
    assert address == "127.0.0.1:1"
    assert isinstance(outcome.error, DeadlineExceededError)
    assert "expert 'ffn.0' at 127.0.0.1:1, forward, after" in str(outcome.error)


class TestPolicy:
    def test_what_is_slow_is_learned_from_the_last_forwards(self):
        latencies = Latencies(HedgePolicy(quantile=0.9, first_after_s=7.0))
        for taken_s in range(1, 10):
            latencies.note("a", taken_s)
        assert (latencies.usual_s("a"), latencies.usual_s("b")) == (7.0, 7.0)
        latencies.note("a", 10)
        assert latencies.usual_s("a") == 9
        for _ in range(100):
            latencies.note("a", 0.5)
        assert latencies.usual_s("a") == 0.5

    def test_what_is_long_ago_counts_no_more(self):
        latencies = Latencies(HedgePolicy(quantile=0.99))
        for taken_s in [9.0] * 10 + [0.5] * 100:
            latencies.note("a", taken_s)
        assert latencies.usual_s("a") == 0.5

    @pytest.mark.parametrize(
        "bad",
        [{"quantile": 0.0}, {"quantile": 1.0}, {"first_after_s": 0.0}, {"first_after_s": True}],
        ids=str,
    )
    def test_what_is_none_is_refused(self, bad):
        with pytest.raises(ValueError, match="HedgePolicy: expected 0 < quantile < 1"):
            HedgePolicy(**bad)


def test_a_hedged_forward_is_left_at_no_server_that_its_backward_goes_to():
    named = {"ffn.0": nn.Linear(4, 4)}
    with (
        ExpertsServer(named) as one,
        ExpertsServer(named) as other,
        connect([one.address, other.address], hedge=True) as experts,
    ):
        y = experts["ffn.0"](torch.ones(2, 4, requires_grad=True))
        assert len(experts.connection.left_forwards) == 0
        del y
        assert len(experts.connection.left_forwards) == 1
