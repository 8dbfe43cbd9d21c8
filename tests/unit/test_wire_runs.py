"""Runs: small parcels alike arrive as they were sent, cost little, and lies about them are refused."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from moe_autograd.errors import CorruptDataError
from moe_autograd.wire import experts_pb2 as pb
from moe_autograd.wire.framing import frame_packet, take_packet_apart
from moe_autograd.wire.heads import BackwardHead, ForwardHead, Head, ResultHead
from moe_autograd.wire.options import PART_BYTES
from moe_autograd.wire.parcels import ParcelReader, ParcelWriter
from moe_autograd.wire.runs import MAX_IN_RUN
from moe_autograd.wire.tensors import DTYPES, TensorLimits
from tests.support.parcels import messages_of, read


def forward(expert: str = "ffn.0", call_id: int = 1, **fields: Any) -> ForwardHead:
    given_fields = {"keep_graph": True, "input_requires_grad": (True,), **fields}
    return ForwardHead(b"client", call_id, expert, **given_fields)


def backward(expert: str = "ffn.0", sequence: int = 1, **fields: Any) -> BackwardHead:
    return BackwardHead(b"client", sequence, 3, sequence + 7, expert, True, (True,), **fields)


def sent(*parcels: tuple[Head, list[Tensor | None]]) -> list[bytes]:
    writer = ParcelWriter()
    for head, tensors in parcels:
        writer.add(head, tensors)
    return list(messages_of(writer))


def contents_of(message: bytes) -> pb.Contents:
    return pb.Contents.FromString(take_packet_apart(message).contents)


heads = st.one_of(
    st.builds(
        ForwardHead,
        st.sampled_from([b"a", b"b"]),
        st.integers(0, 2**64 - 1),
        st.sampled_from(["ffn.0", "ffn.1", "\u00e9"]),
        st.booleans(),
        st.lists(st.booleans(), max_size=2).map(tuple),
        st.booleans(),
        st.sampled_from([pb.RAW, pb.AS_BFLOAT16]),
        st.sampled_from([0, 0, 1, 2**64 - 1]),
    ),
    st.builds(
        BackwardHead,
        st.sampled_from([b"a", b"b"]),
        st.integers(0, 2**64 - 1),
        st.integers(0, 2),
        st.integers(0, 2**64 - 1),
        st.sampled_from(["ffn.0", "ffn.1"]),
        st.booleans(),
        st.lists(st.booleans(), max_size=2).map(tuple),
        st.booleans(),
        st.integers(0, 2),
        st.booleans(),
        st.booleans(),
        st.just(pb.RAW),
        st.sampled_from([0, 0, 2**64 - 1]),
    ),
    st.builds(
        ResultHead,
        st.integers(0, 2**63),
        st.booleans(),
        st.floats(0, 9),
        st.floats(0, 9),
        st.booleans(),
        st.booleans(),
    ),
)
shapes = st.sampled_from([(), (0, 4), (1, 4), (3, 4), (3, 4), (2, 4), (5,), (2, 3, 4), (200, 200)])
tensors = st.tuples(shapes, st.sampled_from([torch.float32, torch.float32, torch.bool, torch.int64]))


class TestRoundTrip:
    @given(st.lists(st.tuples(heads, st.lists(tensors, min_size=1, max_size=2)), max_size=12), st.booleans())
    def test_any_parcels_arrive_as_they_were_sent(self, described, interleave):
        writer, messages, given_parcels = ParcelWriter(1 << 14), [], {}
        for head, forms in described:
            made = [torch.randint(0, 2, shape).to(dtype) for shape, dtype in forms]
            given_parcels[writer.add(head, made)] = (head, made)
            if interleave and len(given_parcels) % 3 == 0:
                messages.append(writer.next_message())
        received = read([*messages, *messages_of(writer)])
        assert sorted(parcel.number for parcel in received) == sorted(given_parcels)
        for parcel in received:
            head, made = given_parcels[parcel.number]
            assert parcel.head in (head, head.message())
            assert [(t.dtype, t.shape) for t in parcel.tensors] == [(t.dtype, t.shape) for t in made]
            assert all(torch.equal(a, b) for a, b in zip(parcel.tensors, made, strict=True))

    @pytest.mark.parametrize("dtype", DTYPES, ids=str)
    def test_every_dtype(self, dtype):
        made = [torch.randint(0, 2, (rows, 3)).to(dtype) for rows in (1, 4, 2)]
        received = read(sent(*((forward(call_id=rows), [t]) for rows, t in enumerate(made))))
        assert all(torch.equal(parcel.tensors[0], t) for parcel, t in zip(received, made, strict=True))

    def test_each_call_keeps_its_random_seed(self):
        seeds = [0, 7, (1 << 64) - 1]
        received = read(sent(*((forward(random_seed=seed), [torch.ones(1, 4)]) for seed in seeds)))
        assert [parcel.head.random_seed for parcel in received] == seeds

    def test_tensors_that_are_not_plain_memory_travel_by_value(self):
        made = [
            torch.arange(12.0).view(3, 4).t(),
            torch.arange(24.0).view(4, 6)[:, ::2],
            torch.tensor([[1.0]]).expand(2, 3),
        ]
        received = read(sent(*((forward(), [t]) for t in made)))
        assert all(torch.equal(parcel.tensors[0], t) for parcel, t in zip(received, made, strict=True))

    @pytest.mark.parametrize("numel", [1500, 5000])
    def test_beside_parts_of_a_large_tensor(self, numel):
        large, small = torch.arange(float(numel)), torch.ones(1, 4)
        writer = ParcelWriter(1 << 12)
        writer.add(forward("large"), [large])
        first = writer.next_message()
        for call_id in range(3):
            writer.add(forward(call_id=call_id), [small])
        writer.add(forward("odd"), [torch.zeros(0, 4), torch.ones(2)])
        received = {p.number: p for p in read([first, *messages_of(writer)])}
        assert torch.equal(received[0].tensors[0], large)
        assert [received[n].head.call_id for n in (1, 2, 3)] == [0, 1, 2]
        assert all(torch.equal(received[n].tensors[0], small) for n in (1, 2, 3))
        assert torch.equal(received[4].tensors[1], torch.ones(2))


class TestCost:
    @pytest.mark.parametrize(
        "head",
        [lambda n: forward(f"ffn.{n}", n), lambda n: backward(f"ffn.{n}", n), ResultHead],
        ids=["forward", "backward", "result"],
    )
    def test_a_pass_over_many_experts_is_one_announcement_and_one_part(self, head: Callable[[int], Head]):
        (message,) = sent(*((head(n), [torch.ones(1 + n % 3, 8)]) for n in range(64)))
        contents = contents_of(message)
        assert (len(contents.announcements), len(contents.parts)) == (1, 1)
        run = contents.announcements[0].run
        assert list(run.num_rows) == [1 + n % 3 for n in range(64)]
        assert not run.random_seeds, "none draws random numbers"

    @pytest.mark.parametrize(
        "other",
        [
            (forward(keep_graph=False), torch.ones(2, 4)),
            (forward(input_requires_grad=(False,)), torch.ones(2, 4)),
            (forward(evaluate=True), torch.ones(2, 4)),
            (forward(reply_encoding=pb.AS_BFLOAT16), torch.ones(2, 4)),
            (forward(), torch.ones(2, 5)),
            (forward(), torch.ones(2, 4, dtype=torch.float64)),
            (backward(), torch.ones(2, 4)),
        ],
        ids=["graph", "input gradients", "evaluate", "encoding", "row", "dtype", "kind"],
    )
    def test_what_is_not_alike_is_not_in_one_run(self, other):
        head, tensor = other
        (message,) = sent((forward(), [torch.ones(2, 4)]), (head, [tensor]), (forward(), [torch.ones(2, 4)]))
        assert len(contents_of(message).announcements) == 3
        alone = [forward().message(), head.message(), forward().message()]
        assert [parcel.head for parcel in read([message])] == alone

    def test_large_tensors_and_tensors_without_elements_travel_by_themselves(self):
        messages = sent(*((forward(), [torch.ones(rows, 1 << 14)]) for rows in (0, 1, 1, 0, 1, 1, 2, 1)))
        kinds = [a.WhichOneof("head") for message in messages for a in contents_of(message).announcements]
        assert kinds == ["forward_call", "run", "forward_call", "run", "forward_call", "forward_call"]

    def test_tensors_that_are_larger_than_a_part_are_not_in_a_run(self):
        writer = ParcelWriter(part_bytes=64)
        for _ in range(2):
            writer.add(forward(), [torch.ones(1, 17)])
        sizes = [part.num_bytes for message in messages_of(writer) for part in contents_of(message).parts]
        assert max(sizes) == 64

    def test_a_run_and_a_message_have_limits(self):
        messages = sent(*((ResultHead(n), [torch.ones(1, 1)]) for n in range(3 * MAX_IN_RUN)))
        assert [len(a.run.num_rows) for m in messages for a in contents_of(m).announcements] == [
            MAX_IN_RUN
        ] * 3
        assert len(read(messages)) == 3 * MAX_IN_RUN

    def test_a_message_never_has_more_parcels_than_a_reader_takes(self, monkeypatch):
        monkeypatch.setattr("moe_autograd.wire.writing.MAX_PARCELS", 2 * MAX_IN_RUN)
        monkeypatch.setattr("moe_autograd.wire.reading.MAX_PARCELS", 2 * MAX_IN_RUN)
        messages = sent(*((ResultHead(n), [torch.ones(1, 1)]) for n in range(5 * MAX_IN_RUN)))
        assert [len(contents_of(message).announcements) for message in messages] == [2, 2, 1]
        assert len(read(messages)) == 5 * MAX_IN_RUN


class TestMemory:
    def test_each_tensor_has_a_version_of_its_own_and_can_be_a_leaf(self):
        one, other = (p.tensors[0] for p in read(sent(*((forward(), [torch.ones(2, 4)]) for _ in range(2)))))
        one.requires_grad_()
        loss = (one * 2).sum() + (one * one).sum()
        other.mul_(3)
        loss.backward()
        assert torch.equal(one.grad, torch.full((2, 4), 4.0))
        assert torch.equal(one, torch.ones(2, 4)), "to write to one is not to write to its neighbour"
        assert other._version == 1
        assert one._version == 0
        assert one.is_leaf
        assert not one._is_view()

    def test_each_tensor_has_memory_of_its_own_and_the_message_goes(self):
        (message,) = sent(*((forward(), [torch.ones(2, 4)]) for _ in range(20)))
        num_references = sys.getrefcount(message)
        one, *others = (parcel.tensors[0] for parcel in read([message]))
        assert sys.getrefcount(message) == num_references
        assert {tensor.untyped_storage().nbytes() for tensor in (one, *others)} == {32}
        one.resize_(4, 4).zero_()
        assert all(torch.equal(other, torch.ones(2, 4)) for other in others)

    def test_nor_does_a_small_tensor_keep_the_message_of_a_large_one(self):
        (message,) = sent((forward(), [torch.ones(2, 4), torch.ones(1000)]))
        num_references = sys.getrefcount(message)
        small, large = read([message])[0].tensors
        assert sys.getrefcount(message) == num_references + 1, "the large one is a view of it"
        del large
        assert sys.getrefcount(message) == num_references
        assert torch.equal(small, torch.ones(2, 4))

    def test_they_are_finite_together(self):
        reader = ParcelReader()
        for value, are in ((1.0, True), (float("nan"), False), (float("inf"), False)):
            (message,) = sent(
                (forward(), [torch.ones(2, 4)]), (forward(), [torch.tensor([[1.0, 2.0, 3.0, value]])])
            )
            reader = ParcelReader()
            reader.feed(message)
            assert reader.prove_finite() is are


def run_of(**changes: Any) -> pb.Run:
    run = pb.Run(
        num_rows=[1, 2],
        experts=["ffn.0", "ffn.1"],
        call_ids=[1, 2],
        forward_call=pb.ForwardCall(client_id=b"c", keep_graph=True),
    )
    for name, value in changes.items():
        run.ClearField(name)
        getattr(run, name).extend(value)
    return run


def lie(
    run: pb.Run,
    shape: tuple[int, ...] = (3, 4),
    num_bytes: int = 48,
    num_tensors: int = 1,
    part_bytes: int = 48,
    number: int = 4,
) -> bytes:
    """A message that says this of its run."""
    header = pb.TensorHeader(dtype=pb.FLOAT32, shape=shape, num_bytes=num_bytes).SerializeToString()
    contents = pb.Contents(
        announcements=[pb.Announcement(parcel=number, tensors=[header] * num_tensors, run=run)],
        parts=[pb.Part(parcel=number, num_bytes=part_bytes)],
    )
    return frame_packet(contents.SerializeToString(), [bytes(part_bytes)], part_bytes)


class TestRefusal:
    def test_the_truth_is_taken(self):
        first, second = read([lie(run_of())])
        assert (first.number, second.number) == (4, 5)
        assert (first.head.expert, second.head.expert, second.head.call_id) == ("ffn.0", "ffn.1", 2)
        assert [p.tensors[0].shape for p in (first, second)] == [(1, 4), (2, 4)]

    @pytest.mark.parametrize(
        ("message", "text"),
        [
            (lie(run_of(num_rows=[])), "expected 1 to 1024 parcels, got 0"),
            (lie(run_of(num_rows=[1] * 1025)), "expected 1 to 1024 parcels, got 1025"),
            (lie(run_of(num_rows=[1, 3])), "2 parcels of at least one row, 4 rows together"),
            (lie(run_of(num_rows=[3, 0])), "at least one row"),
            (lie(run_of(num_rows=[2**63, 2**63 + 3])), "at least one row"),
            (lie(run_of(num_rows=[1, 1, 1])), "one entry for each of 3 parcels, got 2 experts"),
            (lie(run_of(experts=["ffn.0"])), "one entry for each of 2 parcels, got 1 experts"),
            (lie(run_of(call_ids=[1, 2, 3])), "got 2 experts, 3 calls"),
            (
                lie(pb.Run(num_rows=[3], experts=["e"], call_ids=[1])),
                "a head that its parcels have in common, got none",
            ),
            (
                lie(pb.Run(num_rows=[3], experts=["e"], call_ids=[1], backward_call=pb.BackwardCall())),
                "0 sequence numbers",
            ),
            (lie(pb.Run(num_rows=[3], call_ids=[1], call_result=pb.CallResult())), "0 and 0 times"),
            (lie(run_of(), shape=(), num_bytes=4, part_bytes=4), "shape \\(\\)"),
            (lie(run_of(), shape=(0, 4), num_bytes=0), "expected its one tensor in this message"),
            (lie(run_of(), num_tensors=2), "got 2 announced"),
            (lie(run_of(), num_tensors=0), "got 0 announced"),
            (lie(run_of(), part_bytes=32), "expected its one tensor in this message"),
        ],
    )
    def test_a_run_that_contradicts_itself_ends_the_stream(self, message, text):
        with pytest.raises(CorruptDataError, match=text):
            read([message])

    @pytest.mark.parametrize(
        ("message", "text"),
        [
            (lie(run_of(), shape=(3, 1 << 40), num_bytes=3 << 42), f"expected at most {PART_BYTES} bytes"),
            (lie(run_of(), num_bytes=47), "expected 48 bytes"),
            (lie(run_of(), shape=(3, *[1] * 64)), "at most 64 dimensions"),
        ],
    )
    def test_a_run_that_asks_for_too_much_is_refused_parcel_by_parcel(self, message, text):
        good = sent(*((forward(), [torch.ones(1, 4)]) for _ in range(9)))
        reader = ParcelReader(TensorLimits(max_tensor_bytes=1024))
        received = reader.feed(message)
        assert [(parcel.number, parcel.head.expert) for parcel in received] == [(4, "ffn.0"), (5, "ffn.1")]
        assert all(text in str(parcel.error) for parcel in received)
        assert all(parcel.error is None for parcel in ParcelReader().feed(good[0]))

    @pytest.mark.parametrize("num_bytes", [47, 48, 95, 96])
    def test_a_limit_is_of_each_tensor_and_not_of_a_run(self, num_bytes):
        messages = sent(*((forward(), [torch.ones(rows, 4)]) for rows in (3, 6, 3)))
        received = read(messages, TensorLimits(max_tensor_bytes=num_bytes))
        taken = [rows * 16 <= num_bytes for rows in (3, 6, 3)]
        assert [len(parcel.tensors) == 1 and parcel.error is None for parcel in received] == taken
        for parcel, rows, is_taken in zip(received, (3, 6, 3), taken, strict=True):
            text = f"expected at most {num_bytes} bytes, got shape ({rows}, 4) of torch.float32 ({16 * rows} bytes)"
            assert is_taken or text in str(parcel.error)

    def test_bools_that_are_none_are_refused(self):
        header = pb.TensorHeader(dtype=pb.BOOL, shape=[3, 4], num_bytes=12).SerializeToString()
        contents = pb.Contents(
            announcements=[pb.Announcement(parcel=0, tensors=[header], run=run_of())],
            parts=[pb.Part(parcel=0, num_bytes=12)],
        )
        received = read([frame_packet(contents.SerializeToString(), [b"\x02" * 12], 12)])
        assert ["expected bools" in str(parcel.error) for parcel in received] == [True, True]

    def test_a_number_within_a_run_cannot_be_used_again(self):
        reader = ParcelReader()
        reader.feed(lie(run_of()))
        again = pb.Contents(announcements=[pb.Announcement(parcel=5, state_entry=pb.StateEntry())])
        with pytest.raises(CorruptDataError, match="expected a number from 6 on"):
            reader.feed(frame_packet(again.SerializeToString(), [], 0))

    def test_no_number_within_a_run_is_larger_than_what_its_answer_can_say(self):
        assert [parcel.number for parcel in read([lie(run_of(), number=(1 << 64) - 2)])] == [
            (1 << 64) - 2,
            (1 << 64) - 1,
        ]
        with pytest.raises(CorruptDataError, match=r"expected numbers below 2\*\*64, got 2 from there"):
            read([lie(run_of(), number=(1 << 64) - 1)])

    def test_a_message_of_too_many_parcels_ends_the_stream_before_they_are_made(self, monkeypatch):
        monkeypatch.setattr("moe_autograd.wire.reading.MAX_PARCELS", 3)
        with pytest.raises(CorruptDataError, match="expected at most 3 parcels in a message, got 4"):
            read(sent(*((forward(), [torch.ones(1, 4)]) for _ in range(4))))
        many = pb.Contents(announcements=[pb.Announcement(parcel=n) for n in range(4)])
        with pytest.raises(CorruptDataError, match="expected at most 3 parcels in a message, got 4"):
            read([frame_packet(many.SerializeToString(), [], 0)])
