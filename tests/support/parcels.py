"""Parcels out of messages, and messages with any contents, for the tests of the wire."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from moe_autograd.wire import experts_pb2 as pb
from moe_autograd.wire.framing import seal
from moe_autograd.wire.parcels import Parcel, ParcelReader, ParcelWriter
from moe_autograd.wire.tensors import TensorLimits

PART_BYTES = 1024


def messages_of(writer: ParcelWriter) -> Iterator[bytes]:
    """Yield all that `writer` has to say."""
    while (message := writer.next_message()) is not None:
        yield message


def read(messages: Iterable[bytes], limits: TensorLimits | None = None) -> list[Parcel]:
    """Return the parcels of a stream of these messages."""
    reader = ParcelReader(limits)
    received = [parcel for message in messages for parcel in reader.feed(message)]
    reader.finish()
    return received


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
