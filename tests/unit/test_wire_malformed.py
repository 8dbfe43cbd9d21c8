"""The parcel reader refuses everything malformed, and says what it expected."""

from __future__ import annotations

import math

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_autograd.errors import CorruptDataError, InvalidCallError, ServerBusyError
from moe_autograd.wire import experts_pb2 as pb
from moe_autograd.wire.options import PARCEL_BYTES
from moe_autograd.wire.parcels import ParcelReader, ParcelWriter
from moe_autograd.wire.tensors import TensorLimits
from tests.support.parcels import PART_BYTES, announce, entry, floats, messages_of, packet, read


class TestMalformed:
    def test_an_unknown_dtype_is_refused_alone(self):
        bad = announce(0, pb.TensorHeader(dtype=99, shape=[1], num_bytes=1))
        refused, good = read([packet(bad, announce(1))])
        assert isinstance(refused.error, InvalidCallError)
        assert "dtype" in str(refused.error)
        assert refused.head == entry()
        assert good.error is None

    @pytest.mark.parametrize(
        ("header", "complaint"),
        [
            (pb.TensorHeader(dtype=pb.FLOAT32, shape=[25 * 10**9], num_bytes=10**11), "at most 4096 bytes"),
            (pb.TensorHeader(dtype=pb.FLOAT32, shape=[2**63, 2**63], num_bytes=4), "at most 4096 bytes"),
            (pb.TensorHeader(dtype=pb.FLOAT32, shape=[2**63, 0], num_bytes=0), "at most 4096 bytes"),
            (pb.TensorHeader(dtype=pb.FLOAT32, shape=[0, *[1024] * 7], num_bytes=0), "were 0 a 1"),
            (pb.TensorHeader(dtype=pb.FLOAT32, shape=[3], num_bytes=11), "expected 12 bytes"),
            (pb.TensorHeader(dtype=pb.FLOAT32, shape=[3], num_bytes=2**63), "expected 12 bytes"),
            (pb.TensorHeader(dtype=pb.FLOAT32, shape=[1] * 65, num_bytes=4), "at most 64 dimensions"),
            (
                pb.TensorHeader(dtype=pb.FLOAT32, shape=[1] * 1020, num_bytes=4),
                "header of at most 1024 bytes",
            ),
            (pb.TensorHeader(dtype=pb.INT32, shape=[1], num_bytes=2, encoding=pb.AS_BFLOAT16), "encoding"),
            (pb.TensorHeader(dtype=pb.FLOAT32, shape=[1], num_bytes=4, encoding=77), "encoding"),
            (pb.TensorHeader(dtype=pb.DTYPE_NONE, shape=[1], num_bytes=4), "dtype"),
        ],
    )
    def test_a_header_that_lies_is_refused_before_memory_is_taken(self, header, complaint):
        limits = TensorLimits(max_tensor_bytes=4096)
        reader = ParcelReader(limits)
        (parcel,) = reader.feed(packet(announce(0, header)))
        assert complaint in str(parcel.error)
        assert repr(reader) == "ParcelReader(0 parcels unfinished, 0 bytes)"

    def test_parts_of_a_refused_parcel_are_passed_over(self):
        messages = [
            packet(announce(0, floats(5000)), parts=(pb.Part(num_bytes=4),), payload=bytes(4)),
            packet(announce(1), parts=(pb.Part(offset=4, num_bytes=4),), payload=bytes(4)),
        ]
        refused, good = read(messages, TensorLimits(max_tensor_bytes=4096))
        assert refused.error is not None
        assert good.error is None

    def test_too_many_tensors_and_too_many_unfinished_bytes_are_refused(self):
        limits = TensorLimits(max_tensors=2, max_unfinished_bytes=100)
        reader = ParcelReader(limits)
        message = packet(announce(0, *[floats(1)] * 3), announce(1, floats(20)), announce(2, floats(20)))
        errors = [str(parcel.error) for parcel in reader.feed(message)]
        assert ["at most 2 tensors" in errors[0], "at most 100 unfinished bytes" in errors[1]] == [True, True]

    def test_too_many_unfinished_parcels_are_refused(self):
        reader = ParcelReader(TensorLimits(max_unfinished_parcels=2))
        message = packet(*(announce(number, floats(1)) for number in range(3)))
        (refused,) = reader.feed(message)
        assert refused.number == 2

    def test_an_unfinished_parcel_counts_with_what_it_takes_beside_its_tensors(self):
        both, most = packet(announce(0, floats(20)), announce(1, floats(20))), 2 * (PARCEL_BYTES + 80)
        assert ParcelReader(TensorLimits(max_unfinished_bytes=most)).feed(both) == []
        (refused,) = ParcelReader(TensorLimits(max_unfinished_bytes=most - 1)).feed(both)
        assert refused.number == 1
        assert isinstance(refused.error, ServerBusyError)

    def test_one_alone_may_have_all_unfinished_bytes_in_its_tensors(self):
        reader = ParcelReader(TensorLimits(max_unfinished_bytes=80))
        assert reader.feed(packet(announce(0, floats(20)))) == []
        (refused,) = reader.feed(packet(announce(1, floats(1))))
        assert isinstance(refused.error, ServerBusyError)

    def test_a_header_that_is_none_is_refused_alone(self):
        odd = pb.Announcement(parcel=0, tensors=[b"\xff"], state_entry=entry())
        refused, good = read([packet(odd, announce(1))])
        assert "expected a TensorHeader" in str(refused.error)
        assert good.error is None

    @pytest.mark.parametrize(
        ("tensors", "are_finite"),
        [
            ([torch.randn(3), torch.randn(200, 200)], True),
            ([torch.randn(3, dtype=torch.float64), torch.zeros(0, dtype=torch.float64), None], True),
            ([torch.randn(3), torch.tensor([math.inf])], False),
            ([torch.randn(200, 200), torch.tensor([math.nan]), torch.randn(3)], False),
            ([torch.tensor([math.inf]), torch.tensor([-math.inf])], False),
            ([torch.full((2,), 3e38)], False),  # they are, but their sum is not
            ([torch.randn(3), torch.randn(3).double()], False),  # nobody has looked
            ([torch.arange(3)], False),
            ([torch.randn(3).bfloat16()], False),
            ([], False),
        ],
    )
    def test_one_look_tells_whether_all_values_of_a_message_are_finite(self, tensors, are_finite):
        writer, reader = ParcelWriter(), ParcelReader()
        for tensor in tensors:
            writer.add(entry(), [tensor])
        writer.add(entry())
        assert len(reader.feed(writer.next_message())) == len(tensors) + 1
        assert reader.prove_finite() is are_finite
        assert reader.prove_finite() is False, "the message is let go of"

    def test_nothing_is_known_of_values_that_came_in_parts(self):
        writer, reader = ParcelWriter(part_bytes=64), ParcelReader()
        writer.add(entry(), [torch.zeros(20)])
        while (message := writer.next_message()) is not None:
            reader.feed(message)
            assert not reader.prove_finite()

    def test_nothing_is_known_of_values_that_were_encoded(self):
        writer, reader = ParcelWriter(), ParcelReader()
        writer.add(entry(), [torch.ones(64)], pb.AS_BFLOAT16)
        (parcel,) = reader.feed(writer.next_message())
        assert torch.equal(*parcel.tensors, torch.ones(64))
        assert not reader.prove_finite()

    def test_a_parcel_without_a_head_is_refused(self):
        (parcel,) = read([packet(pb.Announcement())])
        assert parcel.head is None
        assert isinstance(parcel.error, InvalidCallError)

    def test_a_bool_of_another_byte_is_refused_alone(self):
        header = pb.TensorHeader(dtype=pb.BOOL, shape=[1], num_bytes=1)
        parts = (pb.Part(num_bytes=1), pb.Part(parcel=1, num_bytes=4))
        message = packet(
            announce(0, header), announce(1, floats(1)), parts=parts, payload=b"\x02" + bytes(19)
        )
        refused, good = read([message])
        assert "bools of 0 and 1" in str(refused.error)
        assert good.tensors[0].tolist() == [0.0]

    def test_so_is_one_whose_bools_come_in_parts(self):
        header = pb.TensorHeader(dtype=pb.BOOL, shape=[4], num_bytes=4)
        begun = packet(announce(0, header), parts=(pb.Part(num_bytes=2),), payload=b"\x00\x02")
        ended = pb.Part(offset=2, num_bytes=2), pb.Part(parcel=1, num_bytes=4)
        reader = ParcelReader()
        assert reader.feed(begun) == []
        refused, good = reader.feed(packet(announce(1, floats(1)), parts=ended, payload=bytes(20)))
        assert (refused.number, refused.head, refused.tensors) == (0, entry(), ())
        assert "bools of 0 and 1" in str(refused.error)
        assert good.tensors[0].tolist() == [0.0]
        assert repr(reader) == "ParcelReader(0 parcels unfinished, 0 bytes)"

    @pytest.mark.parametrize(
        ("parts", "payload"),
        [
            ((pb.Part(offset=4, num_bytes=4),), 4),
            ((pb.Part(num_bytes=4), pb.Part(num_bytes=4)), 20),
            ((pb.Part(num_bytes=4), pb.Part(offset=2, num_bytes=4)), 20),
            ((pb.Part(num_bytes=4), pb.Part(offset=4, num_bytes=16)), 32),
            ((pb.Part(num_bytes=8), pb.Part(num_bytes=8)), 24),
            ((pb.Part(tensor=1, num_bytes=4),), 4),
            ((pb.Part(parcel=3, num_bytes=4),), 4),
            ((pb.Part(num_bytes=4),), 3),
            ((pb.Part(num_bytes=2**63),), 4),
            ((pb.Part(num_bytes=0),), 4),
        ],
        ids=[
            "gap",
            "duplicate",
            "overlap",
            "too long",
            "after the end",
            "no such tensor",
            "no such parcel",
            "short payload",
            "huge part",
            "empty part",
        ],
    )
    def test_parts_that_do_not_fit_end_the_stream(self, parts, payload):
        with pytest.raises(CorruptDataError):
            ParcelReader().feed(packet(announce(0, floats(2)), parts=parts, payload=bytes(payload)))

    def test_more_parts_than_a_payload_can_hold_are_refused_before_anything_is_made_of_them(self):
        parts = (pb.Part(num_bytes=1),) * 4
        with pytest.raises(CorruptDataError, match="expected parts of 1 byte or more, got 4 in 40 bytes"):
            ParcelReader().feed(packet(announce(0, floats(2)), parts=parts, payload=bytes(40)))

    def test_a_repeated_message_ends_the_stream(self):
        writer = ParcelWriter()
        writer.add(entry(), [torch.ones(3)])
        message = writer.next_message()
        reader = ParcelReader()
        reader.feed(message)
        with pytest.raises(CorruptDataError, match="used before"):
            reader.feed(message)

    def test_a_lost_message_ends_the_stream(self):
        writer = ParcelWriter(PART_BYTES)
        writer.add(entry(), [torch.ones(1000)])
        first, _, *rest = messages_of(writer)
        with pytest.raises(CorruptDataError, match="lost"):
            read([first, *rest])

    def test_a_stream_that_ends_within_a_parcel_is_noticed(self):
        writer = ParcelWriter(PART_BYTES)
        writer.add(entry(), [torch.ones(1000)])
        with pytest.raises(CorruptDataError, match="rest of 1 parcels"):
            read(list(messages_of(writer))[:-1])

    @given(st.data())
    @settings(max_examples=300)
    def test_any_flipped_bit_is_noticed(self, data):
        writer = ParcelWriter()
        writer.add(entry(), [torch.arange(50.0)])
        message = bytearray(writer.next_message())
        position = data.draw(st.integers(0, len(message) - 1))
        message[position] ^= 1 << data.draw(st.integers(0, 7))
        with pytest.raises(CorruptDataError):
            ParcelReader().feed(bytes(message))

    @given(st.integers(0, 300))
    def test_any_cut_is_noticed(self, length):
        writer = ParcelWriter()
        writer.add(entry(), [torch.arange(50.0)])
        message = writer.next_message()
        with pytest.raises(CorruptDataError):
            ParcelReader().feed(message[: min(length, len(message) - 1)])

    @given(st.binary(max_size=200))
    def test_any_bytes_under_a_right_checksum_end_in_our_errors(self, garbage):
        with pytest.raises(CorruptDataError):
            ParcelReader().feed(sealed_bytes(b"\x0a\xff" + garbage))

    @given(st.data())
    @settings(max_examples=300)
    def test_any_structure_ends_in_parcels_or_our_errors(self, data):
        numbers = st.integers(0, 3) | st.integers(0, 2**32 - 1)
        headers = st.builds(
            lambda dtype, shape, encoding, size: pb.TensorHeader(
                dtype=dtype, shape=shape, encoding=encoding, num_bytes=size
            ),
            st.integers(0, 14),
            st.lists(numbers, max_size=3),
            st.integers(0, 4),
            numbers,
        )
        announcements = st.builds(
            lambda number, tensors: announce(number, *tensors), numbers, st.lists(headers)
        )
        parts = st.builds(
            lambda parcel, tensor, offset, size: pb.Part(
                parcel=parcel, tensor=tensor, offset=offset, num_bytes=size
            ),
            *[numbers] * 4,
        )
        message = packet(
            *data.draw(st.lists(announcements, max_size=4)),
            parts=tuple(data.draw(st.lists(parts, max_size=4))),
            payload=data.draw(st.binary(max_size=100)),
        )
        reader = ParcelReader(TensorLimits(max_tensor_bytes=1 << 16))
        try:
            received = reader.feed(message)
        except CorruptDataError:
            return
        assert all(parcel.error is not None or parcel.head is not None for parcel in received)


def sealed_bytes(fields: bytes) -> bytes:
    return fields + b"\x79" + xxhash.xxh3_64_intdigest(fields).to_bytes(8, "little")


@pytest.mark.parametrize("max_tensor_bytes", [1000, 1 << 30, 3 << 30])
def test_a_tensor_of_the_largest_size_finds_room_in_a_stream(max_tensor_bytes: int) -> None:
    limits = TensorLimits.of_one_tensor(max_tensor_bytes)
    assert limits.max_tensor_bytes == max_tensor_bytes
    assert limits.max_unfinished_bytes >= max(max_tensor_bytes, TensorLimits().max_unfinished_bytes)


def test_a_stream_that_never_ends_brings_only_so_many_parcels_that_are_refused() -> None:
    reader, most = ParcelReader(), 1 << 16
    refused = [pb.Announcement(parcel=number) for number in range(most + 1)]
    for first in range(0, most, 1 << 12):
        parcels = reader.feed(packet(*refused[first : first + (1 << 12)]))
        assert all(isinstance(parcel.error, InvalidCallError) for parcel in parcels)
    with pytest.raises(CorruptDataError, match="expected at most 65536 parcels that are refused, got more"):
        reader.feed(packet(refused[most]))
