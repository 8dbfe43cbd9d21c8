"""Clients that send calls and never take an answer: what a server holds of them is what its limits say."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from threading import Event
from typing import Any

import pytest
import torch
from torch import nn

from experts_server.hosting.calls import BackwardCall, Call, ForwardCall
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
        wait_until(lambda: sum(unanswered.values()) > answer_bytes // 2)  # grpc has taken its beginning
        reader, num_come = ParcelReader(), 0
        while not num_come:
            num_come += len(reader.feed(next(call)))
        wait_until(lambda: list(unanswered.values()) == [0])
        takes.set()
        assert list(call) == []
        wait_until(lambda: not unanswered)
