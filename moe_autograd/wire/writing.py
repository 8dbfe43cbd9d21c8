"""The half of `parcels` that makes messages.

Announcements are written as protobuf would write them, but by hand, of pieces that protobuf has written: many small
calls would otherwise spend half their time on copying messages into messages.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterable, Sequence

import torch

from moe_autograd.wire import experts_pb2 as pb
from moe_autograd.wire.framing import ALIGNMENT, frame_packet, varint
from moe_autograd.wire.heads import BackwardHead, ForwardHead, Head, ResultHead, WrittenHead
from moe_autograd.wire.options import MAX_PARCELS, PARCEL_BYTES, PART_BYTES
from moe_autograd.wire.runs import Run, fits_in_runs
from moe_autograd.wire.tensors import Travelling, raw_bytes, travelling_form

# Tags: the field's number, and that its length comes next; a number comes after the first one.
_PARCEL = b"\x08"
_TENSORS = b"\x12"
_TAG_OF_HEAD = {
    pb.ForwardCall: b"\x1a",
    pb.BackwardCall: b"\x22",
    pb.CallResult: b"\x2a",
    pb.StateUpdate: b"\x32",
    pb.StateEntry: b"\x3a",
    pb.Run: b"\x42",
}
_ANNOUNCEMENTS, _PARTS, _IS_LAST = b"\x0a", b"\x12", b"\x18\x01"
_TAGS_OF_PART = (b"\x08", b"\x10", b"\x18", b"\x20")
_ZEROS = bytes(ALIGNMENT)


class ParcelWriter:
    """Makes messages of parcels.

    Args:
        part_bytes: a tensor of more bytes is sent in parts of so many; messages are hardly larger.

    Attributes:
        is_complete: set it when nothing more will be added; then the last message says that it is the last.
    """

    def __init__(self, part_bytes: int = PART_BYTES) -> None:
        self.is_complete = False
        self._part_bytes = part_bytes
        self._next_number = 0
        self._outgoing: deque[_Outgoing | Run] = deque()
        self._last_run: Run | None = None  # open for what comes next

    def add(
        self,
        head: Head,
        tensors: Iterable[torch.Tensor | Travelling | None] = (),
        encoding: pb.Encoding | Sequence[pb.Encoding] = pb.RAW,
    ) -> int:
        """Queue a parcel and return its number.

        The tensors are read when their message is made; leave them unchanged until then.

        Args:
            head: one of the messages of `Announcement`, or its plain record, which may travel in a run.
            tensors: of any shape, device and (dense) layout, or what `travelling_form` made of them; None travels as
                None.
            encoding: for those tensors that can have it; the others travel raw. Or one for each.

        Raises:
            TypeError: a tensor's dtype or layout cannot travel; nothing was queued.
        """
        number, given = self._next_number, list(tensors)
        if isinstance(head, (ForwardHead, BackwardHead, ResultHead)):
            if encoding == pb.RAW and len(given) == 1 and isinstance(tensor := given[0], torch.Tensor):
                if self._last_run is not None and self._last_run.try_add(head, tensor):
                    self._next_number += 1
                    return number
                if fits_in_runs(tensor, self._part_bytes):
                    self._last_run = Run(number, head, tensor, self._part_bytes)
                    self._outgoing.append(self._last_run)
                    self._next_number += 1
                    return number
            head = head.message()
        self._outgoing.append(_Outgoing(number, head, given, encoding))
        self._last_run = None
        self._next_number += 1
        return number

    def next_message(self) -> bytes | None:
        """Return the next message to send, or None if all has been said (more may be added later)."""
        if not self._outgoing:
            return None
        self._last_run = None
        message = _Message(self._part_bytes)
        unfinished: list[_Outgoing] = []
        while self._outgoing:
            parcel = self._outgoing[0]
            if not (message.take_run(parcel) if isinstance(parcel, Run) else message.take(parcel)):
                break
            self._outgoing.popleft()
            if not isinstance(parcel, Run) and parcel.parts:
                unfinished.append(parcel)
        self._outgoing.extend(unfinished)
        return message.framed(is_last=self.is_complete and not self._outgoing)

    @property
    def num_bytes(self) -> int:
        """About how much memory it has that waits to be sent."""
        return sum([parcel.num_bytes for parcel in self._outgoing])

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
        self,
        number: int,
        head: WrittenHead,
        tensors: Sequence[torch.Tensor | Travelling | None],
        encoding: pb.Encoding | Sequence[pb.Encoding],
    ) -> None:
        self.number = number
        self.parts: list[tuple[int, int, memoryview]] = []
        self._alive: list[torch.Tensor] = []
        headers = []
        encodings = itertools.repeat(encoding) if isinstance(encoding, int) else encoding
        for index, (tensor, own) in enumerate(zip(tensors, encodings, strict=False)):
            header, form = travelling_form(tensor, own)
            headers.append(header)
            if form is not None and form.nbytes:
                self.parts.append((index, 0, raw_bytes(form)))
                self._alive.append(form)
        self.announcement = _announcement(number, headers, head)

    @property
    def num_bytes(self) -> int:
        """About how much memory it has."""
        return PARCEL_BYTES + sum([len(view) for _, _, view in self.parts])


def _announcement(number: int, headers: Iterable[bytes], head: WrittenHead | pb.Run) -> bytes:
    pieces = [_PARCEL, varint(number)] if number else []
    for header in headers:
        pieces += (_TENSORS, varint(len(header)), header)
    written = head.SerializeToString()
    pieces += (_TAG_OF_HEAD[type(head)], varint(len(written)), written)
    announcement = b"".join(pieces)
    return _ANNOUNCEMENTS + varint(len(announcement)) + announcement


def _part(*numbers: int) -> bytes:
    """Return a part as `Contents` has it, of the numbers in `Part`; protobuf leaves out zeros."""
    fields = zip(_TAGS_OF_PART, numbers, strict=True)
    part = b"".join([tag + varint(number) for tag, number in fields if number])
    return _PARTS + varint(len(part)) + part


class _Message:
    """A message being filled."""

    def __init__(self, part_bytes: int) -> None:
        self._part_bytes = self._room = part_bytes
        self._num_parcels = 0
        self._alive: list[_Outgoing | Run] = []  # whose memory is shown
        self._announcements: list[bytes] = []
        self._parts: list[bytes] = []
        self._payload: list[bytes | memoryview] = []
        self._payload_bytes = 0

    def take(self, parcel: _Outgoing) -> bool:
        """Take of `parcel` its announcement and as many tensors as fit, or one part of a large one.

        Returns:
            Whether there was room for any of it, as there always is in an empty message.
        """
        parts, part_bytes = parcel.parts, self._part_bytes
        num_first = min(len(parts[0][2]), part_bytes) if parts else 0
        if self._alive and not self._has_room(1, len(parcel.announcement) + num_first):
            return False
        self._alive.append(parcel)
        if parcel.announcement:
            self._num_parcels += 1
            self._announcements.append(parcel.announcement)
            self._room -= len(parcel.announcement)
            parcel.announcement = b""
        num_taken = 0
        for index, offset, view in parts:
            if num_taken and len(view) > self._room:
                break
            if len(view) > part_bytes:
                self._write(parcel.number, index, offset, [view[:part_bytes]], part_bytes)
                parts[0] = (index, offset + part_bytes, view[part_bytes:])
                break
            self._write(parcel.number, index, offset, [view], len(view))
            num_taken += 1
        del parts[:num_taken]
        return True

    def _has_room(self, num_parcels: int, num_bytes: int) -> bool:
        return num_bytes <= self._room and self._num_parcels + num_parcels <= MAX_PARCELS

    def take_run(self, run: Run) -> bool:
        """Take all of `run` if there is room, as there always is in an empty message; return whether there was."""
        if self._alive and not self._has_room(len(run), run.num_bytes):
            return False
        self._alive.append(run)
        self._num_parcels += len(run)
        announcement = _announcement(run.number, [run.header()], run.head())
        self._announcements.append(announcement)
        self._room -= len(announcement)
        self._write(run.number, 0, 0, run.views(), run.num_bytes)
        return True

    def _write(
        self, parcel: int, tensor: int, offset: int, pieces: Sequence[memoryview], num_bytes: int
    ) -> None:
        gap = -self._payload_bytes % ALIGNMENT
        if gap:
            self._payload.append(_ZEROS[:gap])
        self._payload += pieces
        self._parts.append(_part(parcel, tensor, offset, num_bytes))
        self._payload_bytes += gap + num_bytes
        self._room -= gap + num_bytes

    def framed(self, *, is_last: bool) -> bytes:
        contents = b"".join([*self._announcements, *self._parts, _IS_LAST if is_last else b""])
        return frame_packet(contents, self._payload, self._payload_bytes)
