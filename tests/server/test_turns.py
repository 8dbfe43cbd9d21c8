"""Whose turn it is at an expert, and which calls are computed together.

The first joined calls of an expert that nobody knows are computed alone as well, to see whether they may be joined.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from threading import Semaphore

import pytest
import torch
from torch import Tensor

from experts_server import ExpertsServer
from experts_server.budget import Budget
from experts_server.configuration.config import BatchingConfig, ServingConfig
from experts_server.hosting.calls import ForwardCall
from experts_server.hosting.hosted import HostedExpert, SharedMemory
from experts_server.hosting.kept import KeptForwards
from experts_server.queues.batching import ExpertQueue, QueueLimits
from experts_server.queues.executor import WorkerPool
from tests.support.gated import D, Gated, Waiting, serving, wait_until_queued
from tests.support.hosting import sgd
from tests.support.servers import START_S, Answer, WireClient, tokens, wait_until


@pytest.fixture
def crowd() -> Iterator[tuple[Gated, list[Waiting], WireClient]]:
    """An expert that is busy with one row while calls of three clients wait for it."""
    gated = Gated()
    torch.manual_seed(0)
    gated.linear.reset_parameters()
    with serving({"e": gated}, batching=BatchingConfig(max_batch_tokens=8)) as server:
        clients = [WireClient(server.address, client_id=bytes([n])) for n in range(3)]
        waiting = [Waiting(lambda: clients[0].forward("e", tokens(1, D)))]
        assert gated.started.acquire(timeout=START_S)
        for index, client in enumerate(clients):
            rows = [2, 3, 9][index]
            waiting.append(Waiting(lambda c=client, r=rows: c.forward("e", tokens(r, D, seed=r), call_id=7)))
        wait_until_queued(server, 3)
        yield gated, waiting, clients[2]
        gated.let_go()
        for client in clients:
            client.channel.close()


def test_waiting_calls_of_several_clients_are_computed_together_up_to_the_limit(
    crowd: tuple[Gated, list[Waiting], WireClient],
) -> None:
    gated, waiting, _ = crowd
    gated.let_go()
    answers: list[Answer] = [w.result() for w in waiting]
    assert [a.code for a in answers] == ["OK"] * 4
    assert sorted(gated.rows) == [1, 2, 3, 5, 9], "two and three rows together, and alone as well; nine alone"
    for answer, rows in zip(answers[1:], (2, 3, 9), strict=True):
        torch.testing.assert_close(answer.tensors[0], gated.linear(tokens(rows, D, seed=rows)).detach())


def test_a_bad_call_among_joined_ones_fails_alone() -> None:
    class Picky(Gated):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            if bool((x > 50).any()):
                raise ArithmeticError("too large")
            return y

    picky = Picky()
    with serving({"e": picky}) as server:
        clients = [WireClient(server.address, client_id=bytes([n])) for n in range(3)]
        first = Waiting(lambda: clients[0].forward("e", tokens(1, D)))
        assert picky.started.acquire(timeout=START_S)
        inputs = [tokens(2, D), torch.full((2, D), 99.0), torch.full((2, D), float("nan"))]
        waiting = [
            Waiting(lambda c=client, x=x: c.forward("e", x, call_id=5))
            for client, x in zip(clients, inputs, strict=True)
        ]
        wait_until_queued(server, 3)
        picky.let_go()
        assert first.result().code == "OK"
        assert [w.result().code for w in waiting] == ["OK", "EXPERT_FAILED", "INVALID_CALL"]
        for client in clients:
            client.channel.close()


def test_the_turn_goes_round_between_clients() -> None:
    gated = Gated()
    config = {"batching": BatchingConfig(max_batch_tokens=1)}
    with serving({"e": gated}, **config) as server:
        greedy, modest = (WireClient(server.address, client_id=name) for name in (b"greedy", b"modest"))
        calls = [greedy.forward_call("e", tokens(1, D), call_id=n) for n in range(20)]
        many = Waiting(lambda: greedy.stream("Forward", calls))
        assert gated.started.acquire(timeout=START_S)
        wait_until_queued(server, 19)
        one = Waiting(lambda: modest.forward("e", tokens(2, D)))
        wait_until_queued(server, 20)
        gated.let_go()
        assert one.result().code == "OK"
        assert all(a.code == "OK" for a in many.result())
        assert gated.rows.index(2) <= 3, "the other's twenty calls did not come first"
        greedy.channel.close()
        modest.channel.close()


@pytest.mark.parametrize("shape", [(1, 3, D), (2, D)], ids=["of another shape", "too large for what is left"])
def test_a_client_whose_call_cannot_be_joined_is_not_passed_over_by_those_that_can(
    shape: tuple[int, ...],
) -> None:
    gated = Gated()
    with serving({"e": gated}, batching=BatchingConfig(max_batch_tokens=2)) as server:
        clients = {
            name: WireClient(server.address, client_id=name.encode()) for name in ("one", "odd", "two")
        }
        waiting = [Waiting(lambda: clients["one"].forward("e", tokens(1, D)))]
        assert gated.started.acquire(timeout=START_S)

        def put(name: str, x: Tensor, num_calls: int, num_queued: int) -> None:
            calls = [clients[name].forward_call("e", x, call_id=10 + n) for n in range(num_calls)]
            waiting.append(Waiting(lambda: clients[name].stream("Forward", calls)))
            wait_until_queued(server, num_queued)

        put("one", tokens(1, D), 20, 20)
        put("odd", torch.full(shape, 7.0), 1, 21)
        put("two", tokens(1, D), 20, 41)
        gated.let_go()
        for each in waiting:
            each.result()
        assert gated.rows[:4] == [1, 2, 1, 1], "a joined batch of the two others, and each of it alone"
        assert gated.firsts.index(7.0) == 4, "then what could not be joined with them"
        for client in clients.values():
            client.channel.close()


@contextlib.contextmanager
def joined(server: ExpertsServer) -> Iterator[list[WireClient]]:
    """Two clients whose forwards, of two rows and of three, were computed as one."""
    clients = [WireClient(server.address, client_id=bytes([n])) for n in range(2)]
    waiting = [
        Waiting(lambda c=c, r=r: c.forward("e", tokens(r, D))) for c, r in zip(clients, (2, 3), strict=True)
    ]
    assert [w.result().code for w in waiting] == ["OK", "OK"]
    yield clients
    for client in clients:
        client.channel.close()


def test_with_a_waiting_time_calls_that_come_one_after_the_other_are_joined() -> None:
    gated = Gated()
    gated.let_go()
    config = {"batching": BatchingConfig(max_batch_tokens=5, max_wait_ms=10_000)}
    with serving({"e": gated}, **config) as server, joined(server):
        assert sorted(gated.rows) == [2, 3, 5]


def test_with_a_waiting_time_small_calls_are_joined_as_well() -> None:
    batching = BatchingConfig(max_batch_tokens=5, max_wait_ms=10_000)
    with serving({"e": torch.nn.Linear(D, D)}, batching=batching) as server, joined(server):
        assert server._server is not None
        batches = server._server.registry["e"].stats.kinds["forward"].batch_calls
        assert (batches.total, batches.buckets()[-1]) == (2, ("+Inf", 1))


def test_with_a_waiting_time_what_has_all_rows_or_cannot_be_joined_waits_for_nobody() -> None:
    """Nor is there a second timer while one is set."""
    memory = SharedMemory(KeptForwards(1 << 20, 60), Budget(1 << 20, ""), Budget(1 << 20, ""))
    limits = QueueLimits(Budget(9, "calls"), Budget(1 << 20, "bytes"), max_batch_tokens=5)
    pool, timers = WorkerPool(), []

    def comes_at_once(*row_counts: int, can_join: bool = True, max_wait_s: float = 1.0) -> list[bool]:
        expert = HostedExpert("e", torch.nn.Linear(D, D), None, memory, can_join=can_join)
        own = replace(limits, max_wait_s=max_wait_s)
        queue = ExpertQueue(expert, pool, own, call_later=lambda seconds, _: timers.append(seconds))
        calls = [ForwardCall(b"", print, 1, (tokens(n, D),), (False,)) for n in row_counts]
        for call, num_rows in zip(calls, row_counts, strict=True):
            call.num_tokens = num_rows
        return [queue.add(call) for call in calls]

    assert comes_at_once(2, 2, 1) == [False, False, True]
    assert comes_at_once(5) == [True]
    assert comes_at_once(2, can_join=False) == [True]
    assert comes_at_once(2, max_wait_s=0.0) == [True]
    assert timers == [1.0]
    assert pool.close(START_S)


def test_a_waiting_time_that_is_over_later_than_the_wait_begins_no_second_turn() -> None:
    """The rows were all there before: a turn beside the one under way would call the module twice at once."""
    memory = SharedMemory(KeptForwards(1 << 20, 60), Budget(1 << 20, ""), Budget(1 << 20, ""))
    limits = QueueLimits(Budget(9, "calls"), Budget(1 << 20, "bytes"), max_batch_tokens=5, max_wait_s=1.0)
    pool, timers, answers = WorkerPool(), [], Semaphore(0)
    expert = HostedExpert("e", gated := Gated(), None, memory)
    queue = ExpertQueue(expert, pool, limits, call_later=lambda _, function: timers.append(function))

    def add(num_rows: int) -> bool:
        call = ForwardCall(b"", lambda *_: answers.release(), 1, (tokens(num_rows, D),), (False,))
        call.num_tokens = num_rows
        limits.take([call])
        return queue.add(call)

    assert [add(2), add(3)] == [False, True]
    pool.put([queue])
    assert gated.started.acquire(timeout=START_S)
    assert not add(4)
    wait_until(lambda: "busy=1 " in repr(pool))
    (over,) = timers
    for is_under_way in (True, False):
        before = repr(pool)
        over()
        assert repr(pool) == before, "it is there already" if is_under_way else "nothing waits"
        gated.let_go()
        assert all(answers.acquire(timeout=START_S) for _ in range(3 * is_under_way))
        wait_until(lambda: "busy=0 " in repr(pool))
    assert not add(1)
    gated.may_go = Semaphore(0)
    timers[-1]()
    assert not add(5), "the turn has begun"
    gated.let_go()
    assert all(answers.acquire(timeout=START_S) for _ in range(2))
    assert pool.close(START_S)


def test_a_call_that_has_waited_in_vain_for_others_is_computed_alone() -> None:
    gated = Gated()
    gated.let_go()
    config = {"batching": BatchingConfig(max_batch_tokens=5, max_wait_ms=50)}
    with serving({"e": gated}, **config) as server, WireClient(server.address) as client:
        for _ in range(2):
            assert client.forward("e", tokens(2, D)).code == "OK"
    assert gated.rows == [2, 2]


def test_a_backward_after_a_joined_forward_gives_each_client_its_own_gradients() -> None:
    gated = Gated()
    gated.let_go()
    config = ServingConfig(batching=BatchingConfig(max_batch_tokens=5, max_wait_ms=10_000))
    with ExpertsServer({"e": gated}, optimizer=sgd, config=config) as server, joined(server) as clients:
        weight = gated.linear.weight.detach().clone()
        for client, rows in zip(clients, (2, 3), strict=True):
            answer = client.backward("e", tokens(rows, D, seed=4))
            torch.testing.assert_close(answer.tensors[0], tokens(rows, D, seed=4) @ weight)
        clients[1].step()
        expected = weight - 0.1 * tokens(3, D, seed=4).T @ tokens(3, D)
        torch.testing.assert_close(gated.linear.weight.detach(), expected)
