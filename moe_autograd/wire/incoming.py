"""One message as it is taken apart, and the parcels that wait for parts of the next ones; for `reading` alone."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from moe_autograd._computed_once import computed_once
from moe_autograd.errors import CorruptDataError
from moe_autograd.wire import experts_pb2 as pb
from moe_autograd.wire.framing import ALIGNMENT
from moe_autograd.wire.heads import Head, Parcel, Tensors
from moe_autograd.wire.tensors import Assembly, Memory, TensorForm, empty_of, memory_of, tensor_in

_SUMMED = (torch.float32, torch.float64)
_SUMMED_AT_ONCE = 1 << 14  # for more PyTorch would wake a team of threads, which then spin for a while


class Arrived:
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

    @computed_once
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

    def find_all_of(self, number: int, forms: Sequence[TensorForm]) -> bool:
        """Note the next parts if they are all tensors of parcel `number`, each whole; return whether they are."""
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
        """Return the tensors that `find_all_of` has found."""
        return tuple(
            [
                self.by_itself(self.view(self.take(), form)) if form.num_bytes else empty_of(form)
                for form in forms
            ]
        )

    def view(self, start: int, form: TensorForm) -> torch.Tensor:
        """Return a tensor that is whole in the payload, from `start` on."""
        return tensor_in(self.memory, self.start_in_message + start, form)

    def by_itself(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return what may be kept: of a small part of the message, which it would keep alive, a copy."""
        return tensor.clone() if 2 * tensor.nbytes < len(self._message) else tensor

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


class Incoming:
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

    def take(self, part: pb.Part, arrived: Arrived, start: int) -> None:
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
            self.tensors[index] = arrived.by_itself(arrived.view(start, form))
            self.num_missing -= 1
            return
        if offset == 0:
            self._assemblies[index] = Assembly(form)
        self._assemblies[index].write(offset, arrived.payload[start : start + num_bytes])
        if received + num_bytes == form.num_bytes:
            self.tensors[index] = self._assemblies.pop(index).finish()
            self.num_missing -= 1

    def parcel(self) -> Parcel:
        """Return it, whole."""
        return Parcel(self.number, self.head, tuple(self.tensors))
