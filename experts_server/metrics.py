"""What an operator wants to watch, for Prometheus: calls, tokens, batches, times, updates and bytes, by expert.

Numbers are counted in plain attributes of an `ExpertStats` (an expert's turns never overlap, so each has one writer
and needs no lock: a call costs a few hundred nanoseconds) and turned into Prometheus samples when they are asked for.
"""

from __future__ import annotations

import logging
import threading
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from torch import Tensor

from experts_server.addresses import joined_address
from experts_server.calls import BackwardCall, Call, ForwardCall, Outputs, UpdateCall
from experts_server.ports import describe_refusal
from moe_autograd.errors import ConfigError, InputsNeededError
from moe_autograd.wire import experts_pb2 as pb
from moe_autograd.wire.compression import can_hold, encoded_bytes, is_applicable

logger = logging.getLogger(__name__)

TIME_BUCKETS_S = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0)
BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128)
KINDS = ("forward", "backward", "update")
PAUSE_S = 0.1  # before a connection is taken that there was no descriptor for
READER_TIMEOUT_S = 10.0  # of a reader that neither asks nor takes the answer: each has a thread
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


class _Kind:
    """One kind of call of one expert."""

    def __init__(self) -> None:
        self.num_calls = self.num_failed = self.num_tokens = self.bytes_in = self.bytes_out = 0
        self.queue_s, self.compute_s = Histogram(TIME_BUCKETS_S), Histogram(TIME_BUCKETS_S)
        self.batch_calls = Histogram(BATCH_BUCKETS)


class ExpertStats:
    """What one expert has done; told by its queue after each batch."""

    def __init__(self) -> None:
        self.kinds = {kind: _Kind() for kind in KINDS}
        self.sent_bytes = dict.fromkeys(ENCODINGS, 0)  # as they travel, by encoding
        self.num_refused = 0  # before they were in the queue; counted by the event loop
        self.num_late = 0  # before they began; counted under the queue's lock

    def computed(
        self, batch: Sequence[Call], results: Sequence[Any], started: float, compute_s: float
    ) -> None:
        """Take note of a batch; a look at the expert, such as a checkpoint's, is none.

        Nor is a backward whose inputs are needed: it comes again, with them.
        """
        name = _KIND_OF.get(type(batch[0]))
        if name is None or (isinstance(batch[0], BackwardCall) and batch[0].wants_nothing):
            return
        done = [
            pair for pair in zip(batch, results, strict=True) if not isinstance(pair[1], InputsNeededError)
        ]
        if not done:
            return
        kind = self.kinds[name]
        kind.batch_calls.add(len(done))
        kind.compute_s.add(compute_s)
        kind.num_calls += len(done)
        for call, result in done:
            kind.num_tokens += call.num_tokens
            kind.bytes_in += call.num_bytes
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


def _as_sent(tensor: Tensor, encoding: pb.Encoding) -> tuple[pb.Encoding, int]:
    """Return the encoding that a tensor travels in where `encoding` is asked for, and its bytes then."""
    if not is_applicable(tensor.dtype, encoding) or not can_hold(tensor, encoding):
        return pb.RAW, tensor.nbytes
    return encoding, encoded_bytes(tensor.dtype, tensor.numel(), encoding)


@dataclass(frozen=True)
class Watched:
    """An expert as the collector sees it: its name, its stats, and what changes by itself."""

    name: str
    stats: ExpertStats
    num_waiting: Callable[[], int]
    num_updates: Callable[[], int]


class ServerCollector(Collector):
    """Turns the stats into samples.

    Args:
        experts: what is watched.
        values: name -> (help, value), of the whole server; a name that ends in `_total` counts.
    """

    def __init__(
        self, experts: Sequence[Watched], values: dict[str, tuple[str, Callable[[], float]]]
    ) -> None:
        self._experts = experts
        self._values = values

    def collect(self) -> Iterable[Metric]:
        """Return the samples of now."""
        yield from self._counters()
        yield from self._histograms()
        waiting = GaugeMetricFamily("experts_queue_calls", "calls that wait", labels=("expert",))
        updates = GaugeMetricFamily(
            "experts_updates", "updates so far, as in the checkpoint", labels=("expert",)
        )
        refused = CounterMetricFamily(
            "experts_refused_calls", "calls that had no room or could not be right", labels=("expert",)
        )
        late = CounterMetricFamily(
            "experts_late_calls",
            "calls given up, or past their deadline, before they began",
            labels=("expert",),
        )
        for watched in self._experts:
            waiting.add_metric((watched.name,), watched.num_waiting())
            updates.add_metric((watched.name,), watched.num_updates())
            refused.add_metric((watched.name,), watched.stats.num_refused)
            late.add_metric((watched.name,), watched.stats.num_late)
        yield waiting
        yield updates
        yield refused
        yield late
        yield self._sent()
        for name, (help_text, read) in self._values.items():
            family = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            yield family(name, help_text, value=read())

    def _counters(self) -> Iterator[Metric]:
        for name, help_text, attribute in (
            ("experts_calls", "calls computed", "num_calls"),
            ("experts_failed_calls", "calls that ended in an error", "num_failed"),
            ("experts_tokens", "rows of the calls' inputs", "num_tokens"),
            ("experts_received_bytes", "bytes of the calls' tensors", "bytes_in"),
            ("experts_sent_bytes", "bytes of the results' tensors", "bytes_out"),
        ):
            family = CounterMetricFamily(name, help_text, labels=("expert", "kind"))
            for labels, kind in self._kinds():
                family.add_metric(labels, getattr(kind, attribute))
            yield family

    def _sent(self) -> Metric:
        family = CounterMetricFamily(
            "experts_sent_encoded_bytes",
            "bytes of the results' tensors as they travel",
            labels=("expert", "encoding"),
        )
        for watched in self._experts:
            for encoding, num_bytes in watched.stats.sent_bytes.items():
                family.add_metric((watched.name, ENCODINGS[encoding]), num_bytes)
        return family

    def _histograms(self) -> Iterator[Metric]:
        """Leave out kinds that have not come yet: some forty lines each, for each of thousands of experts."""
        for name, help_text, attribute in (
            ("experts_queue_seconds", "from arrival to the beginning of the computation", "queue_s"),
            ("experts_compute_seconds", "of one batch", "compute_s"),
            ("experts_batch_calls", "calls computed together", "batch_calls"),
        ):
            family = HistogramMetricFamily(name, help_text, labels=("expert", "kind"))
            for labels, kind in self._kinds():
                if kind.num_calls:
                    histogram: Histogram = getattr(kind, attribute)
                    family.add_metric(labels, histogram.buckets(), histogram.total)
            yield family

    def _kinds(self) -> Iterator[tuple[tuple[str, str], _Kind]]:
        for watched in self._experts:
            for name, kind in watched.stats.kinds.items():
                yield (watched.name, name), kind


class MetricsEndpoint:
    """`/metrics` over HTTP, on a thread of its own.

    Args:
        host: to listen on.
        port: 0 takes a free one.
        collector: what is shown.

    Raises:
        ConfigError: the address cannot be used.
    """

    def __init__(self, host: str, port: int, collector: Collector) -> None:
        registry = CollectorRegistry()
        registry.register(collector)
        ProcessCollector(registry=registry)
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except OSError as error:
            raise ConfigError(
                f"config, key 'metrics_listen': {describe_refusal(joined_address(host, port), error)}"
            ) from error
        self.address = joined_address(host, self._server.server_port)
        self._is_closing = threading.Event()
        self._accept = self._server.get_request
        self._server.get_request = self._accept_or_pause  # type: ignore[method-assign]
        self._server.handle_error = _note_lost_reader  # type: ignore[method-assign, assignment]

    def _accept_or_pause(self) -> Any:
        """Take a connection; where there is no descriptor for it, it stays, and the server would ask at once again."""
        try:
            connection, address = self._accept()
        except OSError:
            self._is_closing.wait(PAUSE_S)
            raise
        connection.settimeout(READER_TIMEOUT_S)
        return connection, address

    def close(self) -> None:
        """Stop serving."""
        self._is_closing.set()
        self._server.shutdown()
        self._server.server_close()
        assert isinstance(self._thread, threading.Thread)
        self._thread.join()


def _note_lost_reader(connection: Any, address: Any) -> None:
    """Take note of a reader that hung up, was silent for too long, or sent no HTTP."""
    logger.debug("a reader of metrics at %s got no answer", address, exc_info=True)
