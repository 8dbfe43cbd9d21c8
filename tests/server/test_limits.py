"""What a server receives, queues and sends stays within its limits: messages, answers, calls, weights, passes."""

from __future__ import annotations

from collections.abc import Iterator
from threading import Event, Semaphore
from typing import Any

import grpc
import pytest
import torch
from torch import nn

from experts_server.budget import Budget
from experts_server.configuration.config import LimitsConfig
from experts_server.hosting.calls import ForwardCall
from experts_server.queues.batching import QueueLimits
from experts_server.serving import service as service_module
from experts_server.serving import streams as streams_module
from moe_autograd.errors import InvalidCallError
from moe_autograd.wire import experts_pb2 as pb
from moe_autograd.wire import methods
from moe_autograd.wire.framing import seal
from moe_autograd.wire.options import MAX_MESSAGE_BYTES
from moe_autograd.wire.parcels import ParcelReader, ParcelWriter
from moe_autograd.wire.status import RETRY_AFTER_KEY
from tests.support.gated import D, Gated, Waiting, serving
from tests.support.parcels import messages_of, packet
from tests.support.servers import (
    START_S,
    WireClient,
    tokens,
    wait_until,
)


def test_only_so_many_copies_of_weights_are_under_way_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that reads slowly holds one."""
    monkeypatch.setattr(service_module, "MAX_WEIGHTS_UNDER_WAY", 2)
    with serving({"large": nn.Linear(1, 12_000_000)}) as server, WireClient(server.address) as client:
        get_state = client.channel.unary_stream(methods.path("GetState"))

        def begin() -> Any:
            call = get_state(seal(pb.GetStateRequest()), timeout=START_S)
            next(call)
            return call

        slow = [begin(), begin()]
        with pytest.raises(grpc.RpcError) as refused:
            begin()
        assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "RPCs that fetch or set weights: expected at most 2" in refused.value.details()
        assert RETRY_AFTER_KEY in dict(refused.value.trailing_metadata())
        for call in slow:
            call.cancel()
        assert server._server is not None
        under_way = server._server.service.weights_under_way
        wait_until(lambda: not under_way.in_use)
        begin().cancel()


def test_unfinished_calls_of_all_streams_stay_within_one_budget() -> None:
    limits = LimitsConfig(received_bytes=3 << 20)
    with serving({"e": nn.Linear(D, D)}, limits=limits) as server, WireClient(server.address) as client:
        writer = ParcelWriter()
        writer.add(*client.forward_call("e", torch.zeros(2 << 20 >> 2).reshape(-1, D)))
        first, *rest = messages_of(writer)
        assert server._server is not None
        received, goes_on = server._server.service.received, Event()

        def slowly() -> Iterator[bytes]:
            yield first
            goes_on.wait(START_S)
            yield from rest

        begin = client.channel.stream_stream(methods.path("Forward"))
        slow = begin(slowly(), timeout=START_S)
        wait_until(lambda: received.in_use >= 2 << 20)
        with pytest.raises(grpc.RpcError) as busy:
            list(client.stream_messages("Forward", [first, *rest]))
        goes_on.set()
        assert busy.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "bytes of unfinished calls: expected at most 3145728" in busy.value.details()
        assert len(list(slow)) > 1
        assert client.forward("e", tokens(3, D)).code == "OK"
        assert received.in_use == 0


def test_a_client_that_stalls_in_the_midst_of_a_call_makes_room_for_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As one that is frozen or unplugged; with nobody waiting it may take its time."""
    monkeypatch.setattr(streams_module, "STALLED_S", 0.05)
    limits = LimitsConfig(received_bytes=3 << 20)
    with serving({"e": nn.Linear(D, D)}, limits=limits) as server, WireClient(server.address) as client:
        writer = ParcelWriter()
        writer.add(*client.forward_call("e", torch.zeros(2 << 20 >> 2).reshape(-1, D)))
        first, *rest = messages_of(writer)
        assert server._server is not None
        received, goes_on, looks = server._server.service.received, Event(), Semaphore(0)
        look = streams_module.PassStream._look_if_it_stalls

        def counted(stream: streams_module.PassStream, num_messages: int, num_refused: int) -> None:
            look(stream, num_messages, num_refused)
            looks.release()

        monkeypatch.setattr(streams_module.PassStream, "_look_if_it_stalls", counted)

        def slowly() -> Iterator[bytes]:
            yield first
            goes_on.wait(START_S)
            yield from rest

        begin = client.channel.stream_stream(methods.path("Forward"))
        slow = begin(slowly(), timeout=START_S)
        for _ in range(3):
            assert looks.acquire(timeout=START_S)
        assert received.in_use >= 2 << 20
        assert slow.is_active()
        with pytest.raises(grpc.RpcError):
            list(client.stream_messages("Forward", [first, *rest]))
        with pytest.raises(grpc.RpcError) as stalled:
            list(slow)
        goes_on.set()
        assert stalled.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "expected more of a call within 0.05 s" in stalled.value.details()
        assert len(list(client.stream_messages("Forward", [first, *rest]))) > 0
        assert received.in_use == 0


def test_a_client_whose_calls_the_server_itself_leaves_does_not_stall(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(streams_module, "STALLED_S", 0.05)
    limits = LimitsConfig(received_bytes=3 << 20)
    with serving({"e": nn.Linear(D, D)}, limits=limits) as server, WireClient(server.address) as client:
        writer = ParcelWriter()
        writer.add(*client.forward_call("e", torch.zeros(2 << 20 >> 2).reshape(-1, D)))
        messages = [*messages_of(writer)]
        assert server._server is not None
        received, looks, leaves = server._server.service.received, Semaphore(0), Event()
        look = streams_module.PassStream._look_if_it_stalls

        def counted(stream: streams_module.PassStream, num_messages: int, num_refused: int) -> None:
            look(stream, num_messages, num_refused)
            looks.release()

        def leaves_too_much(stream: streams_module.PassStream) -> bool:
            if leaves.is_set():
                stream._loop.call_soon(stream.look_again)
            return leaves.is_set()

        monkeypatch.setattr(streams_module.PassStream, "_look_if_it_stalls", counted)
        monkeypatch.setattr(streams_module.PassStream, "_leaves_too_much", leaves_too_much)
        leaves.set()
        left = client.channel.stream_stream(methods.path("Forward"))(iter(messages), timeout=START_S)
        wait_until(lambda: received.in_use >= 2 << 20)
        with pytest.raises(grpc.RpcError):
            list(client.stream_messages("Forward", messages))
        for _ in range(3):
            assert looks.acquire(timeout=START_S)
        leaves.clear()
        assert len(list(left)) > 0
        assert received.in_use == 0


def test_what_is_announced_counts_as_if_it_had_come() -> None:
    """One byte of each of many tensors has memory taken for all of them."""
    header = pb.TensorHeader(dtype=pb.FLOAT32, shape=[1 << 18, 1], num_bytes=1 << 20).SerializeToString()
    numbers = range(4)
    heads = [pb.ForwardCall(client_id=b"x", call_id=number, expert="e") for number in numbers]
    message = packet(
        *[pb.Announcement(parcel=n, tensors=[header], forward_call=heads[n]) for n in numbers],
        parts=tuple(pb.Part(parcel=number, num_bytes=1) for number in numbers),
        payload=bytes(64),
    )
    limits = LimitsConfig(received_bytes=3 << 20)
    with serving({"e": nn.Identity()}, limits=limits) as server, WireClient(server.address) as client:
        answers = client.stream_messages("Forward", [message])
        refused = dict(next(answers) for _ in range(2))
        assert [(number, answer.code) for number, answer in refused.items()] == [(2, "BUSY"), (3, "BUSY")]
        assert (
            "expected at most 3145728 unfinished bytes in a stream, got 1048576 more than" in refused[2].text
        )
        with pytest.raises(grpc.RpcError, match="expected the rest of 2 parcels"):
            next(answers)
        assert client.forward("e", tokens(3, D)).code == "OK"
        assert server._server is not None
        assert server._server.service.received.in_use == 0


def test_no_more_calls_are_taken_of_a_client_that_leaves_the_answers_until_it_takes_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    most = 4 << 20
    monkeypatch.setattr(streams_module, "UNTAKEN_BYTES", most)
    receive = streams_module.PassStream._receive_one

    async def noting(stream: streams_module.PassStream) -> None:
        untaken_before.append(stream._num_untaken_bytes())
        streams.append(stream)
        await receive(stream)

    untaken_before: list[int] = []
    streams: list[streams_module.PassStream] = []
    monkeypatch.setattr(streams_module.PassStream, "_receive_one", noting)
    with serving({"e": nn.Identity()}) as server, WireClient(server.address) as client:
        writer = ParcelWriter()
        for call_id in range(32):
            writer.add(*client.forward_call("e", torch.zeros(1 << 18), call_id=call_id))
        begin = client.channel.stream_stream(methods.path("Forward"))
        answers = begin(messages_of(writer), timeout=START_S)
        wait_until(lambda: bool(streams) and streams[0]._num_untaken_bytes() > most)
        reader = ParcelReader()
        assert len([parcel for message in answers for parcel in reader.feed(message)]) == 32
    assert max(untaken_before) <= most


@pytest.mark.parametrize("go_away", [False, True])
def test_calls_of_many_clients_that_leave_their_answers_are_not_all_taken_while_none_is_computed(
    go_away: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A queue is emptied as it is computed: each client could fill it anew, and leave all of the answers."""
    most_of_all, num_clients, num_calls = 8 << 20, 4, 16
    leaves_too_much = streams_module.PassStream._leaves_too_much

    def noting(stream: streams_module.PassStream) -> bool:
        is_waiting = leaves_too_much(stream)
        (waiting.add if is_waiting else waiting.discard)(stream)
        return is_waiting

    waiting: set[streams_module.PassStream] = set()
    monkeypatch.setattr(streams_module.PassStream, "_leaves_too_much", noting)
    expert = Gated()
    with serving({"e": expert}) as server, WireClient(server.address) as client:
        assert server._server is not None
        unanswered = server._server.service.unanswered
        unanswered.most = most_of_all
        writer = ParcelWriter()
        for call_id in range(num_calls):
            writer.add(*client.forward_call("e", torch.zeros(1 << 15, D), call_id=call_id, keep_graph=False))
        messages = list(messages_of(writer))
        begin = client.channel.stream_stream(methods.path("Forward"))
        streams = [begin(iter(messages), timeout=START_S) for _ in range(num_clients)]
        wait_until(lambda: len(waiting) == num_clients)
        assert most_of_all < unanswered.num_bytes <= most_of_all + num_clients * MAX_MESSAGE_BYTES
        assert unanswered.num_bytes < num_clients * num_calls << 20
        if not go_away:
            expert.let_go()
        for answers in streams:
            if go_away:
                answers.cancel()
                continue
            reader = ParcelReader()
            assert len([parcel for message in answers for parcel in reader.feed(message)]) == num_calls
        wait_until(lambda: repr(unanswered).startswith("<Unanswered 0 bytes of 0 streams,"))
        expert.let_go()


def test_a_call_for_which_there_is_not_all_room_takes_none() -> None:
    limits = QueueLimits(Budget(9, "calls"), Budget(7, "bytes"))
    with pytest.raises(InvalidCallError, match="bytes: expected at most 7, got 8"):
        limits.take([ForwardCall(b"", print, 1, (), (), num_bytes=8)])
    assert limits.calls.in_use == 0


def test_more_calls_than_a_pass_may_have_are_refused_and_the_others_served() -> None:
    config = {"limits": LimitsConfig(max_calls_per_pass=3)}
    with serving({"e": nn.Linear(D, D)}, **config) as server, WireClient(server.address) as client:
        answers = client.stream(
            "Forward", [client.forward_call("e", tokens(1, D), call_id=n) for n in range(5)]
        )
    assert [a.code for a in answers] == ["OK"] * 3 + ["INVALID_CALL"] * 2


def test_more_passes_than_allowed_are_turned_away() -> None:
    gated = Gated()
    config = {"limits": LimitsConfig(max_concurrent_passes=1)}
    with serving({"e": gated}, **config) as server, WireClient(server.address) as client:
        first = Waiting(lambda: client.forward("e", tokens(1, D)))
        assert gated.started.acquire(timeout=START_S)
        with pytest.raises(grpc.RpcError) as busy:
            client.forward("e", tokens(1, D))
        assert busy.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert dict(busy.value.trailing_metadata())[RETRY_AFTER_KEY]
        gated.let_go()
        assert first.result().code == "OK"
