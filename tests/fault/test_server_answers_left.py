"""Clients that send calls and never take an answer: what a server holds of them is what its limits say."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator
from threading import Event
from typing import Any

import grpc
import pytest
import torch
from torch import nn

from experts_server.configuration.config import LimitsConfig
from experts_server.hosting.calls import BackwardCall, Call, ForwardCall, Outputs
from experts_server.serving.streams import PassStream
from moe_autograd.wire import methods
from moe_autograd.wire.parcels import ParcelReader, ParcelWriter
from tests.support.gated import D, serving
from tests.support.parcels import messages_of
from tests.support.servers import START_S, WireClient, wait_until

ROWS = 1 << 16  # of 32 bytes: 2 MiB, so that one answer fills what grpc takes ahead
NUM_CALLS = 24


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[torch.UntypedStorage]]:
    """The memory of the tensors of each call whose result has come."""
    found: list[weakref.ref[torch.UntypedStorage]] = []
    take_result = PassStream.take_result

    def noting(stream: PassStream, call: Call, result: Any) -> None:
        assert isinstance(call, (ForwardCall, BackwardCall))
        tensors = call.inputs if isinstance(call, ForwardCall) else (*call.grad_outputs, *(call.inputs or ()))
        own = [tensor for tensor in tensors if tensor is not None]
        take_result(stream, call, result)
        found.extend(map(weakref.ref, own))

    monkeypatch.setattr(PassStream, "take_result", noting)
    return found


def staying(writer: ParcelWriter, takes: Event) -> Iterator[bytes]:
    """Send what is there, and stay without sending more."""
    yield from messages_of(writer)
    takes.wait(START_S)


def num_answers(call: Iterator[bytes]) -> int:
    reader = ParcelReader()
    return len([parcel for message in call for parcel in reader.feed(message)])


@pytest.mark.usefixtures("no_gc")
@pytest.mark.parametrize("rpc", ["Forward", "Backward"])
@pytest.mark.parametrize("value", [1.0, torch.nan], ids=["answered", "refused"])
def test_nothing_of_a_call_stays_with_an_answer_that_nobody_takes(
    given: list[weakref.ref[Any]], value: float, rpc: str
) -> None:
    with serving({"e": nn.Linear(D, D)}) as server, WireClient(server.address) as client:
        writer, takes = ParcelWriter(), Event()
        for number in range(NUM_CALLS):
            x = torch.full((ROWS, D), value if number > 4 else 1.0)  # the first fill the way
            if rpc == "Forward":
                writer.add(*client.forward_call("e", x, call_id=number, keep_graph=False))
            else:
                writer.add(*client.backward_call("e", torch.ones(ROWS, D), call_id=number, inputs=[x]))

        call = client.channel.stream_stream(methods.path(rpc))(staying(writer, takes), timeout=START_S)
        num_tensors = NUM_CALLS * (1 if rpc == "Forward" else 2)
        wait_until(lambda: len(given) == num_tensors)
        wait_until(lambda: all(ref() is None for ref in given))
        takes.set()
        assert num_answers(call) == NUM_CALLS


def test_answers_that_come_and_go_count_before_their_client_sends_more() -> None:
    rows, width = 1 << 14, 32 * D
    with serving({"e": nn.Linear(D, width)}) as server, WireClient(server.address) as client:
        assert server._server is not None
        unanswered = server._server.service.unanswered
        writer, takes = ParcelWriter(), Event()
        writer.add(*client.forward_call("e", torch.zeros(rows, D), keep_graph=False))
        call = client.channel.stream_stream(methods.path("Forward"))(staying(writer, takes), timeout=START_S)
        answer_bytes = rows * width * 4
        wait_until(lambda: unanswered.num_bytes > answer_bytes // 2)  # grpc has taken its beginning
        reader, num_come = ParcelReader(), 0
        while not num_come:
            num_come += len(reader.feed(next(call)))
        wait_until(lambda: unanswered.num_bytes == 0)
        takes.set()
        assert list(call) == []


def test_many_clients_that_leave_all_answers_keep_what_is_allowed_and_others_get_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    most, num_clients, call_bytes = 8 << 20, 6, ROWS * D * 4
    answers: list[weakref.ref[torch.UntypedStorage]] = []
    num_of: Counter[bytes] = Counter()
    waiting: set[PassStream] = set()
    take_result, leaves_too_much = PassStream.take_result, PassStream._leaves_too_much

    def noting_result(stream: PassStream, call: Call, result: Any) -> None:
        if isinstance(result, Outputs):
            answers.extend(weakref.ref(tensor.untyped_storage()) for tensor in result.tensors)
            num_of[call.client_id] += 1
        take_result(stream, call, result)

    def noting_wait(stream: PassStream) -> bool:
        is_waiting = leaves_too_much(stream)
        (waiting.add if is_waiting else waiting.discard)(stream)
        return is_waiting

    monkeypatch.setattr(PassStream, "take_result", noting_result)
    monkeypatch.setattr(PassStream, "_leaves_too_much", noting_wait)
    takes = Event()
    with serving({"e": nn.Linear(D, D)}) as server, WireClient(server.address) as client:
        assert server._server is not None
        unanswered = server._server.service.unanswered
        assert unanswered.most == LimitsConfig().max_queued_bytes
        unanswered.most = most  # the queue has room for all of them
        channels, calls = [], []
        for number in range(num_clients):
            writer, client.client_id = ParcelWriter(), bytes([number])
            for call_id in range(NUM_CALLS):
                x = torch.zeros(ROWS, D)
                writer.add(*client.forward_call("e", x, call_id=call_id, keep_graph=False))
            channels.append(grpc.insecure_channel(server.address, [("own", number)]))
            begin = channels[-1].stream_stream(methods.path("Forward"))
            calls.append(begin(staying(writer, takes), timeout=START_S))
        wait_until(lambda: len(waiting) == num_clients)
        assert num_alive(answers) * call_bytes <= most + num_clients * 2 * call_bytes
        client.client_id = b"who takes his answers"
        own = [client.forward_call("e", torch.ones(ROWS, D), call_id=n) for n in range(NUM_CALLS)]
        assert [answer.code for answer in client.stream("Forward", own)] == ["OK"] * NUM_CALLS
        least = min(range(num_clients), key=lambda number: num_of[bytes([number])])
        num_before = num_of[bytes([least])]
        for call in calls[:least] + calls[least + 1 :]:
            call.cancel()
        # though it takes nothing: the others have gone
        wait_until(lambda: num_of[bytes([least])] > num_before)
        takes.set()
        assert num_answers(calls[least]) == NUM_CALLS
        for channel in channels:
            channel.close()


def num_alive(memory: list[weakref.ref[torch.UntypedStorage]]) -> int:
    return sum(one() is not None for one in memory)
