"""The half of `parcels` that takes messages apart. It believes nothing that they say."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from itertools import count

import torch
from google.protobuf.message import DecodeError

from moe_autograd.errors import CorruptDataError, InvalidCallError, ServerBusyError
from moe_autograd.wire import experts_pb2 as pb
from moe_autograd.wire import runs
from moe_autograd.wire.framing import ALIGNMENT, take_packet_apart
from moe_autograd.wire.heads import Head, Parcel, Tensors
from moe_autograd.wire.options import MAX_PARCELS, PARCEL_BYTES
from moe_autograd.wire.tensors import (
    Assembly,
    Memory,
    TensorForm,
    TensorLimits,
    check_header,
    empty_of,
    memory_of,
    tensor_in,
)

_SUMMED = (torch.float32, torch.float64)
_SUMMED_AT_ONCE = 1 << 14  # for more PyTorch would wake a team of threads, which then spin for a while


class ParcelReader:
    """Takes messages apart and returns parcels as they become whole.

    Args:
        limits: what is accepted; a parcel that asks for more is refused by itself.

    Attributes:
        num_encoded: parcels that wait for parts and have tensors in an encoding; the last part has large ones decoded.
        has_last: whether the last message has come, and said so; whoever did not say it ends the stream.
    """

    def __init__(self, limits: TensorLimits | None = None) -> None:
        self.num_encoded = 0
        self.has_last = False
        self._limits = limits or TensorLimits()
        self._incoming: dict[int, _Incoming] = {}
        self._refused: set[int] = set()
        self._unfinished_bytes = 0
        self._next_number = 0
        # The last message, if it brought whole parcels and nothing else.
        self._arrived: _Arrived | None = None

    def feed(self, message: bytes) -> list[Parcel]:
        """Take in one message; return the parcels that are whole now, and those refused.

        The reader owns `message` from here on: tensors are views of it.

        Raises:
            CorruptDataError: the message is damaged, or its parts have gaps, overlap, or belong to nothing.
                What the stream still carries has no meaning; the parcels returned before are good.
        """
        contents_bytes, payload, payload_start = take_packet_apart(message)
        try:
            contents = pb.Contents.FromString(contents_bytes)
        except DecodeError as error:
            raise CorruptDataError(f"packet: expected its contents, got {error}.") from error
        self.has_last = contents.is_last
        done: list[Parcel] = []
        _check_number(len(contents.announcements))
        arrived = _Arrived(contents.parts, message, payload, payload_start)
        for announcement in contents.announcements:
            if self._incoming or self._refused:
                self._take_parts(arrived, done)
            self._announce(announcement, arrived, done)
        self._take_parts(arrived, done)
        if (part := arrived.next_part) is not None:
            raise CorruptDataError(
                f"parcel {part.parcel}: expected no more parts, got one of tensor {part.tensor} at offset "
                f"{part.offset}. A part was repeated, or was never announced."
            )
        self._arrived = arrived if arrived.has_only_whole_parcels else None
        return done

    def are_finite(self) -> bool:
        """Tell whether all values of the parcels that the last message brought are finite; False: they may not be.

        One sum for all of them: many small tensors would take longer one by one.
        """
        arrived, self._arrived = self._arrived, None
        return arrived is not None and arrived.is_finite()

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

    @property
    def num_unfinished_bytes(self) -> int:
        """About how much memory the parcels that wait for parts have when they are whole."""
        return PARCEL_BYTES * len(self._incoming) + self._unfinished_bytes

    def __repr__(self) -> str:
        return f"ParcelReader({len(self._incoming)} parcels unfinished, {self._unfinished_bytes} bytes)"

    def _announce(self, announcement: pb.Announcement, arrived: _Arrived, done: list[Parcel]) -> None:
        number = announcement.parcel
        if number < self._next_number:
            raise CorruptDataError(
                f"parcel {number}: expected a number from {self._next_number} on, got one used before. "
                "A message was repeated, or the sender is broken."
            )
        field = announcement.WhichOneof("head")
        if field == "run":
            self._announce_run(announcement, arrived, done)
            return
        self._next_number = number + 1
        head: Head | None = None if field is None else getattr(announcement, field)
        try:
            if head is None:
                raise InvalidCallError(f"parcel {number}: expected a head of experts.proto, got none.")
            forms = self._checked_forms(number, announcement.tensors)
            if arrived.has_all_of(number, forms):
                done.append(Parcel(number, head, arrived.tensors_of(forms)))
            else:
                self._begin(_Incoming(number, head, forms))
        except (InvalidCallError, ServerBusyError) as error:
            self._note_refused(number)
            done.append(Parcel(number, head, error=error))

    def _announce_run(self, announcement: pb.Announcement, arrived: _Arrived, done: list[Parcel]) -> None:
        """Take in all parcels of a run, which come whole."""
        number, run = announcement.parcel, announcement.run
        _check_number(len(done) + len(run.num_rows))
        heads = runs.heads_of(number, run)
        self._next_number = number + len(heads)
        try:
            forms = self._checked_forms(number, announcement.tensors)
            if len(forms) != 1 or not forms[0].num_bytes or not arrived.has_all_of(number, forms):
                raise CorruptDataError(
                    f"run of parcel {number}: expected its one tensor in this message, got {len(forms)} announced. "
                    "The sender is broken."
                )
            (rows,) = arrived.tensors_of(forms)
        except InvalidCallError as error:
            self._note_refused(number)
            done += [Parcel(at, head, error=error) for at, head in enumerate(heads, number)]
            return
        assert rows is not None, "it has bytes"
        tensors = runs.tensors_of(number, run, rows)
        done += [
            Parcel(at, head, (tensor,))
            for at, head, tensor in zip(count(number), heads, tensors, strict=False)
        ]

    def _checked_forms(self, number: int, headers: Sequence[bytes]) -> list[TensorForm]:
        """Check an announcement before anything is kept for it."""
        limits = self._limits
        if len(headers) > limits.max_tensors:
            raise InvalidCallError(
                f"parcel {number}: expected at most {limits.max_tensors} tensors, "
                f"got {len(headers)}. Send fewer in one call."
            )
        return [check_header(header, limits) for header in headers]

    def _begin(self, incoming: _Incoming) -> None:
        """Let a parcel wait for its parts."""
        limits, number, num_bytes = self._limits, incoming.number, incoming.num_bytes
        most = limits.max_unfinished_bytes
        if len(self._incoming) >= limits.max_unfinished_parcels:
            raise InvalidCallError(
                f"parcel {number}: expected at most {limits.max_unfinished_parcels} unfinished parcels in a "
                "stream, got more. Finish some before you begin others."
            )
        if num_bytes > most:
            raise InvalidCallError(
                f"parcel {number}: expected at most {most} unfinished bytes in a stream, got {num_bytes}. "
                "Send fewer rows at once, or raise the receiver's limit."
            )
        if self._incoming and self.num_unfinished_bytes + PARCEL_BYTES + num_bytes > most:
            raise ServerBusyError(
                f"parcel {number}: expected at most {most} unfinished bytes in a stream, got {num_bytes} more than the "
                f"{self._unfinished_bytes} of others. Send it once these are whole."
            )
        self._incoming[number] = incoming
        self._unfinished_bytes += num_bytes
        self.num_encoded += incoming.is_encoded

    def _take_parts(self, arrived: _Arrived, done: list[Parcel]) -> None:
        """Take the next parts, as long as they belong to parcels that have begun before, or were refused."""
        while (part := arrived.next_part) is not None:
            number = part.parcel
            incoming = self._incoming.get(number)
            if incoming is None and number not in self._refused:
                return
            start = arrived.take()
            arrived.has_only_whole_parcels = False
            if incoming is None:
                continue
            try:
                incoming.take(part, arrived, start)
            except InvalidCallError as error:
                self._forget(incoming)
                self._note_refused(number)
                done.append(Parcel(number, incoming.head, error=error))
                continue
            if not incoming.num_missing:
                self._forget(incoming)
                done.append(incoming.parcel())

    def _note_refused(self, number: int) -> None:
        """Remember whose parts to pass over; a stream that never ends may not bring ever more of them."""
        self._refused.add(number)
        if len(self._refused) > MAX_PARCELS:
            raise CorruptDataError(
                f"stream: expected at most {MAX_PARCELS} parcels that are refused, got more. The sender is broken."
            )

    def _forget(self, incoming: _Incoming) -> None:
        del self._incoming[incoming.number]
        self._unfinished_bytes -= incoming.num_bytes
        self.num_encoded -= incoming.is_encoded


def _check_number(num_parcels: int) -> None:
    if num_parcels > MAX_PARCELS:
        raise CorruptDataError(
            f"packet: expected at most {MAX_PARCELS} parcels in a message, got {num_parcels}. The sender is broken."
        )


class _Arrived:
    """The parts in one message, taken one after another, and the payload that holds their bytes."""

    def __init__(self, parts: Sequence[pb.Part], message: bytes, payload: memoryview, start: int) -> None:
        # An empty one takes two bytes there, and more than a hundred in Python.
        if len(parts) > len(payload) // ALIGNMENT + 1:
            raise CorruptDataError(
                f"packet: expected parts of 1 byte or more, got {len(parts)} in {len(payload)} bytes of payload."
            )
        self.payload = payload
        self._message = message
        self.start_in_message = start
        self.has_only_whole_parcels = True
        self._parts = list(parts)
        self._num_taken = 0
        self._position = 0
        self._forms: set[tuple[torch.dtype | None, int]] = set()  # dtypes and encodings of whole tensors

    @functools.cached_property
    def memory(self) -> Memory:
        """The memory of the whole message."""
        return memory_of(self._message)

    @property
    def next_part(self) -> pb.Part | None:
        """The part that comes next; None after the last."""
        return self._parts[self._num_taken] if self._num_taken < len(self._parts) else None

    def take(self) -> int:
        """Take the next part; return where in the payload it begins."""
        part = self._parts[self._num_taken]
        num_bytes = part.num_bytes
        start = self._position + -self._position % ALIGNMENT
        end = start + num_bytes
        if end > len(self.payload) or num_bytes == 0:
            raise CorruptDataError(
                f"parcel {part.parcel}: expected 1 to {max(len(self.payload) - start, 0)} more bytes in this "
                f"message, got a part of {num_bytes}. The sender is broken."
            )
        self._num_taken += 1
        self._position = end
        return start

    def has_all_of(self, number: int, forms: Sequence[TensorForm]) -> bool:
        """Tell whether the next parts are all tensors of parcel `number`, each of them whole."""
        at = self._num_taken
        for index, form in enumerate(forms):
            if form.num_bytes:
                if at == len(self._parts):
                    return False
                part = self._parts[at]
                if (
                    part.parcel != number
                    or part.tensor != index
                    or part.num_bytes != form.num_bytes
                    or part.offset
                ):
                    return False
                self._forms.add((form.dtype, form.encoding))
                at += 1
        return True

    def tensors_of(self, forms: Sequence[TensorForm]) -> Tensors:
        """Return the tensors that `has_all_of` has found."""
        return tuple(
            [
                tensor_in(self.memory, self.start_in_message + self.take(), form)
                if form.num_bytes
                else empty_of(form)
                for form in forms
            ]
        )

    def is_finite(self) -> bool:
        """Tell whether a finite sum proves all values in the payload finite; only where they are of one dtype."""
        if len(self._forms) != 1:
            return False
        ((dtype, encoding),) = self._forms
        if dtype not in _SUMMED or encoding != pb.RAW or self.start_in_message % dtype.itemsize:
            return False
        count = self._position // dtype.itemsize
        values = torch.frombuffer(self.memory, dtype=dtype, count=count, offset=self.start_in_message)
        pieces = values.split(_SUMMED_AT_ONCE) if count > _SUMMED_AT_ONCE else (values,)
        return all(math.isfinite(piece.sum().item()) for piece in pieces)


class _Incoming:
    """A parcel on its way in: its tensors so far, and those in the making."""

    def __init__(self, number: int, head: Head | None, forms: list[TensorForm]) -> None:
        self.number = number
        self.head = head
        self.num_bytes = 0
        self.num_missing = 0
        self.is_encoded = any(form.encoding != pb.RAW for form in forms)
        self.tensors: list[torch.Tensor | None] = []
        self._forms = forms
        self._received = [0] * len(forms)
        self._assemblies: dict[int, Assembly] = {}
        for form in forms:
            num_bytes = form.num_bytes
            self.num_bytes += num_bytes
            self.num_missing += num_bytes > 0
            self.tensors.append(None if num_bytes else empty_of(form))

    def take(self, part: pb.Part, arrived: _Arrived, start: int) -> None:
        """Take a part, if it is the very one that comes next."""
        index, offset, num_bytes = part.tensor, part.offset, part.num_bytes
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
            tensor = tensor_in(arrived.memory, arrived.start_in_message + start, form)
            # A small part of a message would keep all of it alive, beside the other messages of its parcel.
            self.tensors[index] = tensor.clone() if 2 * num_bytes < len(arrived.payload) else tensor
            self.num_missing -= 1
            return
        if offset == 0:
            self._assemblies[index] = Assembly(form)
        self._assemblies[index].write(offset, arrived.payload[start : start + num_bytes])
        if received + num_bytes == form.num_bytes:
            self.tensors[index] = self._assemblies.pop(index).finish()
            self.num_missing -= 1

    def parcel(self) -> Parcel:
        return Parcel(self.number, self.head, tuple(self.tensors))
