"""Messages with a checksum: what is read back, and what is refused."""

from __future__ import annotations

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from moe_autograd.errors import CorruptDataError
from moe_autograd.wire import experts_pb2 as pb
from moe_autograd.wire.framing import frame_packet, seal, take_packet_apart, unseal, varint


@given(st.binary(max_size=20), st.integers(0, 2**64 - 1), st.lists(st.text(max_size=9)))
def test_a_sealed_message_comes_back(client_id, sequence, experts):
    message = pb.UpdateRequest(client_id=client_id, sequence=sequence, experts=experts)
    received = unseal(pb.UpdateRequest, seal(message))
    received.ClearField("checksum")
    assert received == message


def test_a_sealed_message_is_a_plain_protobuf_message():
    request = pb.UpdateRequest(sequence=7)
    assert pb.UpdateRequest.FromString(seal(request)).sequence == 7
    assert pb.UpdateRequest.FromString(seal(request)).SerializeToString() == seal(request)


def test_sealing_again_gives_the_same_bytes():
    request = unseal(pb.UpdateRequest, seal(pb.UpdateRequest(sequence=7)))
    assert seal(request) == seal(pb.UpdateRequest(sequence=7))


@given(st.data())
def test_any_flipped_bit_in_a_sealed_message_is_noticed(data):
    sealed = bytearray(seal(pb.UpdateRequest(client_id=b"one", sequence=77, experts=["ffn.0"])))
    sealed[data.draw(st.integers(0, len(sealed) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(CorruptDataError):
        unseal(pb.UpdateRequest, bytes(sealed))


def test_a_missing_checksum_is_accepted_only_where_it_is_not_required():
    assert unseal(pb.InfoRequest, b"", required=False) == pb.InfoRequest()
    with pytest.raises(CorruptDataError, match="expected a checksum"):
        unseal(pb.UpdateRequest, pb.UpdateRequest(sequence=1).SerializeToString())


def test_bytes_that_are_no_message_are_refused():
    with pytest.raises(CorruptDataError, match="expected a InfoRequest"):
        unseal(pb.InfoRequest, b"\x0a\xff", required=False)


@pytest.mark.parametrize("number", [0, 1, 127, 128, 300, 2**32, 2**64 - 1])
def test_numbers_are_written_as_protobuf_writes_them(number):
    assert pb.Part(parcel=number).SerializeToString() == (b"\x08" + varint(number) if number else b"")


@given(st.binary(max_size=300), st.lists(st.binary(max_size=300), max_size=5))
def test_a_frame_is_taken_apart_into_what_it_was_made_of(contents, payload):
    joined = b"".join(payload)
    packet = frame_packet(contents, payload, len(joined))
    frame = take_packet_apart(packet)
    assert frame.contents == contents
    assert frame.payload == joined
    assert frame.payload_start % 16 == 0
    assert packet[frame.payload_start : frame.payload_start + len(joined)] == joined


@pytest.mark.parametrize(
    "fields", [b"\x22\x00", b"\x0a\x05abc", b"\x0a", b"\x0a" + b"\xff" * 10, b"\x0a" + b"\xff" * 9 + b"\x7f"]
)
def test_fields_that_are_no_packet_are_refused(fields):
    whole = frame_packet(b"", [], 0)
    assert whole.startswith(b"\x0a\x00")
    with pytest.raises(CorruptDataError, match="packet: expected"):
        take_packet_apart(_sealed(fields))


def _sealed(fields: bytes) -> bytes:
    return fields + b"\x79" + xxhash.xxh3_64_intdigest(fields).to_bytes(8, "little")
