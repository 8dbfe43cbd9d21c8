"""One expert, client or call does not spoil another's day: hanging, raising, slow, cancelled, late."""

from __future__ import annotations

import asyncio
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import grpc
import pytest
from torch import nn

from experts_server import ExpertsServer
from experts_server.budget import Budget
from experts_server.configuration.config import LimitsConfig, ServingConfig
from experts_server.hosting.calls import ForwardCall, InspectCall
from experts_server.hosting.hosted import HostedExpert, SharedMemory
from experts_server.hosting.kept import KeptForwards
from experts_server.queues.batching import ExpertQueue, QueueLimits
from experts_server.serving import server as server_module
from moe_autograd.errors import DeadlineExceededError
from moe_autograd.moe.experts import FeedForwardExpert
from moe_autograd.wire import methods
from moe_autograd.wire.parcels import ParcelWriter
from tests.support.gated import D, Gated, Waiting, serving, wait_until_queued
from tests.support.hosting import sgd
from tests.support.parcels import messages_of
from tests.support.servers import (
    START_S,
    WireClient,
    tokens,
    wait_until,
    wait_until_inside,
)


def test_many_hanging_experts_hold_up_no_other() -> None:
    hanging = {f"hangs.{n}": Gated() for n in range(12)}
    with serving({**hanging, "ffn.0": FeedForwardExpert(D)}) as server, WireClient(server.address) as client:
        calls = [client.forward_call(name, tokens(2, D), call_id=1) for name in hanging]
        waiting = Waiting(lambda: client.stream("Forward", calls))
        for gated in hanging.values():
            assert gated.started.acquire(timeout=START_S), "all of them run at once"
        assert client.forward("ffn.0", tokens(2, D), call_id=2).code == "OK"
        for gated in hanging.values():
            gated.let_go()
        assert [a.code for a in waiting.result()] == ["OK"] * 12


def test_results_of_quick_experts_come_before_a_slow_sibling_is_done() -> None:
    slow = Gated()
    experts = {"slow": slow, **{f"ffn.{n}": FeedForwardExpert(D) for n in range(4)}}
    with serving(experts) as server, WireClient(server.address) as client:
        writer = ParcelWriter()
        numbers = [writer.add(*client.forward_call(name, tokens(2, D))) for name in experts]
        answers = client.stream_messages("Forward", messages_of(writer))
        first = [next(answers)[0] for _ in range(4)]
        assert sorted(first) == numbers[1:]
        slow.let_go()
        assert next(answers)[0] == numbers[0]


@pytest.mark.parametrize("num_rows", [2, 200_000], ids=["one message", "several"])
def test_a_server_that_was_told_the_last_message_does_not_wait_for_the_end_of_the_stream(
    num_rows: int,
) -> None:
    is_answered = threading.Event()

    def messages(writer: ParcelWriter) -> Iterator[bytes]:
        yield from messages_of(writer)
        assert is_answered.wait(START_S)

    with serving({"e": nn.Identity()}) as server, WireClient(server.address) as client:
        writer = ParcelWriter()
        numbers = [writer.add(*client.forward_call("e", tokens(num_rows, D))) for _ in range(2)]
        writer.is_complete = True
        answers = [number for number, _ in client.stream_messages("Forward", messages(writer))]
        is_answered.set()
    assert sorted(answers) == numbers


def test_a_call_whose_client_went_away_is_never_begun() -> None:
    gated = Gated()
    with serving({"e": gated}) as server, WireClient(server.address) as client:
        first = Waiting(lambda: client.forward("e", tokens(1, D)))
        assert gated.started.acquire(timeout=START_S)
        writer = ParcelWriter()
        writer.add(*client.forward_call("e", tokens(5, D)))
        call = client.channel.stream_stream(methods.path("Forward"))(messages_of(writer), timeout=START_S)
        wait_until_queued(server, 1)
        second = Waiting(lambda: client.forward("e", tokens(2, D), call_id=2))
        wait_until_queued(server, 2)
        call.cancel()
        wait_until_inside(server, 2)
        gated.let_go()
        assert (first.result().code, second.result().code) == ("OK", "OK")
    assert 5 not in gated.rows


def test_calls_that_come_too_late_to_be_begun_are_counted() -> None:
    gated = Gated()
    with serving({"e": gated}, metrics_listen="127.0.0.1:0") as server, WireClient(server.address) as client:
        first = Waiting(lambda: client.forward("e", tokens(1, D)))
        assert gated.started.acquire(timeout=START_S)
        for _ in range(3):
            with pytest.raises(grpc.RpcError, match="DEADLINE_EXCEEDED"):
                client.stream("Forward", [client.forward_call("e", tokens(5, D))], timeout_s=0.2)
        wait_until_inside(server, 1)
        gated.let_go()
        assert first.result().code == "OK"
        assert client.forward("e", tokens(2, D)).code == "OK"
        assert server.metrics_address is not None
        with urllib.request.urlopen(f"http://{server.metrics_address}/metrics", timeout=START_S) as reply:
            shown = reply.read().decode()
    assert 'experts_late_calls_total{expert="e"} 3.0' in shown
    assert 5 not in gated.rows


def test_a_deadline_is_kept_while_an_expert_hangs_and_expired_work_is_not_begun() -> None:
    gated = Gated()
    with serving({"e": gated}) as server, WireClient(server.address) as client:
        first = Waiting(lambda: client.forward("e", tokens(1, D)))
        assert gated.started.acquire(timeout=START_S)
        with pytest.raises(grpc.RpcError) as expired:
            client.stream("Forward", [client.forward_call("e", tokens(5, D))], timeout_s=0.2)
        assert expired.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        wait_until_inside(server, 1)
        gated.let_go()
        assert first.result().code == "OK"
        assert client.forward("e", tokens(2, D), call_id=2).code == "OK"
    assert gated.rows == [1, 2]


# ---- queues


@pytest.mark.parametrize(
    ("limits", "text"),
    [
        ({"max_queued_calls": 2}, "queued calls: expected at most 2, got 1 more than the 2 in use"),
        ({"max_queued_bytes": 200}, "queued bytes: expected at most 200"),
    ],
)
def test_a_full_queue_answers_busy_at_once_with_a_hint_and_serves_again_after(
    limits: dict[str, int], text: str
) -> None:
    gated = Gated()
    with serving({"e": gated}, limits=LimitsConfig(**limits)) as server, WireClient(server.address) as client:
        first = Waiting(lambda: client.forward("e", tokens(1, D)))
        assert gated.started.acquire(timeout=START_S)
        calls = [client.forward_call("e", tokens(3, D), call_id=n) for n in range(2, 6)]
        waiting = Waiting(lambda: client.stream("Forward", calls))
        wait_until_queued(server, 1)
        busy = client.stream("Forward", [client.forward_call("e", tokens(6, D), call_id=9)])[0]
        assert (busy.code, text in busy.text) == ("BUSY", True), busy.text
        assert busy.result.status.retry_after_s > 0
        gated.let_go()
        assert first.result().code == "OK"
        assert {a.code for a in waiting.result()} == {"OK", "BUSY"}
        assert client.forward("e", tokens(1, D)).code == "OK"


def test_calls_that_nobody_waits_for_behind_an_expert_that_hangs_take_no_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server_module, "UPKEEP_S", 0.05)
    gated, limits = Gated(), LimitsConfig(max_queued_calls=4)
    with (
        serving({"hangs": gated, "e": nn.Linear(D, D)}, limits=limits) as server,
        WireClient(server.address) as client,
    ):
        assert server._server is not None
        first = Waiting(lambda: client.forward("hangs", tokens(1, D)))
        assert gated.started.acquire(timeout=START_S)
        calls = [client.forward_call("hangs", tokens(1, D), call_id=n) for n in range(2, 5)]
        try:  # the server may say it first, of each call
            told = {answer.code for answer in client.stream("Forward", calls, timeout_s=0.2)}
        except grpc.RpcError as error:
            told = {error.code().name}
        assert told == {"DEADLINE_EXCEEDED"}
        room = server._server.queue_limits
        wait_until(lambda: room.calls.in_use == 1)
        assert room.bytes.in_use == tokens(1, D).nbytes
        later = [client.forward_call("e", tokens(1, D), call_id=n) for n in range(5, 8)]
        assert [answer.code for answer in client.stream("Forward", later)] == ["OK"] * 3
        gated.let_go()
        assert first.result().code == "OK"
        assert client.forward("hangs", tokens(1, D)).code == "OK"


def test_a_server_that_is_full_saves_and_tells_its_weights(tmp_path: Path) -> None:
    gated, limits = Gated(), LimitsConfig(max_queued_calls=1)
    with (
        serving({"hangs": gated, "e": nn.Linear(D, D)}, limits=limits, checkpoint_dir=tmp_path) as server,
        WireClient(server.address) as client,
    ):
        first = Waiting(lambda: client.forward("hangs", tokens(1, D)))
        assert gated.started.acquire(timeout=START_S)
        assert client.forward("e", tokens(1, D)).code == "BUSY"
        assert set(client.get_state("e")) == {"e"}
        saved = Waiting(client.save)
        wait_until_inside(server, 2)
        gated.let_go()
        assert first.result().code == "OK"
        assert saved.result() == "generation-00000002"


def test_calls_that_are_refused_leave_their_room_to_others() -> None:
    limits = LimitsConfig(max_queued_calls=3)
    with serving({"e": nn.Linear(D, D)}, limits=limits) as server, WireClient(server.address) as client:
        wrong = [("e", tokens(1, D + 1), "INVALID_CALL"), ("none", tokens(1, D), "EXPERT_NOT_FOUND")]
        calls = [client.forward_call(name, x, call_id=n) for n, (name, x, _) in enumerate(wrong)]
        for _ in range(3):
            answers = client.stream("Forward", calls)
            assert [answer.code for answer in answers] == [code for *_, code in wrong]
        assert client.forward("e", tokens(1, D)).code == "OK"
        assert server._server is not None
        assert repr(server._server.queue_limits.calls).endswith(": 0 of 3>")


def test_a_look_that_nobody_waits_for_any_more_is_not_begun() -> None:
    gated, looks = Gated(), []
    with serving({"e": gated}) as server, WireClient(server.address) as client:
        assert server._server is not None
        registry = server._server.registry
        first = Waiting(lambda: client.forward("e", tokens(1, D)))
        assert gated.started.acquire(timeout=START_S)
        (nothing,) = asyncio.run(registry.inspect(["e"], lambda _: looks.append("late"), 0.01))
        assert isinstance(nothing, TimeoutError)
        gated.let_go()
        assert first.result().code == "OK"
        asyncio.run(registry.inspect(["e"], lambda _: looks.append("in time")))
        assert looks == ["in time"]


def test_an_update_of_more_experts_than_calls_may_wait_is_made_in_parts() -> None:
    experts = {f"e.{index}": nn.Linear(D, D) for index in range(5)}
    config = ServingConfig(limits=LimitsConfig(max_queued_calls=2))
    with (
        ExpertsServer(experts, optimizer=sgd, config=config) as server,
        WireClient(server.address) as client,
    ):
        for call_id, name in enumerate(experts):
            client.forward(name, tokens(3, D), call_id=call_id)
            assert client.backward(name, tokens(3, D), call_id=call_id).code == "OK"
        reply = client.step(*experts)
        assert [(update.expert, update.num_updates) for update in reply.updates] == [(n, 1) for n in experts]
        assert [update.num_updates for update in client.zero_grad(*experts).updates] == [1] * 5


def test_an_expert_that_hangs_is_told_once_to_forget_what_is_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "UPKEEP_S", 0.01)
    gated, limits = Gated(), LimitsConfig(gathered_gradient_s=0.1)
    with (
        ExpertsServer({"e": gated}, optimizer=sgd, config=ServingConfig(limits=limits)) as server,
        WireClient(server.address) as client,
    ):
        assert server._server is not None
        gated.let_go(1)
        client.forward("e", tokens(1, D))
        assert client.backward("e", tokens(1, D)).code == "OK"
        budget, queue = server._server.memory.gathered, server._server.registry["e"]
        hangs = Waiting(lambda: client.forward("e", tokens(1, D), call_id=2))
        assert gated.started.acquire(timeout=START_S)
        assert gated.started.acquire(timeout=START_S)
        wait_until(lambda: len(queue) == 1)
        looks: list[None] = []
        monkeypatch.setattr(server._server.memory.kept, "let_go_expired", lambda: looks.append(None))
        wait_until(lambda: len(looks) == 5)
        assert len(queue) == 1
        gated.let_go()
        assert hangs.result().code == "OK"
        wait_until(lambda: budget.in_use == 0)


def test_late_calls_go_from_wherever_they_wait_and_the_others_keep_their_order() -> None:
    answered: list[object] = []
    budget = Budget(100, "queued")
    memory = SharedMemory(KeptForwards(1000, 10.0), budget, budget)
    hosted = HostedExpert("e", nn.Linear(D, D), None, memory, can_join=False)
    queue = ExpertQueue(
        hosted, cast(Any, None), QueueLimits(budget, Budget(100, "bytes")), call_later=cast(Any, None)
    )

    def waits(client: bytes, number: int, *, is_late: bool) -> ForwardCall:
        call = ForwardCall(
            client, lambda call, result: answered.append((call, type(result))), number, (tokens(1, D),)
        )
        call.is_cancelled = is_late
        budget.take(1)
        queue.add(call)
        return call

    look = InspectCall(b"", lambda call, result: answered.append((call, type(result))), lambda hosted: None)
    good = [waits(b"a", 0, is_late=False)]
    bad = [waits(b"a", 1, is_late=True), waits(b"b", 2, is_late=True)]
    queue.add(look)
    look.is_cancelled = True
    good.append(waits(b"a", 3, is_late=False))
    queue.let_go_of_late()
    assert [call for call, _ in answered] == [*bad, look]
    assert {error for _, error in answered} == {DeadlineExceededError}
    assert (len(queue), budget.in_use, queue.stats.num_late) == (2, 2, 3)
    assert [queue._take() for _ in range(3)] == [[good[0]], [good[1]], []]
    queue.let_go_of_late()
    assert len(queue) == 0
