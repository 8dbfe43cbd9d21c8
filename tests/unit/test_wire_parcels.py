"""The parcel writer and reader: round trips of anything, shared tensors, and what protobuf makes of the messages."""

from __future__ import annotations

import random
import weakref

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from moe_autograd.wire import experts_pb2 as pb
from moe_autograd.wire.framing import take_packet_apart
from moe_autograd.wire.parcels import ParcelReader, ParcelWriter
from moe_autograd.wire.tensors import DTYPES
from tests.support.parcels import PART_BYTES, entry, floats, messages_of, packet, read

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

    @pytest.mark.parametrize("numel", [0, 1, 5000])
    def test_the_last_message_says_so_and_no_other(self, numel):
        for is_complete in (True, False):
            writer, reader = ParcelWriter(PART_BYTES), ParcelReader()
            for _ in range(3):
                writer.add(entry(), [torch.randn(numel)])
            writer.is_complete = is_complete
            messages = list(messages_of(writer))
            said = []
            for message in messages:
                reader.feed(message)
                said.append(reader.has_last)
            assert said == [False] * (len(messages) - 1) + [is_complete]

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
            torch._efficientzerotensor((2, 3)),
        ],
        ids=[
            "transposed",
            "strided",
            "expanded",
            "conjugated",
            "negated",
            "with-graph",
            "empty",
            "0-dim",
            "zeros-without-memory",
        ],
    )
    def test_tensors_that_are_not_plain_memory_travel_by_value(self, tensor):
        writer = ParcelWriter()
        writer.add(entry(), [tensor])
        (received,) = read(messages_of(writer))
        assert same(received.tensors[0], tensor)
        assert not received.tensors[0].requires_grad

    def test_a_tensor_whose_memory_was_freed_is_refused(self):
        tensor = torch.ones(3)
        tensor.untyped_storage().resize_(0)
        with pytest.raises(
            TypeError, match=r"tensor: expected memory, got \(3,\) without: its storage was freed"
        ):
            ParcelWriter().add(entry(), [tensor])

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

    @pytest.mark.parametrize(
        ("num_tensors", "key"), [(4, "w"), (1, "w" * (PART_BYTES - 44))], ids=["gaps", "heads"]
    )
    def test_so_are_those_that_are_gaps_or_heads_mostly(self, num_tensors, key):
        writer = ParcelWriter(PART_BYTES)
        for _ in range(200):
            writer.add(pb.StateEntry(key=key), [torch.ones(1, dtype=torch.uint8)] * num_tensors)
        assert max(map(len, messages_of(writer))) < 1.5 * PART_BYTES

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

    def test_so_are_the_parts_of_large_tensors_and_the_last_message(self):
        writer = ParcelWriter(PART_BYTES)
        for key in "abc":
            writer.add(entry(key), [torch.ones(0), torch.ones(PART_BYTES)])
        writer.is_complete = True
        messages = list(iter(writer.next_message, None))
        packets = [pb.Packet.FromString(message) for message in messages]
        assert [packet.SerializeToString() for packet in packets] == messages
        assert {part.parcel for packet in packets for part in packet.contents.parts} == {0, 1, 2}
        assert max(part.offset for packet in packets for part in packet.contents.parts) == 3 * PART_BYTES
        assert [packet.contents.is_last for packet in packets] == [False] * (len(packets) - 1) + [True]

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
