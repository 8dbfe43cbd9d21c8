"""The half of `parcels` that takes messages apart. It believes nothing that they say."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from google.protobuf.message import DecodeError

from moe_autograd.errors import CorruptDataError, InvalidCallError
from moe_autograd.wire import experts_pb2 as pb
from moe_autograd.wire.framing import ALIGNMENT, take_packet_apart
from moe_autograd.wire.heads import Head, Parcel
from moe_autograd.wire.tensors import (
    Assembly,
    TensorForm,
    TensorLimits,
    check_header,
    empty_of,
    memory_of,
    tensor_in,
)


class ParcelReader:
    """Takes messages apart and returns parcels as they become whole.

    Args:
        limits: what is accepted; a parcel that asks for more is refused by itself.
    """

    def __init__(self, limits: TensorLimits | None = None) -> None:
        self._limits = limits or TensorLimits()
        self._incoming: dict[int, _Incoming] = {}
        self._refused: set[int] = set()
        self._unfinished_bytes = 0
        self._next_number = 0

    def feed(self, message: bytes) -> list[Parcel]:
        """Take in one message; return the parcels that are whole now, and those refused.

        The reader owns `message` from here on: tensors are views of it.

        Raises:
            CorruptDataError: the message is damaged, or its parts have gaps, overlap, or belong to nothing.
                What the stream still carries has no meaning; the parcels returned before are good.
        """
        contents_bytes, payload, payload_start = take_packet_apart(message)
        try:
            contents = pb.Contents.FromString(bytes(contents_bytes))
        except DecodeError as error:
            raise CorruptDataError(f"packet: expected its contents, got {error}.") from error
        done: list[Parcel] = []
        for announcement in contents.announcements:
            self._announce(announcement, done)
        if contents.parts:
            self._take_parts(contents.parts, _Payload(message, payload, payload_start), done)
        return done

    def finish(self) -> None:
        """Say that the stream has ended.

        Raises:
            CorruptDataError: within a parcel.
        """
        if self._incoming:
            raise CorruptDataError(
                f"stream: expected the rest of {len(self._incoming)} parcels, got its end. "
                "The sender stopped in the middle; sending again is safe."
            )

    def __repr__(self) -> str:
        return f"ParcelReader({len(self._incoming)} parcels unfinished, {self._unfinished_bytes} bytes)"

    def _announce(self, announcement: pb.Announcement, done: list[Parcel]) -> None:
        number = announcement.parcel
        if number < self._next_number:
            raise CorruptDataError(
                f"parcel {number}: expected a number from {self._next_number} on, got one used before. "
                "A message was repeated, or the sender is broken."
            )
        self._next_number = number + 1
        head = _head_of(announcement)
        try:
            incoming = self._accept(number, head, announcement.tensors)
        except InvalidCallError as error:
            self._refused.add(number)
            done.append(Parcel(number, head, error=error))
            return
        if incoming.num_missing:
            self._incoming[number] = incoming
            self._unfinished_bytes += incoming.num_bytes
        else:
            done.append(incoming.parcel())

    def _accept(self, number: int, head: Head | None, headers: Sequence[pb.TensorHeader]) -> _Incoming:
        """Check an announcement before anything is kept for it."""
        limits = self._limits
        if head is None:
            raise InvalidCallError(f"parcel {number}: expected a head of experts.proto, got none.")
        if len(headers) > limits.max_tensors:
            raise InvalidCallError(
                f"parcel {number}: expected at most {limits.max_tensors} tensors, "
                f"got {len(headers)}. Send fewer in one call."
            )
        if len(self._incoming) >= limits.max_unfinished_parcels:
            raise InvalidCallError(
                f"parcel {number}: expected at most {limits.max_unfinished_parcels} unfinished parcels in a "
                "stream, got more. Finish some before you begin others."
            )
        forms = [check_header(header.SerializeToString(), limits) for header in headers]
        incoming = _Incoming(number, head, forms)
        if self._unfinished_bytes + incoming.num_bytes > limits.max_unfinished_bytes:
            raise InvalidCallError(
                f"parcel {number}: expected at most {limits.max_unfinished_bytes} unfinished bytes in a stream, "
                f"got {self._unfinished_bytes} and {incoming.num_bytes} more. Send it in a stream of its own."
            )
        return incoming

    def _take_parts(self, parts: Iterable[pb.Part], payload: _Payload, done: list[Parcel]) -> None:
        for part in parts:
            number, index, num_bytes = part.parcel, part.tensor, part.num_bytes
            start = payload.take(number, num_bytes)
            incoming = self._incoming.get(number)
            if incoming is not None:
                try:
                    incoming.take(index, part.offset, num_bytes, payload, start)
                except InvalidCallError as error:
                    self._forget(incoming)
                    self._refused.add(number)
                    done.append(Parcel(number, incoming.head, error=error))
                    continue
                if not incoming.num_missing:
                    self._forget(incoming)
                    done.append(incoming.parcel())
            elif number not in self._refused:
                raise CorruptDataError(
                    f"parcel {number}: expected no more parts, got one of tensor {index} at offset "
                    f"{part.offset}. A part was repeated, or was never announced."
                )

    def _forget(self, incoming: _Incoming) -> None:
        del self._incoming[incoming.number]
        self._unfinished_bytes -= incoming.num_bytes


class _Payload:
    """The payload of one message, taken part by part."""

    def __init__(self, message: bytes, payload: memoryview, start: int) -> None:
        self.bytes = payload
        self.memory = memory_of(message)
        self.start_in_message = start
        self._position = 0

    def take(self, parcel: int, num_bytes: int) -> int:
        """Return where in the payload the next part begins."""
        start = self._position + -self._position % ALIGNMENT
        self._position = end = start + num_bytes
        if end > len(self.bytes) or num_bytes == 0:
            raise CorruptDataError(
                f"parcel {parcel}: expected 1 to {max(len(self.bytes) - start, 0)} more bytes in this "
                f"message, got a part of {num_bytes}. The sender is broken."
            )
        return start


class _Incoming:
    """A parcel on its way in: its tensors so far, and those in the making."""

    __slots__ = (
        "_assemblies",
        "_forms",
        "_received",
        "head",
        "num_bytes",
        "num_missing",
        "number",
        "tensors",
    )

    def __init__(self, number: int, head: Head, forms: list[TensorForm]) -> None:
        self.number = number
        self.head = head
        self.num_bytes = 0
        self.num_missing = 0
        self.tensors: list[torch.Tensor | None] = []
        self._forms = forms
        self._received = [0] * len(forms)
        self._assemblies: dict[int, Assembly] = {}
        for form in forms:
            num_bytes = form.num_bytes
            self.num_bytes += num_bytes
            self.num_missing += num_bytes > 0
            self.tensors.append(None if num_bytes else empty_of(form))

    def take(self, index: int, offset: int, num_bytes: int, payload: _Payload, start: int) -> None:
        """Take a part, if it is the very one that comes next."""
        if index >= len(self._forms):
            raise CorruptDataError(
                f"parcel {self.number}: expected tensor 0 to {len(self._forms) - 1}, got {index}."
            )
        form, received = self._forms[index], self._received[index]
        if offset != received or received + num_bytes > form.num_bytes:
            raise CorruptDataError(
                f"parcel {self.number}, tensor {index}: expected the part from {received} of "
                f"{form.num_bytes} bytes on, got {num_bytes} bytes at {offset}. "
                "A part was lost, repeated, or is too long."
            )
        self._received[index] = received + num_bytes
        if num_bytes == form.num_bytes:
            self.tensors[index] = tensor_in(payload.memory, payload.start_in_message + start, form)
            self.num_missing -= 1
            return
        if offset == 0:
            self._assemblies[index] = Assembly(form)
        self._assemblies[index].write(offset, payload.bytes[start : start + num_bytes])
        if received + num_bytes == form.num_bytes:
            self.tensors[index] = self._assemblies.pop(index).finish()
            self.num_missing -= 1

    def parcel(self) -> Parcel:
        return Parcel(self.number, self.head, tuple(self.tensors))


def _head_of(announcement: pb.Announcement) -> Head | None:
    field = announcement.WhichOneof("head")
    return None if field is None else getattr(announcement, field)
