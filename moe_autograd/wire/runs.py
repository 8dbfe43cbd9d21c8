"""Runs: small calls alike, next to each other, travel as one tensor of rows and a list of whose they are.

A pass over many small experts is mostly that: the rows of one, then the rows of the next. One announcement for all of
them costs a tenth of one for each::

    parcels           4: ffn.0, 3 rows   5: ffn.7, 1 row   6: ffn.9, 2 rows
    announcement      parcel 4, a tensor of 6 rows, Run(num_rows=[3, 1, 2], experts=[ffn.0, ffn.7, ffn.9], ...)
    payload           | ffn.0's rows | ffn.7's row | ffn.9's rows |

`writing` puts parcels with a plain head (see `heads`) and one small tensor into runs, `reading` takes them apart:
nobody else knows of them.
"""

from __future__ import annotations

from collections.abc import Callable, MutableSequence, Sequence
from itertools import repeat
from operator import attrgetter
from typing import Any

import torch

from moe_autograd.errors import CorruptDataError
from moe_autograd.wire import experts_pb2 as pb
from moe_autograd.wire.heads import BackwardHead, ForwardHead, PlainHead, ResultHead, WrittenHead
from moe_autograd.wire.tensors import DTYPES, plain, raw_bytes, raw_header

MAX_IN_RUN = 1024
_LARGEST_BYTES = 1 << 16  # of a tensor; what is larger gains nothing

# What each parcel of a run has for itself, by kind, and the list of `Run` that it is in; all else is the same for all.
_OWN: dict[type[PlainHead], dict[str, str]] = {
    ForwardHead: {"call_id": "call_ids", "expert": "experts", "random_seed": "random_seeds"},
    BackwardHead: {"call_id": "call_ids", "expert": "experts", "sequence": "sequences"},
    ResultHead: {"call": "call_ids", "queue_s": "queue_s", "compute_s": "compute_s"},
}
_LIKENESS_OF: dict[type[PlainHead], Callable[[PlainHead], Any]] = {
    kind: attrgetter(*(name for name in kind.__slots__ if name not in own)) for kind, own in _OWN.items()
}
_KIND_OF: dict[str, type[PlainHead]] = {
    "forward_call": ForwardHead,
    "backward_call": BackwardHead,
    "call_result": ResultHead,
}
_FIELD_OF = {kind: field for field, kind in _KIND_OF.items()}


def fits_in_runs(tensor: torch.Tensor, max_bytes: int) -> bool:
    """Whether a parcel of this tensor alone can be part of a run of at most `max_bytes`."""
    return (
        0 < tensor.nbytes <= min(_LARGEST_BYTES, max_bytes)
        and tensor.dim() > 0
        and tensor.dtype in DTYPES
        and tensor.layout is torch.strided
    )


class Run:
    """A run on its way out.

    Args:
        number: of its first parcel.
        head: of its first parcel.
        tensor: of its first parcel; it and the next ones stay unchanged until the message is made.
        max_bytes: of all tensors.
    """

    def __init__(self, number: int, head: PlainHead, tensor: torch.Tensor, max_bytes: int) -> None:
        self.number = number
        self._max_bytes = max_bytes
        self._dtype, self._shape, self._tensor_bytes = tensor.dtype, tensor.shape, tensor.nbytes
        self._kind, self._likeness_of = type(head), _LIKENESS_OF[type(head)]
        self._likeness = self._likeness_of(head)
        self._heads: list[PlainHead] = [head]
        self._tensors: list[torch.Tensor] = [plain(tensor)]
        self._num_rows: list[int] = [tensor.shape[0]]
        self.num_bytes = self._tensor_bytes

    def __len__(self) -> int:
        return len(self._heads)

    def try_add(self, head: PlainHead, tensor: torch.Tensor) -> bool:
        """Add a parcel if it is alike and there is room; return whether it was."""
        if tensor.dtype is not self._dtype or tensor.layout is not torch.strided:
            return False
        shape = tensor.shape
        if shape != self._shape:  # that of the last one, mostly
            if not shape or shape[1:] != self._shape[1:] or not 0 < tensor.nbytes <= _LARGEST_BYTES:
                return False
            self._shape, self._tensor_bytes = shape, tensor.nbytes
        num_bytes = self.num_bytes + self._tensor_bytes
        if num_bytes > self._max_bytes or len(self._heads) >= MAX_IN_RUN:
            return False
        if type(head) is not self._kind or self._likeness_of(head) != self._likeness:
            return False
        self._heads.append(head)
        self._tensors.append(plain(tensor))
        self._num_rows.append(shape[0])
        self.num_bytes = num_bytes
        return True

    def header(self) -> bytes:
        """Return the serialized header of its rows together."""
        return raw_header(self._dtype, torch.Size([sum(self._num_rows), *self._shape[1:]]))

    def head(self) -> pb.Run | WrittenHead:
        """Return what is announced; of a parcel that stayed alone, its own head."""
        if len(self._heads) == 1:
            return self._heads[0].message()
        return _written(self._heads, self._num_rows)

    def views(self) -> list[memoryview]:
        """Show the memory of the tensors, one after another. It stays alive as long as the run."""
        return [raw_bytes(tensor) for tensor in self._tensors]


def tensors_of(number: int, run: pb.Run, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return the tensor of each parcel of a run, in memory of its own.

    Raises:
        CorruptDataError: the run says something else than its tensor.
    """
    num_rows = list(run.num_rows)
    if not rows.dim() or sum(num_rows) != len(rows) or not all(num_rows):
        raise CorruptDataError(
            f"run of parcel {number}: expected {len(num_rows)} parcels of at least one row, {sum(num_rows)} rows "
            f"together, got a tensor of shape {tuple(rows.shape)}. The sender is broken."
        )
    split: Any = torch.split_with_sizes_copy  # its stub has no result
    return tuple(split(rows, num_rows))  # copies: each may outlive the others, and be resized


def heads_of(number: int, run: pb.Run) -> list[PlainHead]:
    """Return the head of each parcel of a run.

    Raises:
        CorruptDataError: it has none or too many, or contradicts itself.
    """
    num_parcels, field = len(run.num_rows), run.WhichOneof("head")
    if not 0 < num_parcels <= MAX_IN_RUN:
        raise CorruptDataError(
            f"run of parcel {number}: expected 1 to {MAX_IN_RUN} parcels, got {num_parcels}. The sender is broken."
        )
    if number + num_parcels > 1 << 64:
        raise CorruptDataError(
            f"run of parcel {number}: expected numbers below 2**64, got {num_parcels} from there."
        )
    if field is None:
        raise CorruptDataError(
            f"run of parcel {number}: expected a head that its parcels have in common, got none. Is the sender newer?"
        )
    kind, common = _KIND_OF[field], getattr(run, field)
    own = {name: getattr(run, listed) for name, listed in _OWN[kind].items()}
    if kind is ForwardHead and not run.random_seeds:
        own["random_seed"] = [0] * num_parcels
    if any(len(values) != num_parcels for values in own.values()):
        raise CorruptDataError(
            f"run of parcel {number}: expected one entry for each of {num_parcels} parcels, got {len(run.experts)} "
            f"experts, {len(run.call_ids)} calls, {len(run.sequences)} sequence numbers, {len(run.queue_s)} and "
            f"{len(run.compute_s)} times, {len(run.random_seeds)} seeds. The sender is broken."
        )
    columns = [own[name] if name in own else repeat(_plain_value(common, name)) for name in kind.__slots__]
    return list(map(kind, *columns))


def _plain_value(message: Any, name: str) -> Any:
    value = getattr(message, name)
    return tuple(value) if isinstance(value, MutableSequence) else value


def _written(heads: Sequence[PlainHead], num_rows: Sequence[int]) -> pb.Run:
    kind = type(heads[0])
    run = pb.Run(num_rows=num_rows)
    getattr(run, _FIELD_OF[kind]).CopyFrom(heads[0].message())
    for name, listed in _OWN[kind].items():
        values = [getattr(head, name) for head in heads]
        if name != "random_seed" or any(values):
            getattr(run, listed).extend(values)
    return run
