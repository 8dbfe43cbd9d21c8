"""The parcel writer and reader: round trips of anything, and refusal of everything malformed."""

from __future__ import annotations

import math
import random
import weakref

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_autograd.errors import CorruptDataError, InvalidCallError
from moe_autograd.wire import experts_pb2 as pb
from moe_autograd.wire.framing import seal, take_packet_apart
from moe_autograd.wire.parcels import ParcelReader, ParcelWriter
from moe_autograd.wire.tensors import DTYPES, TensorLimits
from tests.support.parcels import messages_of, read

PART_BYTES = 1024
shapes = st.lists(st.integers(0, 9), max_size=4).map(tuple)
tensors = st.none() | st.tuples(shapes, st.sampled_from(list(DTYPES)), st.integers(0, 2**31))
parcels = st.lists(st.lists(tensors, max_size=4), max_size=6)


def make_tensor(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point or dtype.is_complex:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(0, 2 if dtype == torch.bool else 100, shape, generator=generator).to(dtype)


def same(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.dtype == other.dtype and one.shape == other.shape and bool((one == other).all())


def entry(key: str = "weight") -> pb.StateEntry:
    return pb.StateEntry(expert="ffn.0", key=key)


def packet(*announcements: pb.Announcement, parts: tuple[pb.Part, ...] = (), payload: bytes = b"") -> bytes:
    """A packet of any contents, written by protobuf itself and not by our writer."""
    contents = pb.Contents(announcements=announcements, parts=parts)
    return seal(pb.Packet(contents=contents, payload=payload))


def announce(number: int = 0, *headers: pb.TensorHeader) -> pb.Announcement:
    written = [header.SerializeToString() for header in headers]
    return pb.Announcement(parcel=number, tensors=written, state_entry=entry())


def floats(numel: int) -> pb.TensorHeader:
    return pb.TensorHeader(dtype=pb.FLOAT32, shape=[numel], num_bytes=4 * numel)


class TestRoundTrip:
    @given(parcels, st.booleans())
    def test_any_tensors_arrive_as_they_were_sent(self, described, interleave):
        writer, sent, messages = ParcelWriter(PART_BYTES), {}, []
        for index, parcel in enumerate(described):
            made = [None if tensor is None else make_tensor(*tensor) for tensor in parcel]
            sent[writer.add(entry(str(index)), made)] = (str(index), made)
            if interleave and (message := writer.next_message()) is not None:
                messages.append(message)
        received = read(messages + list(messages_of(writer)))
        assert sorted(parcel.number for parcel in received) == sorted(sent)
        for parcel in received:
            key, made = sent[parcel.number]
            assert parcel.head == entry(key)
            assert parcel.error is None
            assert len(parcel.tensors) == len(made)
            assert all(map(same, parcel.tensors, made))

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    @pytest.mark.parametrize("numel", [1, 100, 5000])
    def test_every_dtype_in_one_part_and_in_several(self, dtype, numel):
        writer = ParcelWriter(PART_BYTES)
        tensor = make_tensor((numel,), dtype, seed=3)
        writer.add(entry(), [tensor])
        messages = list(messages_of(writer))
        assert len(messages) == -(-numel * dtype.itemsize // PART_BYTES)
        assert same(read(messages)[0].tensors[0], tensor)

    @pytest.mark.parametrize(
        "tensor",
        [
            torch.arange(12.0).view(3, 4).t(),
            torch.arange(12.0)[::3],
            torch.tensor(3.0).expand(4, 5),
            torch.tensor([1 + 2j, 3 - 1j]).conj(),
            torch.tensor([1 + 2j, 3 - 1j]).conj().imag,
            torch.ones(3, requires_grad=True) * 2,
            torch.zeros(0, 7),
            torch.tensor(7),
        ],
        ids=["transposed", "strided", "expanded", "conjugated", "negated", "with graph", "empty", "0-dim"],
    )
    def test_tensors_that_are_not_plain_memory_travel_by_value(self, tensor):
        writer = ParcelWriter()
        writer.add(entry(), [tensor])
        (received,) = read(messages_of(writer))
        assert same(received.tensors[0], tensor)
        assert not received.tensors[0].requires_grad

    def test_every_kind_of_head_arrives(self):
        heads = [
            pb.ForwardCall(client_id=b"c", call_id=2**63, expert="ffn.3", input_requires_grad=[True, False]),
            pb.BackwardCall(sequence=7, settled_below=5, expert="ffn.3", wants_weight_grads=True),
            pb.CallResult(call=3, status=pb.Status(code=pb.BUSY, message="full", retry_after_s=0.5)),
            pb.StateUpdate(num_entries=2),
            entry(),
        ]
        writer = ParcelWriter()
        for head in heads:
            writer.add(head)
        assert [parcel.head for parcel in read(messages_of(writer))] == heads

    def test_received_tensors_can_be_written_without_touching_each_other(self):
        writer = ParcelWriter()
        writer.add(entry(), [torch.ones(5), torch.ones(5)])
        one, other = read(messages_of(writer))[0].tensors
        one.add_(1)
        assert other.tolist() == [1.0] * 5
        assert other._version == 0

    def test_received_tensors_are_aligned(self):
        writer = ParcelWriter()
        for key_length in range(40):
            writer.add(
                entry("k" * key_length), [torch.ones(key_length + 1, dtype=torch.uint8), torch.ones(2)]
            )
        messages = [*messages_of(writer)]
        writer.add(entry(), [torch.ones(1, dtype=torch.complex128)])
        for parcel in read(messages + list(messages_of(writer))):
            assert [tensor.data_ptr() % 16 for tensor in parcel.tensors] == [0] * len(parcel.tensors)

    def test_tensors_outlive_reader_and_message(self):
        writer = ParcelWriter()
        writer.add(entry(), [torch.arange(1000)])
        (parcel,) = read(messages_of(writer))
        junk = [bytes([index]) * 9000 for index in range(50)]
        assert parcel.tensors[0].tolist() == list(range(1000))
        assert len(junk) == 50


class TestSharing:
    def test_small_calls_share_a_message(self):
        writer = ParcelWriter()
        for _ in range(64):
            writer.add(pb.ForwardCall(expert="ffn.0"), [torch.ones(1024)])
        assert len(list(messages_of(writer))) == 1

    def test_a_large_tensor_does_not_hold_up_a_small_one(self):
        writer = ParcelWriter(PART_BYTES)
        large = writer.add(entry(), [torch.ones(100 * PART_BYTES)])
        small = writer.add(entry(), [torch.ones(3)])
        reader = ParcelReader()
        done = [[parcel.number for parcel in reader.feed(message)] for message in messages_of(writer)]
        assert [small] in done[:2]
        assert done[-1] == [large]

    def test_large_tensors_take_turns(self):
        writer = ParcelWriter(PART_BYTES)
        for _ in range(3):
            writer.add(entry(), [torch.ones(PART_BYTES, dtype=torch.float64)])
        reader = ParcelReader()
        done = [len(reader.feed(message)) for message in messages_of(writer)]
        assert len(done) == 24
        assert sum(done[:-3]) == 0

    def test_messages_are_hardly_larger_than_a_part(self):
        writer = ParcelWriter(PART_BYTES)
        for size in random.Random(0).choices(range(2000), k=200):
            writer.add(entry(), [torch.ones(size)])
        assert max(map(len, messages_of(writer))) < PART_BYTES + 400

    def test_a_call_added_later_continues_the_stream(self):
        writer = ParcelWriter(PART_BYTES)
        first = writer.add(entry(), [torch.ones(2000)])
        messages = [writer.next_message()]
        second = writer.add(entry(), [torch.ones(2)])
        received = read(messages + list(messages_of(writer)))
        assert {parcel.number for parcel in received} == {first, second}
        assert not writer
        assert writer.next_message() is None


class TestProtobuf:
    """Our hand-written frames are what protobuf writes, and what protobuf writes is read."""

    @pytest.mark.parametrize("key_length", range(20))
    @pytest.mark.parametrize("numel", [0, 1, 200])
    def test_a_message_is_byte_for_byte_what_protobuf_writes(self, key_length, numel):
        writer = ParcelWriter()
        writer.add(entry("k" * key_length), [torch.ones(numel), torch.ones(3, dtype=torch.uint8)])
        message = writer.next_message()
        assert pb.Packet.FromString(message).SerializeToString() == message

    def test_the_payload_of_a_message_is_the_tensors_memory(self):
        writer = ParcelWriter()
        writer.add(
            entry(), [torch.tensor([1, 2, 3], dtype=torch.uint8), torch.tensor([4, 5], dtype=torch.int16)]
        )
        payload = pb.Packet.FromString(writer.next_message()).payload
        assert payload == bytes([1, 2, 3]) + bytes(13) + bytes([4, 0, 5, 0])

    def test_a_packet_without_padding_is_read_into_aligned_tensors(self):
        head = pb.Announcement(tensors=[floats(1).SerializeToString()], state_entry=entry("odd"))
        message = packet(head, parts=(pb.Part(num_bytes=4),), payload=bytes([0, 0, 0x80, 0x3F]))
        assert take_packet_apart(message).payload_start % 4 != 0
        (parcel,) = read([message])
        assert parcel.tensors[0].tolist() == [1.0]
        assert parcel.tensors[0].data_ptr() % 4 == 0


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
            (pb.TensorHeader(dtype=pb.FLOAT32, shape=[3], num_bytes=11), "expected 12 bytes"),
            (pb.TensorHeader(dtype=pb.FLOAT32, shape=[3], num_bytes=2**63), "expected 12 bytes"),
            (pb.TensorHeader(dtype=pb.FLOAT32, shape=[1] * 65, num_bytes=4), "at most 64 dimensions"),
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
        assert reader.are_finite() is are_finite
        assert reader.are_finite() is False, "the message is let go of"

    def test_nothing_is_known_of_values_that_came_in_parts(self):
        writer, reader = ParcelWriter(part_bytes=64), ParcelReader()
        writer.add(entry(), [torch.zeros(20)])
        while (message := writer.next_message()) is not None:
            reader.feed(message)
            assert not reader.are_finite()

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


class TestWriter:
    def test_a_tensor_that_cannot_travel_is_refused_and_nothing_is_queued(self):
        writer = ParcelWriter()
        with pytest.raises(TypeError, match="sparse"):
            writer.add(entry(), [torch.eye(3).to_sparse()])
        assert not writer

    def test_the_writer_lets_go_of_what_it_has_sent(self):
        writer = ParcelWriter()
        tensor = torch.ones(10)
        alive = weakref.ref(tensor)
        writer.add(entry(), [tensor])
        writer.next_message()
        del tensor
        assert alive() is None

    def test_repr_shows_what_is_to_be_sent(self):
        writer = ParcelWriter()
        writer.add(entry())
        assert repr(writer) == "ParcelWriter(1 parcels to send)"
