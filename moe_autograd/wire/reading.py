"""The half of `parcels` that takes messages apart. It believes nothing that they say."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from itertools import count

from google.protobuf.message import DecodeError

from moe_autograd.errors import CorruptDataError, InvalidCallError, ServerBusyError
from moe_autograd.wire import experts_pb2 as pb
from moe_autograd.wire import runs
from moe_autograd.wire.framing import take_packet_apart
from moe_autograd.wire.heads import Head, Parcel
from moe_autograd.wire.incoming import Arrived, Incoming
from moe_autograd.wire.options import MAX_PARCELS, PARCEL_BYTES, PART_BYTES
from moe_autograd.wire.tensors import TensorForm, TensorLimits, check_header, too_large


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
        # Of its tensor's rows, a run makes one tensor for each parcel.
        most = max(self._limits.max_tensor_bytes, PART_BYTES)
        self._limits_of_runs = dataclasses.replace(self._limits, max_tensor_bytes=most)
        self._incoming: dict[int, Incoming] = {}
        self._refused: set[int] = set()
        self._unfinished_bytes = 0
        self._next_number = 0
        # The last message, if it brought whole parcels and nothing else.
        self._arrived: Arrived | None = None

    def feed(self, message: bytes) -> list[Parcel]:
        """Take in one message; return the parcels that are whole now, and those refused.

        The reader owns `message` from here on: a tensor that is most of it is a view of it.

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
        arrived = Arrived(contents.parts, message, payload, payload_start)
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

    def prove_finite(self) -> bool:
        """Let go of the last message; return whether a sum proves all values that it brought finite.

        One for all of them: many small tensors would take longer one by one.
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

    def _announce(self, announcement: pb.Announcement, arrived: Arrived, done: list[Parcel]) -> None:
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
            forms = _checked_forms(number, announcement.tensors, self._limits)
            if arrived.find_all_of(number, forms):
                done.append(Parcel(number, head, arrived.tensors_of(forms)))
            else:
                self._begin(Incoming(number, head, forms))
        except (InvalidCallError, ServerBusyError) as error:
            self._note_refused(number)
            done.append(Parcel(number, head, error=error))

    def _announce_run(self, announcement: pb.Announcement, arrived: Arrived, done: list[Parcel]) -> None:
        """Take in all parcels of a run, which come whole."""
        number, run = announcement.parcel, announcement.run
        _check_number(len(done) + len(run.num_rows))
        heads = runs.heads_of(number, run)
        self._next_number = number + len(heads)
        try:
            forms = _checked_forms(number, announcement.tensors, self._limits_of_runs)
            if len(forms) != 1 or not forms[0].num_bytes or not arrived.find_all_of(number, forms):
                raise CorruptDataError(
                    f"run of parcel {number}: expected its one tensor in this message, got {len(forms)} announced. "
                    "The sender is broken."
                )
            rows = arrived.view(arrived.take(), forms[0])
        except InvalidCallError as error:
            self._note_refused(number)
            done += [Parcel(at, head, error=error) for at, head in enumerate(heads, number)]
            return
        tensors = runs.tensors_of(number, run, rows)
        most_bytes = self._limits.max_tensor_bytes
        most_rows = most_bytes * len(rows) // rows.nbytes
        for at, head, num_rows, tensor in zip(count(number), heads, run.num_rows, tensors, strict=False):
            if num_rows <= most_rows:
                done.append(Parcel(at, head, (tensor,)))
            else:
                done.append(Parcel(at, head, error=too_large(tensor.shape, tensor.dtype, most_bytes)))

    def _begin(self, incoming: Incoming) -> None:
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

    def _take_parts(self, arrived: Arrived, done: list[Parcel]) -> None:
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

    def _forget(self, incoming: Incoming) -> None:
        del self._incoming[incoming.number]
        self._unfinished_bytes -= incoming.num_bytes
        self.num_encoded -= incoming.is_encoded


def _checked_forms(number: int, headers: Sequence[bytes], limits: TensorLimits) -> list[TensorForm]:
    """Check an announcement before anything is kept for it."""
    if len(headers) > limits.max_tensors:
        raise InvalidCallError(
            f"parcel {number}: expected at most {limits.max_tensors} tensors, "
            f"got {len(headers)}. Send fewer in one call."
        )
    return [check_header(header, limits) for header in headers]


def _check_number(num_parcels: int) -> None:
    if num_parcels > MAX_PARCELS:
        raise CorruptDataError(
            f"packet: expected at most {MAX_PARCELS} parcels in a message, got {num_parcels}. The sender is broken."
        )
