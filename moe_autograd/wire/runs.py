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

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch

from moe_autograd.errors import CorruptDataError
from moe_autograd.wire import experts_pb2 as pb
from moe_autograd.wire.heads import BackwardHead, ForwardHead, PlainHead, ResultHead, WrittenHead
from moe_autograd.wire.tensors import DTYPES, plain, raw_bytes, raw_header

MAX_IN_RUN = 1024
_LARGEST_BYTES = 1 << 16  # of a tensor; what is larger gains nothing

# What is equal for the heads of parcels that can be in one run.
_LIKENESS_OF: dict[type[PlainHead], Callable[[Any], Any]] = {
    ForwardHead: attrgetter("client_id", "keep_graph", "input_requires_grad", "evaluate", "reply_encoding"),
    BackwardHead: attrgetter(
        "client_id",
        "settled_below",
        "wants_weight_grads",
        "wants_input_grads",
        "keep_graph",
        "num_grad_outputs",
        "has_inputs",
        "evaluate",
        "reply_encoding",
        "random_seed",
    ),
    ResultHead: attrgetter("is_sequence", "has_drawn", "wants_no_step", "server"),
}


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

    def has_taken(self, head: PlainHead, tensor: torch.Tensor) -> bool:
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
    """Return the tensor of each parcel of a run.

    Raises:
        CorruptDataError: the run says something else than its tensor.
    """
    num_rows = list(run.num_rows)
    if not rows.dim() or sum(num_rows) != len(rows) or not all(num_rows):
        raise CorruptDataError(
            f"run of parcel {number}: expected {len(num_rows)} parcels of at least one row, {sum(num_rows)} rows "
            f"together, got a tensor of shape {tuple(rows.shape)}. The sender is broken."
        )
    # Unlike `split`, these are no views to autograd: to write to one leaves the others' version counters alone.
    return tuple(torch.unsafe_split_with_sizes(rows, num_rows))


def heads_of(number: int, run: pb.Run) -> Sequence[PlainHead]:
    """Return the head of each parcel of a run.

    Raises:
        CorruptDataError: it has none or too many, or contradicts itself.
    """
    num_parcels = len(run.num_rows)
    if not 0 < num_parcels <= MAX_IN_RUN:
        raise CorruptDataError(
            f"run of parcel {number}: expected 1 to {MAX_IN_RUN} parcels, got {num_parcels}. The sender is broken."
        )
    kind = run.WhichOneof("head")
    try:
        if kind == "forward_call":
            return _forwards(run, run.forward_call)
        if kind == "backward_call":
            return _backwards(run, run.backward_call)
        if kind == "call_result":
            return _results(run, run.call_result)
    except ValueError as error:  # from `zip`
        raise CorruptDataError(
            f"run of parcel {number}: expected one entry for each of {num_parcels} parcels, got {len(run.experts)} "
            f"experts, {len(run.call_ids)} calls, {len(run.sequences)} sequence numbers, {len(run.queue_s)} and "
            f"{len(run.compute_s)} times, {len(run.random_seeds)} seeds. The sender is broken."
        ) from error
    raise CorruptDataError(
        f"run of parcel {number}: expected a head that its parcels have in common, got none. Is the sender newer?"
    )


def _written(heads: list[Any], num_rows: list[int]) -> pb.Run:
    common, run = heads[0].message(), pb.Run(num_rows=num_rows)
    if isinstance(common, pb.CallResult):
        run.call_ids.extend([head.call for head in heads])
        run.queue_s.extend([head.queue_s for head in heads])
        run.compute_s.extend([head.compute_s for head in heads])
        run.call_result.CopyFrom(common)
        return run
    run.experts.extend([head.expert for head in heads])
    run.call_ids.extend([head.call_id for head in heads])
    if isinstance(common, pb.BackwardCall):
        run.sequences.extend([head.sequence for head in heads])
        run.backward_call.CopyFrom(common)
    else:
        seeds = [head.random_seed for head in heads]
        run.random_seeds.extend(seeds if any(seeds) else ())
        run.forward_call.CopyFrom(common)
    return run


def _forwards(run: pb.Run, common: pb.ForwardCall) -> list[ForwardHead]:
    client_id, keep_graph, evaluate = common.client_id, common.keep_graph, common.evaluate
    requires_grad, encoding = tuple(common.input_requires_grad), common.reply_encoding
    seeds = run.random_seeds or [0] * len(run.num_rows)
    return [
        ForwardHead(client_id, call_id, expert, keep_graph, requires_grad, evaluate, encoding, seed)
        for _, expert, call_id, seed in zip(run.num_rows, run.experts, run.call_ids, seeds, strict=True)
    ]


def _backwards(run: pb.Run, common: pb.BackwardCall) -> list[BackwardHead]:
    client_id, settled_below = common.client_id, common.settled_below
    wants_weights, wants_inputs = common.wants_weight_grads, tuple(common.wants_input_grads)
    keep_graph, num_grads, has_inputs = common.keep_graph, common.num_grad_outputs, common.has_inputs
    evaluate, encoding = common.evaluate, common.reply_encoding
    return [
        BackwardHead(
            client_id,
            sequence,
            settled_below,
            call_id,
            expert,
            wants_weights,
            wants_inputs,
            keep_graph,
            num_grads,
            has_inputs,
            evaluate,
            encoding,
            common.random_seed,
        )
        for _, expert, call_id, sequence in zip(
            run.num_rows, run.experts, run.call_ids, run.sequences, strict=True
        )
    ]


def _results(run: pb.Run, common: pb.CallResult) -> list[ResultHead]:
    is_sequence, has_drawn = common.is_sequence, common.has_drawn
    no_step, server = common.wants_no_step, common.server
    return [
        ResultHead(call, is_sequence, queue_s, compute_s, has_drawn, no_step, server)
        for _, call, queue_s, compute_s in zip(
            run.num_rows, run.call_ids, run.queue_s, run.compute_s, strict=True
        )
    ]
