"""The half of `parcels` that makes messages.

Announcements are written as protobuf would write them, but by hand, of pieces that protobuf has written: many small
calls would otherwise spend half their time on copying messages into messages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import torch

from moe_autograd.wire import experts_pb2 as pb
from moe_autograd.wire.framing import ALIGNMENT, frame_packet, varint
from moe_autograd.wire.heads import Head
from moe_autograd.wire.options import PART_BYTES
from moe_autograd.wire.tensors import raw_bytes, travelling_form

# Tags: the field's number, and that its length comes next; a number comes after the first one.
_PARCEL = b"\x08"
_TENSORS = b"\x12"
_TAG_OF_HEAD = {
    pb.ForwardCall: b"\x1a",
    pb.BackwardCall: b"\x22",
    pb.CallResult: b"\x2a",
    pb.StateUpdate: b"\x32",
    pb.StateEntry: b"\x3a",
}
_ANNOUNCEMENTS = b"\x0a"
_ZEROS = bytes(ALIGNMENT)


class ParcelWriter:
    """Makes messages of parcels.

    Args:
        part_bytes: a tensor of more bytes is sent in parts of so many; messages are hardly larger.
    """

    def __init__(self, part_bytes: int = PART_BYTES) -> None:
        self._part_bytes = part_bytes
        self._next_number = 0
        self._outgoing: deque[_Outgoing] = deque()

    def add(
        self, head: Head, tensors: Iterable[torch.Tensor | None] = (), encoding: pb.Encoding = pb.RAW
    ) -> int:
        """Queue a parcel and return its number.

        The tensors are read when their message is made; leave them unchanged until then.

        Args:
            head: one of the messages of `Announcement`.
            tensors: of any shape, device and (dense) layout; None travels as None.
            encoding: for those tensors that can have it; the others travel raw.

        Raises:
            TypeError: a tensor's dtype or layout cannot travel; nothing was queued.
        """
        number = self._next_number
        self._outgoing.append(_Outgoing(number, head, list(tensors), encoding))
        self._next_number += 1
        return number

    def next_message(self) -> bytes | None:
        """Return the next message to send, or None if all has been said (more may be added later)."""
        if not self._outgoing:
            return None
        message = _Message(self._part_bytes)
        unfinished: list[_Outgoing] = []
        while self._outgoing and message.take(parcel := self._outgoing[0]):
            self._outgoing.popleft()
            if parcel.parts:
                unfinished.append(parcel)
        self._outgoing.extend(unfinished)
        return message.framed()

    def __bool__(self) -> bool:
        """Tell whether there is something to send."""
        return bool(self._outgoing)

    def __repr__(self) -> str:
        return f"ParcelWriter({len(self._outgoing)} parcels to send)"


class _Outgoing:
    """A parcel on its way out: what is still to be said of it.

    `parts` holds `(tensor index, offset, bytes)`, in order. A memoryview of a tensor does not keep it alive: `_alive`
    does.
    """

    __slots__ = ("_alive", "announcement", "number", "parts")

    def __init__(
        self, number: int, head: Head, tensors: Sequence[torch.Tensor | None], encoding: pb.Encoding
    ) -> None:
        self.number = number
        self.parts: list[tuple[int, int, memoryview]] = []
        self._alive: list[torch.Tensor] = []
        pieces = [_PARCEL, varint(number)] if number else []
        for index, tensor in enumerate(tensors):
            header, form = travelling_form(tensor, encoding)
            pieces += (_TENSORS, varint(len(header)), header)
            if form is not None and form.nbytes:
                self.parts.append((index, 0, raw_bytes(form)))
                self._alive.append(form)
        written = head.SerializeToString()
        pieces += (_TAG_OF_HEAD[type(head)], varint(len(written)), written)
        announcement = b"".join(pieces)
        self.announcement = _ANNOUNCEMENTS + varint(len(announcement)) + announcement


class _Message:
    """A message being filled."""

    def __init__(self, part_bytes: int) -> None:
        self._part_bytes = self._room = part_bytes
        self._alive: list[_Outgoing] = []  # whose memory is shown
        self._announcements: list[bytes] = []
        self._parts = pb.Contents()
        self._payload: list[bytes | memoryview] = []
        self._payload_bytes = 0

    def take(self, parcel: _Outgoing) -> bool:
        """Take of `parcel` its announcement and as many tensors as fit, or one part of a large one.

        Returns:
            Whether there was room for any of it, as there always is in an empty message.
        """
        parts, part_bytes = parcel.parts, self._part_bytes
        num_first = min(len(parts[0][2]), part_bytes) if parts else 0
        if self._alive and len(parcel.announcement) + num_first > self._room:
            return False
        self._alive.append(parcel)
        if parcel.announcement:
            self._announcements.append(parcel.announcement)
            self._room -= len(parcel.announcement)
            parcel.announcement = b""
        num_taken = 0
        for index, offset, view in parts:
            if num_taken and len(view) > self._room:
                break
            if len(view) > part_bytes:
                self._write(parcel.number, index, offset, view[:part_bytes])
                parts[0] = (index, offset + part_bytes, view[part_bytes:])
                break
            self._write(parcel.number, index, offset, view)
            num_taken += 1
        del parts[:num_taken]
        return True

    def _write(self, parcel: int, tensor: int, offset: int, part: memoryview) -> None:
        num_bytes = len(part)
        gap = -self._payload_bytes % ALIGNMENT
        if gap:
            self._payload.append(_ZEROS[:gap])
        self._payload.append(part)
        self._parts.parts.add(parcel=parcel, tensor=tensor, offset=offset, num_bytes=num_bytes)
        self._payload_bytes += gap + num_bytes
        self._room -= gap + num_bytes

    def framed(self) -> bytes:
        contents = b"".join([*self._announcements, self._parts.SerializeToString()])
        return frame_packet(contents, self._payload, self._payload_bytes)
