"""Parcels out of messages, for the tests of the wire."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from moe_autograd.wire.parcels import Parcel, ParcelReader, ParcelWriter
from moe_autograd.wire.tensors import TensorLimits


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
