"""What was refused goes at once, with the tensors that came with it, and its RPC: no garbage collector is needed.

grpc keeps the error that ends an RPC with it, and the way of that error leads back to the RPC: a cycle, if it is not
forgotten. It may be long until the collector comes by.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
import torch
from torch import nn

from experts_server import ExpertsServer
from experts_server.serving.streams import PassStream
from moe_autograd.wire import methods
from moe_autograd.wire.heads import FORWARD
from moe_autograd.wire.parcels import ParcelWriter
from tests.support.held import Held
from tests.support.hosting import sgd
from tests.support.parcels import messages_of
from tests.support.servers import WireClient, wait_until_inside

D = 8
NUM_CALLS = 8


@pytest.fixture(scope="module")
def held() -> Held:
    return Held("forward", D)


@pytest.fixture(scope="module")
def server(held: Held) -> Iterator[ExpertsServer]:
    with ExpertsServer({"a": nn.Linear(D, D), "held": held}, optimizer=sgd) as server:
        yield server


@pytest.fixture
def client(server: ExpertsServer) -> Iterator[WireClient]:
    with WireClient(server.address) as client:
        yield client


def x(width: int = D) -> torch.Tensor:
    return torch.ones(2, width)


REFUSED: dict[str, Callable[[WireClient], object]] = {
    "an input": lambda client: client.forward("a", x(D + 1)),
    "a gradient": lambda client: client.backward("a", x() * torch.nan, inputs=(x(),)),
    "a state of another shape": lambda client: client.set_state({"a": {"weight": x()}}),
    "a state of nobody": lambda client: client.set_state({"b": {"weight": x()}}),
    "a state that is not whole": lambda client: client.set_state(client.get_state("a"), num_entries=9),
}


def num_left() -> int:
    """Return how many tensors and RPCs only the garbage collector would free."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        gc.collect()
        return sum(
            isinstance(thing, torch.Tensor) or type(thing).__name__ == "RPCState" for thing in gc.garbage
        )
    finally:
        gc.set_debug(0)
        gc.garbage.clear()


@pytest.mark.usefixtures("no_gc")
@pytest.mark.parametrize("what", REFUSED)
def test_what_was_refused_goes_with_the_rpc(server: ExpertsServer, client: WireClient, what: str) -> None:
    with contextlib.suppress(grpc.RpcError):
        REFUSED[what](client)
    wait_until_inside(server, 0)
    assert num_left() == 0


@pytest.mark.usefixtures("no_gc")
def test_calls_go_with_a_stream_that_was_cut(server: ExpertsServer, client: WireClient, held: Held) -> None:
    writer = ParcelWriter()
    for call_id in range(NUM_CALLS):
        head, tensors = client.forward_call("held", x(), call_id=call_id)
        writer.add(head, tensors)
    stream = client.channel.stream_stream(methods.path("Forward"))(messages_of(writer))
    assert held.begun.wait(120)
    stream.cancel()
    wait_until_inside(server, 0)
    held.may_go.set()
    client.forward("held", x())  # after those
    assert num_left() == 0


class Silent:
    """The context of an RPC whose client has sent one message and says no more."""

    def __init__(self, message: bytes) -> None:
        self._messages = [message]
        self.is_waited_for = asyncio.Event()

    def time_remaining(self) -> None:
        return None

    async def read(self) -> bytes:
        if not self._messages:
            self.is_waited_for.set()
            await asyncio.Event().wait()
        return self._messages.pop()


@pytest.mark.usefixtures("no_gc")
def test_a_call_that_has_not_come_whole_goes_with_a_stream_that_was_cut(
    server: ExpertsServer, client: WireClient
) -> None:
    writer = ParcelWriter()
    writer.add(*client.forward_call("a", torch.ones(1 << 17, D)))  # several messages

    async def run() -> None:
        context: Any = Silent(next(messages_of(writer)))
        assert server._server is not None
        stream = asyncio.ensure_future(PassStream(server._server.service, FORWARD, context).run())
        await context.is_waited_for.wait()
        stream.cancel()
        await asyncio.wait([stream])

    asyncio.run(run())
    assert num_left() == 0
