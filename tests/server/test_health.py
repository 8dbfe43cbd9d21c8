"""Health and reflection, asked with the stock clients."""

from __future__ import annotations

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
import torch
from google.protobuf import message_factory
from google.protobuf.descriptor_pool import DescriptorPool
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from torch import Tensor, nn

from experts_server import ExpertsServer
from experts_server.checkpoints import saving
from experts_server.configuration.config import LimitsConfig, SecurityConfig, ServingConfig
from experts_server.serving import health
from experts_server.serving import server as server_module
from moe_autograd.moe.experts import FeedForwardExpert
from tests.support.servers import START_S, WireClient, tokens, wait_until

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Hanging(nn.Module):
    """Waits in its forward until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.started, self.may_go = threading.Event(), threading.Event()

    def forward(self, x: Tensor) -> Tensor:
        self.started.set()
        assert self.may_go.wait(START_S)
        return x


def test_the_server_and_each_expert_are_serving() -> None:
    with ExpertsServer({"ffn.0": FeedForwardExpert(8)}) as server, WireClient(server.address) as client:
        stub = health_pb2_grpc.HealthStub(client.channel)
        for name in ("", "moe_autograd.v1.Experts", "inference.GRPCInferenceService", "ffn.0"):
            assert stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=START_S).status == SERVING


def test_a_hanging_expert_stops_serving_and_serves_again_while_the_others_go_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(health, "STUCK_S", 10 * START_S)
    hanging = Hanging()
    with (
        ExpertsServer({"hangs": hanging, "ffn.0": FeedForwardExpert(8)}) as server,
        WireClient(server.address) as client,
    ):
        stub = health_pb2_grpc.HealthStub(client.channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest(service="hangs"), timeout=START_S)
        assert next(watch).status == SERVING
        caller = threading.Thread(target=client.forward, args=("hangs", torch.ones(2, 8)))
        caller.start()
        assert hanging.started.wait(START_S)
        assert server._server is not None
        assert server._server._loop is not None
        look = server._server.health.look()
        asyncio.run_coroutine_threadsafe(look, server._server._loop).result(START_S)
        assert server._server.health._stuck == set(), "one that computes does not hang"
        monkeypatch.setattr(health, "STUCK_S", 0.0)
        assert next(watch).status == NOT_SERVING
        assert client.forward("ffn.0", tokens(2, 8)).code == "OK"
        assert stub.Check(health_pb2.HealthCheckRequest(), timeout=START_S).status == SERVING
        hanging.may_go.set()
        assert next(watch).status == SERVING
        caller.join(START_S)


def test_an_expert_that_returns_while_the_server_drains_serves_nobody_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(health, "STUCK_S", 0.0)
    experts = {"returns": Hanging(), "hangs": Hanging()}
    with (
        ExpertsServer(experts, config=ServingConfig(drain_timeout_s=START_S)) as server,
        WireClient(server.address) as client,
        ThreadPoolExecutor() as callers,
    ):
        assert server._server is not None
        stub, looks = health_pb2_grpc.HealthStub(client.channel), server._server.health
        try:
            for name in experts:
                callers.submit(client.forward, name, torch.ones(2, 8))
            wait_until(lambda: looks._stuck == {*experts})
            watch = stub.Watch(health_pb2.HealthCheckRequest(), timeout=START_S)
            statuses = (reply.status for reply in watch)
            assert SERVING in statuses
            callers.submit(server.stop)
            assert NOT_SERVING in statuses
            experts["returns"].may_go.set()
            wait_until(lambda: looks._stuck == {"hangs"})
            request = health_pb2.HealthCheckRequest(service="returns")
            assert stub.Check(request, timeout=START_S).status == NOT_SERVING
        finally:
            for expert in experts.values():
                expert.may_go.set()


def test_while_a_save_waits_for_an_expert_that_hangs_another_one_that_hangs_is_noticed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(health, "STUCK_S", 0.0)
    monkeypatch.setattr(saving, "SNAPSHOT_TIMEOUT_S", 10 * START_S)
    experts = {"first": Hanging(), "second": Hanging()}
    config = ServingConfig(checkpoint_dir=tmp_path, checkpoint_interval_s=0.01)
    with (
        ExpertsServer(experts, config=config) as server,
        WireClient(server.address) as client,
        ThreadPoolExecutor() as callers,
    ):
        try:
            callers.submit(client.forward, "first", torch.ones(2, 8))
            assert experts["first"].started.wait(START_S)
            wait_until(lambda: len(server._server.registry["first"]) == 1)  # type: ignore[union-attr]
            stub = health_pb2_grpc.HealthStub(client.channel)
            watch = stub.Watch(health_pb2.HealthCheckRequest(service="second"), timeout=START_S)
            statuses = (reply.status for reply in watch)
            assert SERVING in statuses
            callers.submit(client.forward, "second", torch.ones(2, 8))
            assert NOT_SERVING in statuses
        finally:
            for expert in experts.values():
                expert.may_go.set()


def test_streams_that_ask_for_no_token_take_no_place_of_those_that_do(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for module in (health, server_module):
        monkeypatch.setattr(module, "MAX_STREAMS", 20)
    (tmp_path / "tokens").write_text("train a-token-of-length-32-or-somewhat-more")
    security = SecurityConfig(tokens_file=tmp_path / "tokens")
    config = ServingConfig(security=security, limits=LimitsConfig(max_concurrent_passes=2))
    with (
        ExpertsServer({"e": FeedForwardExpert(8)}, config=config) as server,
        WireClient(server.address) as stranger,
        WireClient(server.address, token="a-token-of-length-32-or-somewhat-more") as client,
    ):
        watch = health_pb2_grpc.HealthStub(stranger.channel).Watch
        watches = [watch(health_pb2.HealthCheckRequest(), timeout=START_S) for _ in range(20)]
        assert [next(each).status for each in watches] == [SERVING] * 20
        reflect = reflection_pb2_grpc.ServerReflectionStub(stranger.channel).ServerReflectionInfo
        question = reflection_pb2.ServerReflectionRequest(list_services="")
        surplus = [watch(health_pb2.HealthCheckRequest(), timeout=START_S) for _ in range(100)]
        for each in (*surplus, reflect(iter([question]), timeout=START_S)):
            with pytest.raises(grpc.RpcError) as refused:
                next(each)
            assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert client.forward("e", tokens(2, 8)).code == "OK"
        check = health_pb2_grpc.HealthStub(stranger.channel).Check
        assert check(health_pb2.HealthCheckRequest(), timeout=START_S).status == SERVING, (
            "no probe is kept out"
        )
        for each in watches:
            each.cancel()
        wait_until(lambda: "0 inside" in repr(server._server.health._doorway))  # type: ignore[union-attr]
        assert next(reflect(iter([question]), timeout=START_S)).list_services_response.service


def test_reflection_describes_the_service() -> None:
    with ExpertsServer({"ffn.0": FeedForwardExpert(8)}) as server, WireClient(server.address) as client:
        database = ProtoReflectionDescriptorDatabase(client.channel)
        assert "moe_autograd.v1.Experts" in database.get_services()
        pool = DescriptorPool(database)
        methods = {name: pool.FindServiceByName(name).methods_by_name for name in database.get_services()}
        assert methods["moe_autograd.v1.Experts"]["Forward"].client_streaming
        infer = methods["inference.GRPCInferenceService"]["ModelInfer"]
        assert infer.input_type.fields_by_name["raw_input_contents"].number == 7
        assert {"grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"} < methods.keys()
        with pytest.raises(KeyError):
            pool.FindServiceByName("no.such.Service")


def test_a_call_made_of_what_reflection_says_is_answered() -> None:
    """As grpcurl does it: without any code of ours."""
    with ExpertsServer({"ffn.0": FeedForwardExpert(8)}) as server, WireClient(server.address) as client:
        pool = DescriptorPool(ProtoReflectionDescriptorDatabase(client.channel))
        method = pool.FindServiceByName("inference.GRPCInferenceService").methods_by_name["ModelReady"]
        request, reply = map(message_factory.GetMessageClass, (method.input_type, method.output_type))
        call = client.channel.unary_unary(
            "/inference.GRPCInferenceService/ModelReady", request.SerializeToString, reply.FromString
        )
        assert call(request(name="ffn.0"), timeout=START_S).ready


def test_info_answers_a_request_without_a_checksum_as_grpcurl_sends_it() -> None:
    with ExpertsServer({"ffn.0": FeedForwardExpert(8)}) as server, WireClient(server.address) as client:
        assert b"ffn.0" in client.unary("Info", b"")
