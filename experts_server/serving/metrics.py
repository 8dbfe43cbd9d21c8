"""What an operator wants to watch, for Prometheus: calls, tokens, batches, times, updates and bytes, by expert.

Numbers are counted in plain attributes of an `ExpertStats` and turned into Prometheus samples when they are asked for.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import struct
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, cast

from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from experts_server.queues.batching import ExpertQueue
from experts_server.queues.stats import ENCODINGS, Histogram, KindStats
from experts_server.serving.ports import describe_refusal
from moe_autograd.errors import ConfigError
from moe_autograd.wire.addresses import joined_address

logger = logging.getLogger(__name__)

MAX_READERS = 64  # at once
PAUSE_S = 0.1  # before a connection is taken that there was no descriptor for
READER_TIMEOUT_S = 10.0  # of a reader that neither asks nor takes the answer: each has a thread


_BY_EXPERT: tuple[tuple[Any, str, str, Callable[[ExpertQueue], int]], ...] = (
    (GaugeMetricFamily, "experts_queue_calls", "calls that wait", len),
    (
        GaugeMetricFamily,
        "experts_updates",
        "updates so far, as in the checkpoint",
        lambda queue: queue.hosted.num_updates,
    ),
    (
        CounterMetricFamily,
        "experts_refused_calls",
        "calls that had no room or could not be right",
        lambda queue: queue.stats.num_refused,
    ),
    (
        CounterMetricFamily,
        "experts_late_calls",
        "calls given up, or past their deadline, before they began",
        lambda queue: queue.stats.num_late,
    ),
)


class ServerCollector(Collector):
    """Turns the stats into samples.

    Args:
        experts: by name.
        values: name -> (help, value), of the whole server; a name that ends in `_total` counts.
    """

    def __init__(
        self, experts: Mapping[str, ExpertQueue], values: dict[str, tuple[str, Callable[[], float]]]
    ) -> None:
        self._experts = experts
        self._values = values

    def collect(self) -> Iterable[Metric]:
        """Return the samples of now."""
        yield from self._counters()
        yield from self._histograms()
        for family, name, help_text, count in _BY_EXPERT:
            metric = family(name, help_text, labels=("expert",))
            for expert, queue in self._experts.items():
                metric.add_metric((expert,), count(queue))
            yield metric
        yield self._sent()
        for name, (help_text, read) in self._values.items():
            of_all = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            yield of_all(name, help_text, value=read())

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
        for expert, queue in self._experts.items():
            for encoding, num_bytes in queue.stats.sent_bytes.items():
                family.add_metric((expert, ENCODINGS[encoding]), num_bytes)
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

    def _kinds(self) -> Iterator[tuple[tuple[str, str], KindStats]]:
        for expert, queue in self._experts.items():
            for name, kind in queue.stats.kinds.items():
                yield (expert, name), kind


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
        registry = CollectorRegistry(auto_describe=True)  # or `?name[]=` would find nothing
        registry.register(collector)
        ProcessCollector(registry=registry)
        try:
            self._server, self._thread = start_http_server(port, host, registry)
        except (OSError, UnicodeError) as error:
            raise ConfigError(
                f"config, key 'metrics_listen': {describe_refusal(joined_address(host, port), error)}"
            ) from error
        self._server.set_app(_telling(self._server.get_app()))
        self.address = joined_address(host, self._server.server_port)
        self._is_closing = threading.Event()
        self._readers: dict[socket.socket, None] = {}  # the first one came first
        self._accept, self._hang_up = self._server.get_request, self._server.shutdown_request
        self._server.get_request = self._accept_or_pause  # type: ignore[method-assign]
        self._server.verify_request = self._let_in  # type: ignore[method-assign, assignment]
        self._server.shutdown_request = self._let_out  # type: ignore[method-assign, assignment]
        self._server.handle_error = _note_lost_reader  # type: ignore[method-assign, assignment]

    def _accept_or_pause(self) -> Any:
        """Take a connection; where there is no descriptor for it, it stays, and the server would ask at once again."""
        try:
            connection, address = self._accept()
        except OSError:
            self._is_closing.wait(PAUSE_S)
            raise
        # `settimeout` would be for the whole answer, however steadily it is read
        timeout = struct.pack("@ll", int(READER_TIMEOUT_S), round(READER_TIMEOUT_S % 1 * 1e6))
        for side in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
            connection.setsockopt(socket.SOL_SOCKET, side, timeout)
        return connection, address

    def _let_in(self, connection: socket.socket, address: Any) -> bool:
        """Let a reader in; where that is one too many, whoever came first has to go: each has a thread."""
        self._readers[connection] = None
        if len(self._readers) > MAX_READERS:
            first = next(iter(self._readers))
            self._readers.pop(first, None)
            with contextlib.suppress(OSError):  # it has just left
                first.shutdown(socket.SHUT_RDWR)
        return True

    def _let_out(self, connection: socket.socket) -> None:
        self._readers.pop(connection, None)
        self._hang_up(connection)

    def close(self) -> None:
        """Stop serving."""
        self._is_closing.set()
        self._server.shutdown()
        self._server.server_close()
        assert isinstance(self._thread, threading.Thread)
        self._thread.join()


def _telling(answer: Any) -> Callable[[Any, Any], Iterable[bytes]]:
    """Let what goes wrong with an answer be an event of the log: wsgiref writes a traceback around it, on stderr."""

    def answer_or_tell(environ: Any, start_response: Any) -> Iterable[bytes]:
        try:
            return cast(Iterable[bytes], answer(environ, start_response))
        except Exception as error:  # prometheus-client's own too, at an Accept that it cannot read
            logger.warning("a reader of metrics got no answer: %r", error)
            start_response("500 Internal Server Error", [("Content-Type", "text/plain")])
            return [f"{type(error).__name__}\n".encode()]

    return answer_or_tell


def _note_lost_reader(connection: Any, address: Any) -> None:
    """Take note of a reader that hung up, was silent for too long, or sent no HTTP."""
    logger.debug("a reader of metrics at %s got no answer", address, exc_info=True)
