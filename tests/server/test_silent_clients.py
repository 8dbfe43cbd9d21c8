"""Clients that keep an RPC waiting, and answer pings all the while: their places are others' after some time."""

from __future__ import annotations

import asyncio
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import grpc
import pytest
from torch import Tensor, nn

from experts_server import ExpertsServer
from experts_server.hosting import state as state_module
from experts_server.hosting.hosted import HostedExpert
from experts_server.serving import doorway as doorway_module
from experts_server.serving import server as server_module
from experts_server.serving import service as service_module
from moe_autograd.wire import experts_pb2 as pb
from moe_autograd.wire import methods
from moe_autograd.wire.framing import seal
from moe_autograd.wire.parcels import ParcelReader, ParcelWriter
from tests.support.gated import D, serving
from tests.support.held import Held
from tests.support.parcels import messages_of
from tests.support.servers import START_S, WireClient, tokens, wait_until

LARGE = 12_000_000  # weights of an expert whose copy finds no room on its way


class Silent:
    """A client's RPC that sends some messages and then nothing.

    Args:
        client: whose.
        path: of the RPC.
        messages: what it sends.
    """

    def __init__(self, client: WireClient, path: str, *messages: bytes) -> None:
        self._may_end = threading.Event()
        self.call = client.channel.stream_stream(path)(self._sent(messages), timeout=START_S)

    def _sent(self, messages: Sequence[bytes]) -> Iterator[bytes]:
        yield from messages
        self._may_end.wait()

    def end(self) -> grpc.RpcError:
        """Return how the server ended it, whatever was answered before."""
        with pytest.raises(grpc.RpcError) as ended:
            list(self.call)
        self._may_end.set()
        return ended.value


def forward_messages(client: WireClient, rows: int = 3) -> list[bytes]:
    writer = ParcelWriter()
    writer.add(*client.forward_call("e", tokens(rows, D)))
    return list(messages_of(writer))


@pytest.fixture
def server() -> Iterator[ExpertsServer]:
    with serving({"e": nn.Linear(D, D), "large": nn.Linear(1, LARGE)}) as server:
        yield server


def num_inside(server: ExpertsServer) -> int:
    assert server._server is not None
    return server._server.doorway.num_inside


@pytest.mark.parametrize(
    "begin",
    [
        lambda client: Silent(client, methods.path("Info")),
        lambda client: Silent(client, methods.path("Step")),
        lambda client: Silent(client, methods.path("SetState")),
        lambda client: Silent(client, methods.path("GetState")),
        lambda client: Silent(client, methods.path("Forward")),
        lambda client: Silent(client, methods.path("Forward"), *forward_messages(client, 1 << 18)[:-1]),
        lambda client: Silent(client, methods.path("Forward"), *forward_messages(client)),
        lambda client: Silent(client, "/inference.GRPCInferenceService/ModelInfer"),
        lambda client: Silent(client, "/grpc.health.v1.Health/Check"),
        lambda client: Silent(client, "/grpc.health.v1.Health/Watch"),
        lambda client: Silent(client, "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"),
    ],
    ids=[
        *("Info", "Step", "SetState", "GetState", "Forward", "half a Forward"),
        *("Forward with an answer", "ModelInfer", "Check", "Watch", "reflection"),
    ],
)
def test_an_rpc_whose_client_keeps_it_waiting_is_ended(
    begin: Callable[[WireClient], Silent], server: ExpertsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(doorway_module, "PATIENCE_S", 0.2)
    monkeypatch.setattr(service_module, "WEIGHTS_PATIENCE_S", 0.2)
    with WireClient(server.address) as client:
        ended = begin(client).end()
        assert ended.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        assert "expected its client to keep it waiting for at most 0.2 s" in ended.details()
        wait_until(lambda: num_inside(server) == 0)
        assert server._server is not None
        assert server._server.service.weights_under_way.in_use == 0
        assert client.forward("e", tokens(3, D)).code == "OK"


@pytest.mark.parametrize("num_taken", [0, 1])
def test_weights_that_nobody_takes_are_not_kept_for_ever(
    num_taken: int, server: ExpertsServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their status waits behind what is on its way."""
    monkeypatch.setattr(service_module, "WEIGHTS_PATIENCE_S", 0.2)
    copies = copied_weights(monkeypatch)
    assert server._server is not None
    under_way = server._server.service.weights_under_way
    with WireClient(server.address) as client:
        call = client.channel.unary_stream(methods.path("GetState"))(
            seal(pb.GetStateRequest(experts=["large"]))
        )
        for _ in range(num_taken):
            next(call)
        wait_until(lambda: any(copy() is not None for copy in copies))
        wait_until(lambda: under_way.in_use == 0)
        wait_until(lambda: all(copy() is None for copy in copies))
        assert client.get_state("e")
        with pytest.raises(grpc.RpcError) as ended:
            list(call)
        assert ended.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
        wait_until(lambda: num_inside(server) == 0)


def test_an_answer_may_be_taken_late(server: ExpertsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a client that has not said that nothing more will come."""
    monkeypatch.setattr(doorway_module, "PATIENCE_S", 0.2)
    with WireClient(server.address) as client:
        *messages, last = forward_messages(client, LARGE // D)
        reader = ParcelReader()
        stream = Silent(client, methods.path("Forward"), *messages, last)
        answers = reader.feed(next(stream.call))
        look_twice(server, monkeypatch)
        ended = None
        try:
            for message in stream.call:
                answers += reader.feed(message)
        except grpc.RpcError as error:  # when all was taken, and nothing more came
            ended = error.code()
    assert ended == grpc.StatusCode.DEADLINE_EXCEEDED
    assert [tensor.shape for answer in answers for tensor in answer.tensors] == [(LARGE // D, D)]


def copied_weights(monkeypatch: pytest.MonkeyPatch) -> list[weakref.ref[Tensor]]:
    """Return a list of the copies of weights that are made from now on."""
    copies: list[weakref.ref[Tensor]] = []

    def state_to_send(hosted: HostedExpert, layout: pb.StateLayout) -> dict[str, Tensor]:
        state = state_module.state_to_send(hosted, layout)
        copies.extend(map(weakref.ref, state.values()))
        return state

    monkeypatch.setattr(service_module, "state_to_send", state_to_send)
    return copies


def test_who_only_watches_may_do_so_for_long(server: ExpertsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doorway_module, "PATIENCE_S", 0.2)
    with WireClient(server.address) as client:
        watch = client.channel.unary_stream("/grpc.health.v1.Health/Watch")(b"", timeout=START_S)
        next(watch)
        look_twice(server, monkeypatch)
        assert watch.is_active()
        watch.cancel()


def look_twice(server: ExpertsServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Return when a server has looked for silent clients twice."""
    assert server._server is not None
    looks, looked = threading.Semaphore(0), server._server.health.end_silent

    def look() -> None:
        looked()
        looks.release()

    monkeypatch.setattr(server._server.health, "end_silent", look)
    for _ in range(2):
        assert looks.acquire(timeout=START_S)


def test_who_waits_for_what_is_computed_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """He has not said that nothing more will come, and need not."""
    held = Held("forward", D)
    monkeypatch.setattr(doorway_module, "PATIENCE_S", 0.2)
    with serving({"e": held}) as server, WireClient(server.address) as client:
        stream: Any = Silent(client, methods.path("Forward"), *forward_messages(client))
        assert held.begun.wait(START_S)
        look_twice(server, monkeypatch)
        held.may_go.set()
        assert next(stream.call)
        stream.call.cancel()


def test_what_is_refused_for_want_of_room_names_no_limit_that_cannot_be_raised(
    server: ExpertsServer,
) -> None:
    assert server._server is not None
    room = server._server.service.weights_under_way
    room.take(room.limit)
    with WireClient(server.address) as client, pytest.raises(grpc.RpcError) as refused:
        client.get_state("e")
    room.give_back(room.limit)
    assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert refused.value.details().endswith("16 in use. Try again later.")


def test_a_client_is_not_ended_for_what_the_server_has_kept_waiting_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its process stood still, or a handler did: what has come meanwhile is yet to be read."""
    monkeypatch.setattr(server_module, "UPKEEP_S", 1000.0)
    with serving({"e": nn.Linear(D, D)}) as server, WireClient(server.address) as client:
        assert server._server is not None
        doorway, loop = server._server.doorway, server._server._loop
        assert loop is not None
        silent = Silent(client, methods.path("Forward"))
        wait_until(lambda: [one._reads_since for one in [*doorway.passing_now]] not in ([], [None]))
        (one,) = doorway.passing_now
        one.patience_s = -1.0

        async def ends_after_standing_still_for(seconds: float) -> bool:
            doorway._looked_at_s -= seconds
            doorway.end_silent()
            return one._is_ended

        def ends(after_s: float) -> bool:
            looking = asyncio.run_coroutine_threadsafe(ends_after_standing_still_for(after_s), loop)
            return looking.result(START_S)

        assert not ends(doorway_module.STALLED_S)
        assert ends(0.0)
        assert silent.end().code() == grpc.StatusCode.DEADLINE_EXCEEDED
