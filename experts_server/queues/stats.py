"""What one expert has done, in plain numbers; `metrics` makes Prometheus samples of them when somebody asks.

An expert's turns never overlap, so each number has one writer; a call costs a few microseconds.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from experts_server.hosting.calls import BackwardCall, Call, ForwardCall, Outputs, UpdateCall
from moe_autograd.errors import InputsNeededError
from moe_autograd.wire import experts_pb2 as pb
from moe_autograd.wire.compression import can_hold, encoded_bytes, gets_smaller

TIME_BUCKETS_S = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
MOST_UNCOUNTED = 16  # values of a histogram
BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128)
_KIND_OF: dict[type[Call], str] = {ForwardCall: "forward", BackwardCall: "backward", UpdateCall: "update"}
ENCODINGS: dict[int, str] = {number: name.lower() for name, number in pb.Encoding.items()}


class Histogram:
    """Counts values by bucket: some at a time, since one by one takes twice as long.

    Args:
        bounds: the buckets' upper bounds; one more holds the rest.

    Threads: one adds; any may look.
    """

    _counting = threading.Lock()  # of all histograms: it is held for some microseconds, and rarely

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self._added: list[float] = []  # and not counted yet
        self._counts = [0] * (len(bounds) + 1)  # up to each bound, and of all
        self._total = 0.0

    def add(self, value: float) -> None:
        """Add one value."""
        added = self._added
        added.append(value)
        if len(added) >= MOST_UNCOUNTED:
            with self._counting:
                self._count()

    def _count(self) -> None:
        """Count what was added; with the lock held, as who looks at the counts has it: they change one by one."""
        num_added = len(self._added)  # meanwhile more may come
        values = sorted(self._added[:num_added])
        del self._added[:num_added]
        for index, bound in enumerate(self.bounds):
            self._counts[index] += bisect_right(values, bound)
        self._counts[-1] += num_added
        self._total += sum(values)

    @property
    def total(self) -> float:
        """The sum of all values."""
        with self._counting:
            self._count()
            return self._total

    def buckets(self) -> list[tuple[str, float]]:
        """Return the counts up to each bound, as Prometheus wants them."""
        with self._counting:
            self._count()
            counts = [*map(float, self._counts)]
        return list(zip([*map(str, self.bounds), "+Inf"], counts, strict=True))


class KindStats:
    """One kind of call of one expert."""

    def __init__(self) -> None:
        self.num_calls = self.num_failed = self.num_tokens = self.bytes_in = self.bytes_out = 0
        self.queue_s, self.compute_s = Histogram(TIME_BUCKETS_S), Histogram(TIME_BUCKETS_S)
        self.batch_calls = Histogram(BATCH_BUCKETS)


class ExpertStats:
    """What one expert has done; told by its queue after each batch."""

    def __init__(self) -> None:
        self.kinds = {kind: KindStats() for kind in _KIND_OF.values()}
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
