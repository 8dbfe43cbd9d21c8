"""Damaged messages, and those that came to another RPC, are refused and change nothing; the server lives on."""

from __future__ import annotations

from collections.abc import Iterator

import grpc
import pytest

from experts_server import ExpertsServer
from moe_autograd.moe.experts import FeedForwardExpert
from moe_autograd.wire import experts_pb2 as pb
from moe_autograd.wire.framing import seal
from moe_autograd.wire.parcels import ParcelWriter
from tests.support.hosting import sgd
from tests.support.parcels import messages_of
from tests.support.servers import WireClient, tokens

D = 16


@pytest.fixture(scope="module")
def server() -> Iterator[ExpertsServer]:
    with ExpertsServer({"ffn.0": FeedForwardExpert(D)}, optimizer=sgd) as server:
        yield server


@pytest.fixture
def client(server: ExpertsServer) -> Iterator[WireClient]:
    with WireClient(server.address) as client:
        client.sequence = server.num_updates["ffn.0"] * 1000
        yield client
        assert client.forward("ffn.0", tokens(3, D)).code == "OK", "the server lives on"


@pytest.mark.parametrize("position", [0, 10, 40, -1, -9])
def test_a_flipped_byte_ends_the_stream_with_data_loss(client: WireClient, position: int) -> None:
    writer = ParcelWriter()
    writer.add(*client.forward_call("ffn.0", tokens(3, D)))
    message = bytearray(next(messages_of(writer)))
    message[position] ^= 0x40
    assert _code_of(client, [bytes(message)]) == grpc.StatusCode.DATA_LOSS


def test_a_truncated_message_a_repeated_one_and_an_unfinished_stream_are_data_loss(
    client: WireClient,
) -> None:
    writer = ParcelWriter(part_bytes=256)
    writer.add(*client.forward_call("ffn.0", tokens(100, D)))
    messages = list(messages_of(writer))
    for wrong in ([messages[0][:-20]], [messages[0], messages[0]], messages[:-1], [b""], [b"not protobuf"]):
        assert _code_of(client, wrong) == grpc.StatusCode.DATA_LOSS


def test_a_tensor_of_a_hundred_gigabytes_is_refused_before_it_comes(client: WireClient) -> None:
    head = pb.ForwardCall(client_id=b"x", call_id=1, expert="ffn.0")
    header = pb.TensorHeader(dtype=pb.FLOAT32, shape=[25_000_000_000], num_bytes=100_000_000_000)
    announcement = pb.Announcement(parcel=0, tensors=[header.SerializeToString()], forward_call=head)
    contents = pb.Contents(announcements=[announcement])
    [(_, answer)] = client.stream_messages("Forward", [seal(pb.Packet(contents=contents))])
    assert answer.code == "INVALID_CALL"
    assert "expected at most" in answer.text


def test_a_message_over_the_limit_is_refused(client: WireClient) -> None:
    assert _code_of(client, [bytes(5 << 20)]) == grpc.StatusCode.RESOURCE_EXHAUSTED


def test_a_backward_parcel_in_a_forward_stream_is_corrupt(client: WireClient) -> None:
    answer = client.stream("Forward", [client.backward_call("ffn.0", tokens(3, D))])[0]
    assert "expected ForwardCall parcels, got BackwardCall" in answer.text
    assert answer.code == "CORRUPT_DATA"


@pytest.mark.parametrize(("rpc", "meant_for"), [("Step", pb.ZERO_GRAD), ("ZeroGrad", pb.STEP)])
def test_an_update_that_came_to_the_other_rpc_is_corrupt_and_changes_nothing(
    server: ExpertsServer, rpc: str, meant_for: pb.UpdateKind
) -> None:
    with WireClient(server.address, client_id=rpc.encode()) as client:
        client.forward("ffn.0", tokens(3, D))
        client.backward("ffn.0", tokens(3, D), sequence=1)
        before = client.num_updates()["ffn.0"]
        request = pb.UpdateRequest(client_id=client.client_id, sequence=2, experts=["ffn.0"], kind=meant_for)
        with pytest.raises(grpc.RpcError, match="It was meant for another RPC") as refused:
            client.unary(rpc, seal(request))
        assert refused.value.code() == grpc.StatusCode.DATA_LOSS
        client.step("ffn.0", sequence=2, kind=pb.STEP)
        assert client.num_updates()["ffn.0"] == before + 1


@pytest.mark.parametrize("rpc", ["Step", "ZeroGrad", "Save"])
def test_an_update_whose_bytes_were_flipped_is_data_loss(client: WireClient, rpc: str) -> None:
    sealed = bytearray(seal(pb.UpdateRequest(client_id=b"x", sequence=1)))
    sealed[3] ^= 1
    with pytest.raises(grpc.RpcError) as refused:
        client.unary(rpc, bytes(sealed))
    assert refused.value.code() == grpc.StatusCode.DATA_LOSS


def _code_of(client: WireClient, messages: list[bytes]) -> grpc.StatusCode:
    with pytest.raises(grpc.RpcError) as refused:
        list(client.stream_messages("Forward", messages))
    return refused.value.code()
