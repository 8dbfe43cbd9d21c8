"""Whatever a client says, its server can answer: a parcel that a reader returns has a number that a result can name."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from moe_autograd.errors import CorruptDataError
from moe_autograd.wire import experts_pb2 as pb
from moe_autograd.wire.framing import frame_packet
from moe_autograd.wire.heads import RESULT, ResultHead
from moe_autograd.wire.parcels import Parcel, ParcelReader, ParcelWriter
from moe_autograd.wire.status import status_of
from moe_autograd.wire.tensors import TensorLimits
from tests.support.parcels import messages_of

WIDTH = 4
_TOP = (1 << 64) - 1
gaps = st.integers(1, 3)
starts = st.integers(0, 3) | st.integers(_TOP - 6, _TOP)
rows = st.lists(st.integers(1, 3), min_size=1, max_size=4)
lies = st.sampled_from([0] * 8 + [-1, 1, 1 << 40])  # mostly the truth, so that what is said goes deep


@st.composite
def messages(draw: st.DrawFn) -> bytes:
    """A message of runs and single calls, hardly wrong, whose numbers may end where those of protobuf do."""
    number, announcements, parts, num_bytes = draw(starts), [], [], 0
    for num_rows in draw(st.lists(rows, min_size=1, max_size=3)):
        if number > _TOP:
            break
        size = 4 * WIDTH * sum(num_rows)
        header = pb.TensorHeader(dtype=pb.FLOAT32, shape=[sum(num_rows), WIDTH], num_bytes=size + draw(lies))
        said = {"parcel": number, "tensors": [header.SerializeToString()]}
        if draw(st.booleans()):
            alike, count = pb.ForwardCall(client_id=b"c"), len(num_rows)
            run = pb.Run(num_rows=num_rows, experts=["e"] * count, call_ids=range(count), forward_call=alike)
            announcements.append(pb.Announcement(**said, run=run))
        else:
            announcements.append(pb.Announcement(**said, forward_call=pb.ForwardCall(expert="e")))
        parts.append(pb.Part(parcel=number, num_bytes=size))
        number, num_bytes = number + len(num_rows) + draw(gaps), num_bytes + size
    contents = pb.Contents(announcements=announcements, parts=parts)
    return frame_packet(contents.SerializeToString(), [bytes(num_bytes)], num_bytes)


@settings(max_examples=400, deadline=None)
@given(st.lists(messages(), min_size=1, max_size=3))
def test_every_parcel_that_is_read_can_be_answered(said: list[bytes]) -> None:
    reader, writer, numbers = ParcelReader(TensorLimits(max_tensor_bytes=1 << 16)), ParcelWriter(), []
    try:
        for message in said:
            for parcel in reader.feed(message):
                numbers.append(parcel.number)
                _answer(writer, parcel)
    except CorruptDataError:
        pass
    answers = [parcel for message in messages_of(writer) for parcel in ParcelReader().feed(message)]
    assert all(isinstance(answer.head, RESULT) for answer in answers)
    assert [answer.head.call for answer in answers if isinstance(answer.head, RESULT)] == numbers


def _answer(writer: ParcelWriter, parcel: Parcel) -> None:
    head = ResultHead(parcel.number)
    if parcel.error is None:
        writer.add(head, parcel.tensors)
    else:
        writer.add(pb.CallResult(call=parcel.number, status=status_of(parcel.error)))
