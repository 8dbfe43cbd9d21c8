"""`/metrics` and `top`: what they show is what was done."""

from __future__ import annotations

import contextlib
import socket
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
import torch
from click.testing import CliRunner
from prometheus_client.core import Metric
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.registry import Collector
from torch import nn

from experts_server import ExpertsServer
from experts_server.command.cli import main
from experts_server.configuration.config import MemoryConfig, ServingConfig
from experts_server.queues.stats import Histogram
from experts_server.serving.metrics import MetricsEndpoint
from moe_autograd import parallel_apply
from moe_autograd.errors import ConfigError, InvalidCallError
from moe_autograd.moe.experts import FeedForwardExpert
from moe_autograd.remote import connect
from moe_autograd.wire import experts_pb2 as pb
from tests.support.hosting import sgd
from tests.support.proxy import Proxy
from tests.support.servers import WireClient, tokens, wait_until

D = 8


def samples(address: str) -> dict[tuple[str, ...], float]:
    with urllib.request.urlopen(f"http://{address}/metrics", timeout=30) as reply:
        families = text_string_to_metric_families(reply.read().decode())
        return {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}


def test_a_reader_may_ask_for_some_of_them() -> None:
    config = ServingConfig(metrics_listen="127.0.0.1:0")
    with ExpertsServer({"e": nn.Linear(D, D)}, config=config) as server, WireClient(server.address) as client:
        client.forward("e", tokens(4, D))
        names = ("experts_calls_total", "experts_compute_seconds_sum")
        url = f"http://{server.metrics_address}/metrics?" + "&".join(f"name[]={name}" for name in names)
        with urllib.request.urlopen(url, timeout=30) as reply:
            families = text_string_to_metric_families(reply.read().decode())
        assert {sample.name for family in families for sample in family.samples} == set(names)


def test_metrics_count_calls_tokens_bytes_times_and_updates_by_expert() -> None:
    experts = {"ffn.0": FeedForwardExpert(D), "ffn.1": FeedForwardExpert(D)}
    config, began = ServingConfig(metrics_listen="127.0.0.1:0"), time.monotonic()
    with ExpertsServer(experts, optimizer=sgd, config=config) as server, WireClient(server.address) as client:
        for call_id in range(3):
            client.forward("ffn.0", tokens(5, D), call_id=call_id)
        client.backward("ffn.0", tokens(5, D), call_id=0)
        client.forward("ffn.0", tokens(5, D) / 0)
        client.forward("ffn.0", tokens(5, D + 1))
        client.step()
        client.get_state("ffn.0")  # a look, and no call
        assert server.metrics_address is not None
        shown = samples(server.metrics_address)
        top = CliRunner().invoke(main, ["top", server.metrics_address, "--looks", "1", "--interval-s", "0.1"])
    assert shown["experts_calls_total", "ffn.0", "forward"] == 4
    assert shown["experts_calls_total", "ffn.0", "update"] == 1
    assert shown["experts_failed_calls_total", "ffn.0", "forward"] == 1
    assert (shown["experts_refused_calls_total", "ffn.0"], shown["experts_refused_calls_total", "ffn.1"]) == (
        1,
        0,
    )
    assert shown["experts_tokens_total", "ffn.0", "forward"] == 20
    assert shown["experts_received_bytes_total", "ffn.0", "forward"] == 4 * 5 * D * 4
    assert shown["experts_sent_bytes_total", "ffn.0", "backward"] == 5 * D * 4
    assert shown["experts_calls_total", "ffn.1", "forward"] == 0
    assert {key[2] for key in shown if key[0].startswith("experts_compute") and key[1] == "ffn.1"} == {
        "update"
    }
    assert (shown["experts_updates", "ffn.0"], shown["experts_updates", "ffn.1"]) == (1, 0)
    assert shown["experts_compute_seconds_bucket", "ffn.0", "forward", "+Inf"] == 4
    assert shown["experts_queue_seconds_count", "ffn.0", "forward"] == 4
    assert 0 < shown["experts_queue_seconds_sum", "ffn.0", "forward"] < 4 * (time.monotonic() - began)
    assert shown["experts_batch_calls_bucket", "ffn.0", "forward", "1"] == 4
    assert shown[("experts_server_ready",)] == 1
    assert shown[("experts_server_gathered_gradient_bytes",)] > 0
    assert (top.exit_code, "ffn.1" in top.output) == (0, True), top.output


def test_calls_beyond_the_limits_of_a_stream_count_as_refused() -> None:
    config = {"metrics_listen": "127.0.0.1:0", "limits": {"max_tensor_bytes": 1000, "max_calls_per_pass": 2}}
    with (
        ExpertsServer({f"e.{i}": FeedForwardExpert(D) for i in range(4)}, config=config) as server,
        connect(server.address) as experts,
    ):
        with pytest.raises(InvalidCallError, match="at most 1000 bytes"):
            experts["e.0"](tokens(100, D))
        with pytest.raises(InvalidCallError, match="at most 2 calls"):
            parallel_apply(list(experts.values()), [(tokens(1, D),)] * 4)
        assert server.metrics_address is not None
        shown = samples(server.metrics_address)
    assert [shown["experts_refused_calls_total", f"e.{i}"] for i in range(4)] == [1, 0, 1, 1]


@pytest.mark.parametrize("saving", [MemoryConfig(), MemoryConfig(recompute=True)], ids=str)
def test_a_backward_that_wants_nothing_lets_its_forward_go_and_is_no_call_that_was_computed(
    saving: MemoryConfig,
) -> None:
    """So does a client with a hedged forward that lost; it may never have begun, too."""
    norm, wants_nothing = nn.BatchNorm1d(D), {"wants_weight_grads": False, "wants_input_grads": [False]}
    config = ServingConfig(metrics_listen="127.0.0.1:0", memory=saving)
    with ExpertsServer({"norm": norm}, config=config) as server, WireClient(server.address) as client:
        client.forward("norm", tokens(5, D), call_id=1)
        num_seen = norm.num_batches_tracked.item()
        assert [client.backward("norm", None, call_id=i, **wants_nothing).code for i in (1, 2)] == ["OK"] * 2
        assert norm.num_batches_tracked.item() == num_seen
        assert client.backward("norm", tokens(5, D), call_id=1).code == "INPUTS_NEEDED"
        assert server.metrics_address is not None
        shown = samples(server.metrics_address)
    assert shown["experts_calls_total", "norm", "backward"] == 0


def test_a_backward_whose_inputs_are_needed_again_counts_once_and_has_not_failed() -> None:
    config = ServingConfig(metrics_listen="127.0.0.1:0")
    with (
        ExpertsServer({"e": FeedForwardExpert(D)}, config=config) as server,
        WireClient(server.address) as client,
    ):
        x = tokens(5, D)
        assert client.backward("e", x, call_id=1).code == "INPUTS_NEEDED"
        assert client.backward("e", x, call_id=1, inputs=[x]).code == "OK"
        assert server.metrics_address is not None
        shown = samples(server.metrics_address)
    counted = (
        "calls_total",
        "failed_calls_total",
        "tokens_total",
        "compute_seconds_count",
        "batch_calls_count",
    )
    assert [shown[f"experts_{name}", "e", "backward"] for name in counted] == [1, 0, 5, 1, 1]


def test_bytes_that_are_sent_are_counted_as_they_travel_by_encoding() -> None:
    config = ServingConfig(metrics_listen="127.0.0.1:0")
    with (
        ExpertsServer({"e": FeedForwardExpert(D)}, config=config) as server,
        WireClient(server.address) as client,
    ):
        assert server.metrics_address is not None
        for encoding in (pb.RAW, pb.AS_BFLOAT16, pb.AS_FLOAT16, pb.AS_INT8_BLOCKS):
            assert client.forward("e", tokens(64, D), reply_encoding=encoding).code == "OK"
        shown = samples(server.metrics_address)
    values = 64 * D
    assert {
        key[1]: value for key, value in shown.items() if key[0] == "experts_sent_encoded_bytes_total"
    } == {
        "raw": 4 * values,
        "as_bfloat16": 2 * values,
        "as_float16": 2 * values,
        "as_int8_blocks": values + 4 * (values // 256),
    }
    assert shown["experts_sent_bytes_total", "e", "forward"] == 4 * 4 * values


@pytest.mark.parametrize(
    ("value", "encoded"),
    [
        (1.0, ("as_bfloat16", "as_float16", "as_int8_blocks")),
        (1e5, ("as_bfloat16", "as_int8_blocks")),
        (3.4e38, ("as_int8_blocks",)),
    ],
)
def test_bytes_of_values_that_an_encoding_cannot_hold_are_counted_as_raw(
    value: float, encoded: tuple[str, ...]
) -> None:
    config = ServingConfig(metrics_listen="127.0.0.1:0")
    x = tokens(64, D).clamp(-1, 1)
    x[3, 3] = value
    expected = {"as_bfloat16": 2 * x.numel(), "as_float16": 2 * x.numel(), "as_int8_blocks": x.numel() + 8}
    with (
        ExpertsServer({"e": torch.nn.Identity()}, config=config) as server,
        WireClient(server.address) as client,
    ):
        assert server.metrics_address is not None
        for encoding in (pb.AS_BFLOAT16, pb.AS_FLOAT16, pb.AS_INT8_BLOCKS):
            assert client.forward("e", x, reply_encoding=encoding).code == "OK"
        shown = samples(server.metrics_address)
    sent = {key[1]: value for key, value in shown.items() if key[0] == "experts_sent_encoded_bytes_total"}
    assert sent == {name: number if name in encoded else 0 for name, number in expected.items()} | {
        "raw": 4 * x.numel() * (3 - len(encoded))
    }


def test_bytes_of_a_tensor_that_its_scale_would_make_no_smaller_are_counted_as_raw() -> None:
    config = ServingConfig(metrics_listen="127.0.0.1:0")
    x = tokens(1, 4).half()
    with (
        ExpertsServer({"e": torch.nn.Identity()}, config=config) as server,
        WireClient(server.address) as client,
    ):
        assert server.metrics_address is not None
        assert torch.equal(client.forward("e", x, reply_encoding=pb.AS_INT8_BLOCKS).tensors[0], x)
        shown = samples(server.metrics_address)
    sent = {key[1]: value for key, value in shown.items() if key[0] == "experts_sent_encoded_bytes_total"}
    assert sent == {"raw": x.nbytes, "as_bfloat16": 0, "as_float16": 0, "as_int8_blocks": 0}


def test_a_histogram_counts_up_to_each_bound() -> None:
    histogram = Histogram((1, 2))
    for value in (0.5, 1, 1.5, 99):
        histogram.add(value)
    assert (histogram.buckets(), histogram.total) == ([("1", 2.0), ("2", 3.0), ("+Inf", 4.0)], 102.0)


def test_a_histogram_that_is_looked_at_while_values_are_added_loses_none() -> None:
    histogram, is_over = Histogram((0.25, 0.5)), threading.Event()

    def add() -> None:
        for index in range(40_000):
            histogram.add(0.25 * (index % 4))
        is_over.set()

    adding = threading.Thread(target=add)
    adding.start()
    last = 0.0
    while not is_over.is_set():
        counts = [count for _, count in histogram.buckets()]
        assert counts == sorted(counts)
        assert counts[-1] >= last
        last = counts[-1]
    adding.join()
    assert [count for _, count in histogram.buckets()] == [20_000, 30_000, 40_000]
    assert histogram.total == 40_000 * 0.375


def test_who_looks_at_a_histogram_never_sees_values_counted_up_to_some_bounds_alone() -> None:
    histogram = Histogram(range(400))  # the more, the longer it takes
    is_over, interval_s = threading.Event(), sys.getswitchinterval()

    def add() -> None:
        while not is_over.is_set():
            histogram.add(0.0)

    adding = threading.Thread(target=add)
    sys.setswitchinterval(1e-6)
    try:
        adding.start()
        for _ in range(3_000):
            counts = [count for _, count in histogram.buckets()]
            assert counts == counts[:1] * 401
    finally:
        is_over.set()
        adding.join()
        sys.setswitchinterval(interval_s)


def test_a_metrics_port_in_use_is_refused_and_the_servers_own_port_is_free_again() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        config = ServingConfig(metrics_listen=f"127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(ConfigError, match="key 'metrics_listen': expected an address that is free"):
            ExpertsServer({"e": FeedForwardExpert(D)}, config=config).start()


@pytest.mark.parametrize("said", [b"", b"GET /metrics HTTP/1.0\r\n", b"GET " + b"x" * 70_000])
def test_a_reader_that_is_silent_or_sends_no_http_is_let_go_without_a_word(
    said: bytes, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """Each has a thread and a descriptor, and a machine that is gone never hangs up."""
    monkeypatch.setattr("experts_server.serving.metrics.READER_TIMEOUT_S", 0.1)
    with ExpertsServer({"e": nn.Identity()}, config=ServingConfig(metrics_listen="127.0.0.1:0")) as server:
        assert server.metrics_address is not None
        host, _, port = server.metrics_address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=30) as reader:
            reader.sendall(said)
            with contextlib.suppress(ConnectionResetError):  # some of what was said was not read
                while reader.recv(1 << 16):
                    pass
        assert samples(server.metrics_address)["experts_server_ready",] == 1
    assert capfd.readouterr().err == ""


def test_readers_that_never_come_to_their_request_keep_no_more_than_so_many_threads_and_nobody_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("experts_server.serving.metrics.MAX_READERS", 4)
    monkeypatch.setattr("experts_server.serving.metrics.READER_TIMEOUT_S", 1000.0)  # nor go by themselves
    with (
        ExpertsServer({"e": nn.Identity()}, config=ServingConfig(metrics_listen="127.0.0.1:0")) as server,
        contextlib.ExitStack() as leaving,
    ):
        assert server.metrics_address is not None
        host, _, port = server.metrics_address.rpartition(":")
        for _ in range(12):
            reader = leaving.enter_context(socket.create_connection((host, int(port)), timeout=30))
            reader.sendall(b"GET /metr")
        assert samples(server.metrics_address)["experts_server_ready",] == 1
        wait_until(lambda: sum("process_request_thread" in t.name for t in threading.enumerate()) <= 4)


def test_a_request_that_prometheus_cannot_read_is_an_event_of_the_log_and_no_traceback(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    with ExpertsServer({"e": nn.Identity()}, config=ServingConfig(metrics_listen="127.0.0.1:0")) as server:
        accept = {"Accept": "application/openmetrics-text; version=one"}
        asked = urllib.request.Request(f"http://{server.metrics_address}/metrics", headers=accept)
        with pytest.raises(urllib.error.HTTPError, match="500") as refused:
            urllib.request.urlopen(asked, timeout=30)
        refused.value.close()
        assert samples(server.metrics_address or "")["experts_server_ready",] == 1
    assert "a reader of metrics got no answer: TypeError" in caplog.text
    assert capfd.readouterr().err == ""


class Long(Collector):
    """As much as thousands of experts have to tell, or more: no system holds it for its reader."""

    text = "x" * (1 << 24)

    def collect(self) -> Iterator[Metric]:
        yield Metric("long", self.text, "gauge")


def test_a_reader_may_take_long_but_must_not_stop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("experts_server.serving.metrics.READER_TIMEOUT_S", 1.0)  # a busy machine takes 0.2
    endpoint = MetricsEndpoint("127.0.0.1", 0, Long())
    with contextlib.closing(endpoint), Proxy(endpoint.address) as link:
        link.bytes_per_s = 12e6
        with urllib.request.urlopen(f"http://{link.address}/metrics", timeout=30) as reply:
            assert Long.text in reply.read().decode()
        host, _, port = endpoint.address.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=30) as reader:
            reader.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            wait_until(lambda: not any("process_request_thread" in t.name for t in threading.enumerate()))


def _has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not _has_ipv6(), reason="needs IPv6 on the loopback interface")
def test_metrics_over_ipv6_have_an_address_that_can_be_asked() -> None:
    with ExpertsServer({"e": FeedForwardExpert(D)}, config=ServingConfig(metrics_listen="[::1]:0")) as server:
        assert server.metrics_address is not None
        assert server.metrics_address.startswith("[::1]:")
        assert samples(server.metrics_address)["experts_server_ready",] == 1


def test_metrics_beyond_loopback_are_refused() -> None:
    with pytest.raises(ValueError, match="metrics_listen: expected a loopback address"):
        ServingConfig(metrics_listen="0.0.0.0:9100")
