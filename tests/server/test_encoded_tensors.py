"""Large tensors in an encoding take a tenth of a second to encode and to decode: meanwhile others are served."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from experts_server import ExpertsServer
from moe_autograd.wire import compression
from moe_autograd.wire import experts_pb2 as pb
from moe_autograd.wire.parcels import ParcelWriter
from tests.support.gated import Waiting
from tests.support.parcels import messages_of
from tests.support.servers import START_S, WireClient, tokens

NUM_ROWS, WIDTH = 1024, 1024  # 4 MiB, of which one travels in int8


class Held:
    """A function that waits until it is let go."""

    def __init__(self, function) -> None:
        self._function = function
        self.begun, self.may_go = threading.Event(), threading.Event()

    def __call__(self, *args):
        self.begun.set()
        assert self.may_go.wait(START_S)
        return self._function(*args)


@pytest.fixture
def server() -> Iterator[ExpertsServer]:
    with ExpertsServer({"echo": nn.Identity(), "small": nn.Linear(4, 4)}) as server:
        yield server


def hold(monkeypatch: pytest.MonkeyPatch, name: str) -> Held:
    held = Held(getattr(compression, name))
    monkeypatch.setattr(compression, name, held)
    return held


def assert_others_are_served(server: ExpertsServer, held: Held) -> None:
    assert held.begun.wait(START_S)
    with WireClient(server.address, client_id=b"other") as other:
        answer = Waiting(lambda: other.forward("small", tokens(1, 4), evaluate=True)).result()
    assert answer.code == "OK"
    held.may_go.set()


def close_to(actual: Tensor | None, expected: Tensor) -> bool:
    return actual is not None and bool((actual - expected).abs().max() <= expected.abs().max() / 127)


def test_a_large_answer_in_an_encoding_holds_up_nobody(server, monkeypatch):
    x = tokens(NUM_ROWS, WIDTH)
    held = hold(monkeypatch, "encode")
    with WireClient(server.address) as client:
        answer = Waiting(lambda: client.forward("echo", x, reply_encoding=pb.AS_INT8_BLOCKS))
        assert_others_are_served(server, held)
        assert close_to(answer.result().tensors[0], x)


@pytest.mark.parametrize("encoding", [pb.AS_INT8_BLOCKS, pb.AS_BFLOAT16], ids=pb.Encoding.Name)
def test_a_large_input_in_an_encoding_holds_up_nobody(server, monkeypatch, encoding):
    x = tokens(NUM_ROWS, WIDTH)
    held = hold(monkeypatch, "decode")
    with WireClient(server.address) as client:
        head, inputs = client.forward_call("echo", x)
        writer = ParcelWriter()
        writer.add(head, inputs, encoding)
        answer = Waiting(lambda: list(client.stream_messages("Forward", messages_of(writer))))
        assert_others_are_served(server, held)
        ((_, result),) = answer.result()
        assert close_to(result.tensors[0], x)


def test_an_answer_that_cannot_be_encoded_is_an_error(server, monkeypatch):
    def fail(*_: object) -> Tensor:
        raise MemoryError("told to")

    monkeypatch.setattr(compression, "encode", fail)
    with WireClient(server.address) as client:
        answer = client.forward("small", torch.ones(1, 4), reply_encoding=pb.AS_INT8_BLOCKS)
        assert answer.code == "INTERNAL"
        assert client.forward("small", torch.ones(1, 4)).code == "OK"
