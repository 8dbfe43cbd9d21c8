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


@pytest.mark.usefixtures("no_gc")
@pytest.mark.parametrize("rpc", ["Forward", "Backward"])
@pytest.mark.parametrize("value", [1.0, torch.nan], ids=["answered", "refused"])
def test_nothing_of_a_call_stays_with_an_answer_that_nobody_takes(
    given: list[weakref.ref[Any]], value: float, rpc: str
) -> None:
    with serving({"e": nn.Linear(D, D)}) as server, WireClient(server.address) as client:
        writer, leaves = ParcelWriter(), Event()
        for number in range(NUM_CALLS):
            x = torch.full((ROWS, D), value if number > 4 else 1.0)  # the first fill the way
            if rpc == "Forward":
                writer.add(*client.forward_call("e", x, call_id=number, keep_graph=False))
            else:
                writer.add(*client.backward_call("e", torch.ones(ROWS, D), call_id=number, inputs=[x]))

        def messages() -> Iterator[bytes]:
            yield from messages_of(writer)
            leaves.wait(START_S)

        call = client.channel.stream_stream(methods.path(rpc))(messages(), timeout=START_S)
        num_tensors = NUM_CALLS * (1 if rpc == "Forward" else 2)
        wait_until(lambda: len(given) == num_tensors)
        wait_until(lambda: all(ref() is None for ref in given))
        leaves.set()
        reader = ParcelReader()
        assert len([parcel for message in call for parcel in reader.feed(message)]) == NUM_CALLS
