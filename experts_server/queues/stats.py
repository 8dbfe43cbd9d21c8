"""What one expert has done, in plain numbers; `metrics` makes Prometheus samples of them when somebody asks.

An expert's turns never overlap, so each number has one writer and needs no lock; a call costs a few hundred
nanoseconds.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from experts_server.hosting.calls import BackwardCall, Call, ForwardCall, Outputs, UpdateCall
from moe_autograd.errors import InputsNeededError
from moe_autograd.wire import experts_pb2 as pb
from moe_autograd.wire.compression import can_hold, encoded_bytes, gets_smaller

TIME_BUCKETS_S = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128)
KINDS = ("forward", "backward", "update")
_KIND_OF: dict[type[Call], str] = {ForwardCall: "forward", BackwardCall: "backward", UpdateCall: "update"}
ENCODINGS: dict[int, str] = {number: name.lower() for name, number in pb.Encoding.items()}


class Histogram:
    """Counts values by bucket.

    Args:
        bounds: the buckets' upper bounds; one more holds the rest.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value

    def buckets(self) -> list[tuple[str, float]]:
        """Return the counts up to each bound, as Prometheus wants them."""
        counted, so_far = [], 0
        for bound, count in zip([*map(str, self.bounds), "+Inf"], self.counts, strict=True):
            so_far += count
            counted.append((bound, float(so_far)))
        return counted


class KindStats:
    """One kind of call of one expert."""

    def __init__(self) -> None:
        self.num_calls = self.num_failed = self.num_tokens = self.bytes_in = self.bytes_out = 0
        self.queue_s, self.compute_s = Histogram(TIME_BUCKETS_S), Histogram(TIME_BUCKETS_S)
        self.batch_calls = Histogram(BATCH_BUCKETS)


class ExpertStats:
    """What one expert has done; told by its queue after each batch."""

    def __init__(self) -> None:
        self.kinds = {kind: KindStats() for kind in KINDS}
        self.sent_bytes = dict.fromkeys(ENCODINGS, 0)  # as they travel, by encoding
        self.num_refused = 0  # before they were in the queue; counted by the event loop
        self.num_late = 0  # before they began; counted under the queue's lock

    def computed(
        self, batch: Sequence[Call], results: Sequence[Any], started: float, compute_s: float
    ) -> None:
        """Take note of a batch; a look at the expert, such as a checkpoint's, is none.

        Nor is a backward whose inputs are needed, but for the bytes that have come: it comes again, with them.
        """
        name = _KIND_OF.get(type(batch[0]))
        if name is None or (isinstance(batch[0], BackwardCall) and batch[0].wants_nothing):
            return
        kind, num_done = self.kinds[name], 0
        for call, result in zip(batch, results, strict=True):
            kind.bytes_in += call.num_bytes
            if isinstance(result, InputsNeededError):
                continue
            num_done += 1
            kind.num_tokens += call.num_tokens
            kind.queue_s.add(started - call.arrived_at)
            if isinstance(result, Outputs):
                result = result.tensors
            if isinstance(result, tuple):
                for tensor in result:
                    if tensor is not None:
                        num_bytes, encoding = tensor.nbytes, call.reply_encoding
                        kind.bytes_out += num_bytes
                        if encoding != pb.RAW:
                            encoding, num_bytes = _as_sent(tensor, encoding)
                        self.sent_bytes[encoding] += num_bytes
            elif isinstance(result, BaseException):
                kind.num_failed += 1
        if num_done:
            kind.batch_calls.add(num_done)
            kind.compute_s.add(compute_s)
            kind.num_calls += num_done


def _as_sent(tensor: Tensor, encoding: pb.Encoding) -> tuple[pb.Encoding, int]:
    """Return the encoding that a tensor travels in where `encoding` is asked for, and its bytes then."""
    if not gets_smaller(tensor.dtype, tensor.numel(), encoding) or not can_hold(tensor, encoding):
        return pb.RAW, tensor.nbytes
    return encoding, encoded_bytes(tensor.dtype, tensor.numel(), encoding)
