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
        while self._outgoing and message.has_room_for(self._outgoing[0]):
            parcel = self._outgoing.popleft()
            parcel.write_to(message)
            message.alive.append(parcel)
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

    `parts` holds `(tensor index, offset, bytes)`, in order, each at most `part_bytes` when written. A memoryview
    of a tensor does not keep it alive: `_alive` does.
    """

    __slots__ = ("_alive", "announcement", "number", "parts")

    def __init__(
        self, number: int, head: Head, tensors: Sequence[torch.Tensor | None], encoding: pb.Encoding
    ) -> None:
        self.number = number
        self.parts: deque[tuple[int, int, memoryview]] = deque()
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
        self.announcement = b"".join(pieces)

    def first_bytes(self, part_bytes: int) -> int:
        """Return how many bytes of a message the next piece of this parcel takes."""
        payload = min(len(self.parts[0][2]), part_bytes) if self.parts else 0
        return payload + len(self.announcement)

    def write_to(self, message: _Message) -> None:
        """Move to `message` the announcement and as many tensors as fit, or one part of a large one."""
        if self.announcement:
            message.announce(self.announcement)
            self.announcement = b""
        wrote = False
        while self.parts and (not wrote or len(self.parts[0][2]) <= message.room):
            index, offset, view = self.parts.popleft()
            part = view if len(view) <= message.part_bytes else view[: message.part_bytes]
            message.write(self.number, index, offset, part)
            wrote = True
            if part is not view:
                self.parts.appendleft((index, offset + len(part), view[len(part) :]))
                return


class _Message:
    """A message being filled; `alive` holds what it shows, until it is framed."""

    def __init__(self, part_bytes: int) -> None:
        self.alive: list[_Outgoing] = []
        self.part_bytes = self.room = part_bytes
        self._announcements: list[bytes] = []
        self._parts = pb.Contents()
        self._payload: list[bytes | memoryview] = []
        self._payload_bytes = 0
        self._is_empty = True

    def has_room_for(self, parcel: _Outgoing) -> bool:
        """Tell whether the next piece of `parcel` fits; anything fits in an empty message."""
        return self._is_empty or parcel.first_bytes(self.part_bytes) <= self.room

    def announce(self, announcement: bytes) -> None:
        self._announcements += (_ANNOUNCEMENTS, varint(len(announcement)), announcement)
        self.room -= len(announcement)
        self._is_empty = False

    def write(self, parcel: int, tensor: int, offset: int, part: memoryview) -> None:
        num_bytes = len(part)
        gap = -self._payload_bytes % ALIGNMENT
        if gap:
            self._payload.append(_ZEROS[:gap])
        self._payload.append(part)
        self._parts.parts.add(parcel=parcel, tensor=tensor, offset=offset, num_bytes=num_bytes)
        self._payload_bytes += gap + num_bytes
        self.room -= gap + num_bytes
        self._is_empty = False

    def framed(self) -> bytes:
        contents = b"".join([*self._announcements, self._parts.SerializeToString()])
        return frame_packet(contents, self._payload, self._payload_bytes)
