"""Clients that speak HTTP/2 as no client of grpc does. No token is needed for that, so nothing may come of it."""

from __future__ import annotations

import functools
import logging
import threading
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from torch import nn

from experts_server import ExpertsServer
from experts_server.configuration.config import LimitsConfig, SecurityConfig, ServingConfig
from experts_server.serving import health
from experts_server.serving import server as server_module
from moe_autograd.wire import experts_pb2 as pb
from moe_autograd.wire import methods
from moe_autograd.wire.framing import seal
from moe_autograd.wire.parcels import ParcelWriter
from tests.support.frames import NeverReading
from tests.support.servers import START_S, WireClient, tokens, wait_until

CHECK, WATCH = b"/grpc.health.v1.Health/Check", b"/grpc.health.v1.Health/Watch"
INFO, INFER = methods.path("Info").encode(), b"/inference.GRPCInferenceService/ModelInfer"
TOKEN = "a-token-of-length-32-or-somewhat-more"


def test_a_method_whose_name_is_no_text_ends_the_server_for_nobody_for_long(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with ExpertsServer({"ffn.0": nn.Linear(8, 8)}) as server:
        address = server.address
        for num_falls in (1, 2):
            with NeverReading(address) as rude:
                rude.call(b"/\xff/Info")
                wait_until(functools.partial(_has_fallen, caplog, num_falls))
            with WireClient(address) as client:
                wait_until(lambda: _is_served(client))
        assert server.address == address


def _has_fallen(caplog: pytest.LogCaptureFixture, num_times: int) -> bool:
    return caplog.text.count("grpc has stopped serving") == num_times


def _is_served(client: WireClient) -> bool:
    try:
        return client.forward("ffn.0", tokens(3, 8)).code == "OK"
    except grpc.RpcError:
        return False


def test_one_who_watches_the_health_and_reads_nothing_holds_up_no_stop_and_no_other_watcher() -> None:
    server = ExpertsServer({"ffn.0": nn.Linear(8, 8)}).__enter__()
    stopping = threading.Thread(target=server.__exit__, args=(None, None, None))
    with NeverReading(server.address) as rude, WireClient(server.address) as client:
        rude.call(WATCH)
        assert rude.has_begun.wait(START_S)
        watch = health_pb2_grpc.HealthStub(client.channel).Watch
        statuses = watch(health_pb2.HealthCheckRequest(), timeout=START_S)
        assert next(statuses).status == health_pb2.HealthCheckResponse.SERVING
        stopping.start()
        assert next(statuses).status == health_pb2.HealthCheckResponse.NOT_SERVING
        stopping.join(START_S)
        assert not stopping.is_alive()


@pytest.mark.parametrize("rpc", ["Forward", "GetState"])
def test_one_who_leaves_in_the_midst_of_the_first_answer_is_no_failure_of_the_server(
    caplog: pytest.LogCaptureFixture, rpc: str
) -> None:
    with ExpertsServer({"ffn.0": nn.Linear(8, 8)}) as server, WireClient(server.address) as client:
        writer = ParcelWriter()
        writer.is_complete = True
        writer.add(*client.forward_call("ffn.0", tokens(3, 8)))
        message = writer.next_message() if rpc == "Forward" else seal(pb.GetStateRequest())
        assert message is not None
        with NeverReading(server.address) as rude:
            rude.call(methods.path(rpc).encode(), message)
            assert rude.has_begun.wait(START_S)
        assert client.forward("ffn.0", tokens(3, 8)).code == "OK"
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


@pytest.mark.parametrize("path", [INFO, INFER, CHECK, WATCH])
def test_requests_of_strangers_that_never_come_take_no_place_of_those_who_have_a_token(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, path: bytes
) -> None:
    for module in (health, server_module):
        monkeypatch.setattr(module, "MAX_STREAMS", 20)
    (tmp_path / "tokens").write_text(f"train {TOKEN}")
    config = ServingConfig(
        security=SecurityConfig(tokens_file=tmp_path / "tokens"),
        limits=LimitsConfig(max_concurrent_passes=2),
    )
    with (
        ExpertsServer({"ffn.0": nn.Linear(8, 8)}, config=config) as server,
        NeverReading(server.address) as rude,
        WireClient(server.address, token=TOKEN) as client,
    ):
        for _ in range(500):
            rude.begin(path)
        assert rude.has_begun.wait(START_S), "those that are too many are refused"
        wait_until(lambda: _is_served(client))
        assert [client.forward("ffn.0", tokens(3, 8)).code for _ in range(50)] == ["OK"] * 50
