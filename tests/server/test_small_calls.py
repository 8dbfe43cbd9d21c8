"""Which calls are computed where they come in, and which by a worker."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from experts_server import ExpertsServer
from experts_server.budget import Budget
from experts_server.hosting.calls import Call, ForwardCall
from experts_server.hosting.failing import FailureLog
from experts_server.hosting.hosted import HostedExpert, SharedMemory
from experts_server.hosting.kept import KeptForwards
from experts_server.queues import registry
from experts_server.queues.batching import Computed, ExpertQueue, QueueLimits
from moe_autograd.errors import DeadlineExceededError, ServerUnavailableError
from moe_autograd.moe.experts import FeedForwardExpert
from tests.support.hosting import sgd
from tests.support.servers import START_S, WireClient, tokens

D = 8


class Own(nn.Linear):
    """May do anything in its forward, as far as that can be read."""

    def forward(self, x: Tensor) -> Tensor:
        (y,) = map(super().forward, [x])
        return y


class Pooling(nn.Module):
    """Returns less than it takes, so that the gradient of what it returns is small."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        return y.mean(1)


def hooked() -> nn.Module:
    module = nn.Linear(D, D)
    module.register_forward_hook(lambda module, inputs, output: None)
    return module


def compiled() -> nn.Module:
    module = nn.Sequential(nn.Linear(D, D), nn.Tanh())
    module._compiled_call_impl = module._call_impl  # type: ignore[assignment]  # as `module.compile()` leaves it
    return module


def forward_and_backward(server: ExpertsServer, num_rows: int) -> tuple[Tensor, Tensor]:
    x, grad = tokens(num_rows, D, seed=1), tokens(num_rows, D, seed=2)
    with WireClient(server.address) as client:
        (y,) = client.forward("e", x).tensors
        (x_grad,) = client.backward("e", grad).tensors
    assert y is not None
    assert x_grad is not None
    return y, x_grad


def has_worked(server: ExpertsServer) -> bool:
    assert server._server is not None
    return any(worker.since for worker in server._server.pool._workers)


class Doubled(nn.Linear):
    """A class of a user's, whose forward can be read."""

    def forward(self, x: Tensor) -> Tensor:
        return 2 * torch.tanh(x @ self.weight.T)


@pytest.mark.parametrize(
    "module",
    [nn.Linear(D, D), FeedForwardExpert(D, 16), Doubled(D, D)],
    ids=["linear", "ffn", "a class of one's own"],
)
@pytest.mark.parametrize("num_rows", [3, 0])
def test_small_calls_of_an_expert_that_only_computes_need_no_worker(module: nn.Module, num_rows: int) -> None:
    with ExpertsServer({"e": module}, optimizer=sgd) as server:
        y, x_grad = forward_and_backward(server, num_rows)
        assert not has_worked(server)
    x = tokens(num_rows, D, seed=1).requires_grad_()
    expected = module(x)
    assert torch.equal(y, expected)
    assert torch.equal(x_grad, *torch.autograd.grad(expected, x, tokens(num_rows, D, seed=2)))


@pytest.mark.parametrize(
    ("module", "num_rows"),
    [
        (hooked(), 3),
        (Own(D, D), 3),
        (nn.Sequential(nn.Linear(D, D), nn.Dropout()), 3),
        (nn.Linear(D, D), 20_000),
        (FeedForwardExpert(D, 100_000), 0),
        (compiled(), 3),
    ],
    ids=[
        "a hook",
        "a class of one's own",
        "random numbers",
        "many rows",
        "no rows and many weights",
        "what is to be compiled",
    ],
)
def test_all_others_are_given_to_a_worker(module: nn.Module, num_rows: int) -> None:
    with ExpertsServer({"e": module}) as server:
        forward_and_backward(server, num_rows)
        assert has_worked(server)


def test_a_call_that_trains_a_dropout_after_an_evaluation_is_given_to_a_worker() -> None:
    module = nn.Sequential(nn.Linear(D, D), nn.Dropout()).eval()
    with ExpertsServer({"e": module}) as server, WireClient(server.address) as client:
        client.forward("e", tokens(3, D), evaluate=True)
        assert not has_worked(server)
        client.forward("e", tokens(3, D))
        assert has_worked(server)


def test_a_backward_is_as_large_as_its_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    compute_alone = ExpertQueue.compute_alone
    at_once: list[str] = []

    def noting(queue: ExpertQueue, call: Call) -> Computed:
        at_once.append(type(call).__name__)
        return compute_alone(queue, call)

    monkeypatch.setattr(ExpertQueue, "compute_alone", noting)
    with ExpertsServer({"e": Pooling()}) as server, WireClient(server.address) as client:
        for num_rows, expected in (3, ["ForwardCall", "BackwardCall"]), (20_000, []):
            client.forward("e", tokens(2 * num_rows, D).reshape(2, num_rows, D))
            client.backward("e", tokens(2, D))
            assert at_once == expected
            at_once.clear()


def test_an_optimizer_is_run_by_a_worker() -> None:
    with ExpertsServer({"e": nn.Linear(D, D)}, optimizer=sgd, update="on_backward") as server:
        with WireClient(server.address) as client:
            client.forward("e", tokens(3, D))
            assert not has_worked(server)
            client.backward("e", tokens(3, D))
        assert has_worked(server)


def test_small_calls_that_would_be_computed_as_one_are_given_to_a_worker() -> None:
    with ExpertsServer({"e": nn.Linear(D, D)}) as server, WireClient(server.address) as client:
        calls = [client.forward_call("e", tokens(1, D), call_id=number) for number in (1, 2)]
        assert [answer.code for answer in client.stream("Forward", calls)] == ["OK"] * 2
        assert has_worked(server)


def test_a_turn_that_raises_leaves_the_others_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    answer_alone = ExpertQueue.answer_alone
    raised: list[str] = []

    def breaking(queue: ExpertQueue, computed: Computed) -> None:
        answer_alone(queue, computed)
        if queue.hosted.name == "e.0":
            raised.append(queue.hosted.name)
            raise AssertionError("a bug of ours")

    monkeypatch.setattr(ExpertQueue, "answer_alone", breaking)
    names = [f"e.{index}" for index in range(3)]
    with (
        ExpertsServer({name: nn.Linear(D, D) for name in names}) as server,
        WireClient(server.address) as client,
    ):
        for _ in range(2):
            answers = client.stream("Forward", [client.forward_call(name, tokens(1, D)) for name in names])
            assert [answer.code for answer in answers] == ["OK"] * 3
        assert not has_worked(server)
    assert raised == ["e.0"] * 2


def test_a_call_whose_failure_cannot_be_noted_fails_alone(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(log: FailureLog, name: str, error: BaseException) -> None:
        raise AssertionError("whoever listens to the log has a bug")

    monkeypatch.setattr(FailureLog, "note", refuse)
    names = [f"e.{index}" for index in range(3)]
    with (
        ExpertsServer({name: nn.Linear(D, D) for name in names}) as server,
        WireClient(server.address) as client,
    ):
        for _ in range(2):
            xs = [tokens(1, D), tokens(1, D) / 0, tokens(1, D)]
            calls = [client.forward_call(name, x) for name, x in zip(names, xs, strict=True)]
            codes = {answer.result.call: answer.code for answer in client.stream("Forward", calls)}
            assert [codes[call] for call in sorted(codes)] == ["OK", "INTERNAL", "OK"]
        assert not has_worked(server)
    assert [record.getMessage() for record in caplog.records].count("a turn raised") == 2


def test_between_small_calls_the_loop_does_other_things(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "AT_ONCE_S", 0.0)
    seen: list[
        int
    ] = []  # at each turn, how many things the loop has done that were put to it at the turns before
    done: list[None] = []
    compute_alone = ExpertQueue.compute_alone

    def noting(queue: ExpertQueue, call: Call) -> Computed:
        seen.append(len(done))
        asyncio.get_running_loop().call_soon(done.append, None)
        return compute_alone(queue, call)

    monkeypatch.setattr(ExpertQueue, "compute_alone", noting)
    names = [f"e.{index}" for index in range(16)]
    with (
        ExpertsServer({name: nn.Linear(D, D) for name in names}) as server,
        WireClient(server.address) as client,
    ):
        answers = client.stream("Forward", [client.forward_call(name, tokens(1, D)) for name in names])
        assert [answer.code for answer in answers] == ["OK"] * 16
        assert not has_worked(server)
    assert seen[:16] == list(range(16))


class Pool:
    """Notes what is put into it."""

    def __init__(self) -> None:
        self.turns: list[ExpertQueue] = []

    def put(self, turns: Sequence[ExpertQueue]) -> None:
        self.turns += turns


@pytest.fixture
def queue() -> ExpertQueue:
    memory = SharedMemory(KeptForwards(1 << 20, 60), Budget(1 << 20, ""), Budget(1 << 20, ""))
    limits = QueueLimits(Budget(10, "calls"), Budget(1 << 20, "bytes"))
    pool: Any = Pool()
    return ExpertQueue(
        HostedExpert("e", nn.Identity(), None, memory), pool, limits, call_later=cast(Any, None)
    )


def call_of(queue: ExpertQueue, replies: list[object]) -> ForwardCall:
    call = ForwardCall(b"", lambda call, reply: replies.append(reply), 1, (torch.ones(1, D),))
    queue._limits.take([call])
    return call


def compute_and_answer(queue: ExpertQueue, call: ForwardCall) -> None:
    computed = queue.compute_alone(call)
    queue._limits.give_back([call])
    queue.answer_alone(computed)


def test_what_comes_while_a_turn_is_claimed_waits_for_a_worker(queue: ExpertQueue) -> None:
    pool: Any = queue._pool
    replies: list[object] = []
    first, second = call_of(queue, replies), call_of(queue, replies)
    assert queue.claim()
    assert not queue.claim()
    assert not queue.add(second)  # nobody has to put the queue into the pool
    compute_and_answer(queue, first)
    assert (len(replies), pool.turns, queue.claim()) == (1, [queue], False)
    pool.turns.pop().run()
    assert (len(replies), pool.turns, queue.claim()) == (2, [], True)


def test_a_claimed_call_that_nobody_waits_for_any_more_is_not_begun(queue: ExpertQueue) -> None:
    replies: list[object] = []
    call = call_of(queue, replies)
    assert queue.claim()
    call.is_cancelled, call.arrived_at = True, time.monotonic()
    compute_and_answer(queue, call)
    assert isinstance(replies[0], DeadlineExceededError)
    assert "got there after 0." in str(replies[0])
    assert (queue.stats.num_late, queue._limits.calls.in_use, queue.claim()) == (1, 0, True)
    assert not queue.stats.kinds["forward"].num_failed


def test_a_call_that_nobody_waits_for_when_its_turn_comes_leaves_its_room(queue: ExpertQueue) -> None:
    replies: list[object] = []
    call = call_of(queue, replies)
    assert queue.add(call)
    call.is_cancelled = True
    queue.run()
    assert isinstance(replies[0], DeadlineExceededError)
    assert (queue.stats.num_late, queue._limits.calls.in_use, queue.claim()) == (1, 0, True)


def test_a_turn_is_measured_and_ends_even_if_its_answer_fails(queue: ExpertQueue) -> None:
    expected_s, calls = queue.expected_s, [call_of(queue, []) for _ in range(2)]
    for call in calls:
        call.reply = cast(Any, None)
    assert queue.claim()
    with pytest.raises(TypeError):
        compute_and_answer(queue, calls[0])
    assert queue.expected_s != expected_s
    assert queue.add(calls[1])
    with pytest.raises(TypeError):
        queue.run()
    assert queue.claim()


def test_an_answer_leaves_whatever_becomes_of_the_numbers(queue: ExpertQueue) -> None:
    replies: list[object] = []
    assert queue.claim()
    computed = queue.compute_alone(call_of(queue, replies))
    assert 0 <= computed.compute_s < START_S
    queue.stats = cast(Any, None)
    with pytest.raises(AttributeError):
        queue.answer_alone(computed)
    assert len(replies) == 1


def test_a_closed_queue_answers_what_waits_and_begins_nothing(queue: ExpertQueue) -> None:
    pool: Any = queue._pool
    replies: list[object] = []
    first, second, third = (call_of(queue, replies) for _ in range(3))
    assert queue.claim()
    assert not queue.add(second)
    queue.close()
    assert isinstance(replies[0], ServerUnavailableError)
    assert queue._limits.calls.in_use == 2
    assert not queue.add(third)
    compute_and_answer(queue, first)
    assert (len(replies), pool.turns) == (2, [])
