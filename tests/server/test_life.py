"""Starting, ready, draining, stopped: what was accepted is finished, what was done is saved, nothing stays behind."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from experts_server import ExpertsServer
from experts_server.config import ServingConfig
from moe_autograd.moe.experts import FeedForwardExpert
from tests.server.test_isolation import Gated, Waiting
from tests.support.servers import ROOT, START_S, ServerProcess, WireClient, tokens

D = 8
FLAGS = ("--expert", "ffn", "--num-experts", "4", "--d-model", str(D), "--optimizer", "sgd", "--lr", "0.01")
HANGS = """
import threading, torch
class Hangs(torch.nn.Linear):
    def forward(self, x):
        open({pipe!r}, "w").close()
        threading.Event().wait()
"""


def test_stopping_finishes_what_is_in_flight_and_refuses_what_comes_after() -> None:
    gated = Gated()
    server = ExpertsServer({"e": gated}).start()
    with WireClient(server.address) as client:
        stub = health_pb2_grpc.HealthStub(client.channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest(), timeout=START_S)
        assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
        first = Waiting(lambda: client.forward("e", tokens(1, D)))
        assert gated.started.acquire(timeout=START_S)
        stopping = threading.Thread(target=server.stop)
        stopping.start()
        assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
        assert server.state == "draining"
        gated.let_go()
        assert first.result().code == "OK"
        stopping.join(START_S)
        assert server.state == "stopped"
        with pytest.raises(grpc.RpcError) as refused:
            client.info()
        assert refused.value.code() == grpc.StatusCode.UNAVAILABLE


def test_what_outlasts_the_drain_timeout_is_cut_off() -> None:
    gated = Gated()
    server = ExpertsServer({"e": gated}, config=ServingConfig(drain_timeout_s=0.05)).start()
    with WireClient(server.address) as client:
        call = client.forward_call("e", tokens(1, D))
        failed: list[grpc.StatusCode] = []

        def send() -> None:
            try:
                client.stream("Forward", [call])
            except grpc.RpcError as error:
                failed.append(error.code())

        sender = threading.Thread(target=send)
        sender.start()
        assert gated.started.acquire(timeout=START_S)
        server.stop()
        sender.join(START_S)
        gated.let_go()
    assert len(failed) == 1


def test_threads_and_ports_of_a_stopped_server_are_free_again() -> None:
    before = set(threading.enumerate())  # other tests make servers that they never start
    for _ in range(2):
        with ExpertsServer({"e": FeedForwardExpert(D)}) as server, WireClient(server.address) as client:
            client.forward("e", tokens(1, D))
            address = server.address
        names = [thread.name for thread in set(threading.enumerate()) - before]
        assert not [name for name in names if name.startswith(("expert-", "experts-"))]
        with ExpertsServer({"e": FeedForwardExpert(D)}, listen=address):
            pass


@pytest.mark.parametrize("round_", range(3))
def test_under_sigterm_with_eight_clients_no_accepted_call_fails_and_no_update_is_lost(
    tmp_path: Path, round_: int
) -> None:
    arguments = (*FLAGS, "--checkpoint-dir", str(tmp_path))
    acknowledged = [0] * 8
    unexpected: list[str] = []
    with ServerProcess(*arguments) as server:
        warm = threading.Barrier(9)

        def work(number: int) -> None:
            with WireClient(server.address, client_id=bytes([number])) as client:
                try:
                    for turn in range(10_000):
                        if turn == 2:
                            warm.wait(START_S)
                        name = f"ffn.{number % 4}"
                        client.zero_grad(name)
                        for answer in (
                            client.forward(name, tokens(2, D)),
                            client.backward(name, tokens(2, D)),
                        ):
                            if answer.code != "OK":
                                unexpected.append(f"{answer.code}: {answer.text}")
                        client.step(name)
                        acknowledged[number] += 1
                except grpc.RpcError as error:
                    if error.code() != grpc.StatusCode.UNAVAILABLE:
                        unexpected.append(f"{error.code()}: {error.details()}")

        workers = [threading.Thread(target=work, args=(n,)) for n in range(8)]
        for worker in workers:
            worker.start()
        warm.wait(START_S)
        assert server.stop() == 0
        for worker in workers:
            worker.join(START_S)
    assert unexpected == []
    with ServerProcess(*arguments) as server, WireClient(server.address) as client:
        saved = client.num_updates()
    for index in range(4):
        at_least = acknowledged[index] + acknowledged[index + 4]
        assert at_least <= saved[f"ffn.{index}"] <= at_least + 2, (
            "a step whose answer was cut may have counted"
        )


@dataclass(frozen=True)
class Hanging:
    """A server process with an expert, called e, that hangs; the pipe it opens when it begins to."""

    server: ServerProcess
    client: WireClient
    pipe: Path

    def call(self) -> threading.Thread:
        """Call the expert on a thread; return when it hangs."""
        thread = threading.Thread(target=self._call_in_vain, daemon=True)
        thread.start()
        self.pipe.read_bytes()
        return thread

    def _call_in_vain(self) -> None:
        with pytest.raises(grpc.RpcError):
            self.client.forward("e", tokens(1, D))


@pytest.fixture
def hanging(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Hanging]:
    """The parameter is a line of the server's configuration."""
    config, pipe = tmp_path / "server.toml", tmp_path / "begun"
    os.mkfifo(pipe)
    (tmp_path / "hanging.py").write_text(HANGS.format(pipe=str(pipe)))
    expert = '[experts.e]\nclass = "hanging:Hangs"\nargs = { in_features = 8, out_features = 8 }\n'
    config.write_text(f'listen = "127.0.0.1:0"\n{request.param}\n{expert}')
    environment = {"PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    with (
        ServerProcess("--config", str(config), environment=environment) as server,
        WireClient(server.address) as client,
    ):
        yield Hanging(server, client, pipe)


@pytest.mark.parametrize("hanging", ["drain_timeout_s = 1000"], indirect=True)
def test_a_second_signal_exits_at_once(hanging: Hanging) -> None:
    stub = health_pb2_grpc.HealthStub(hanging.client.channel)
    watch = stub.Watch(health_pb2.HealthCheckRequest(), timeout=START_S)
    next(watch)
    call = hanging.call()
    hanging.server.signal(signal.SIGTERM)
    assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
    hanging.server.signal(signal.SIGTERM)
    assert hanging.server.wait() == 128 + signal.SIGTERM
    call.join(START_S)


@pytest.mark.parametrize("hanging", ["drain_timeout_s = 0.2"], indirect=True)
def test_a_hanging_expert_does_not_keep_a_drained_server_alive(hanging: Hanging) -> None:
    call = hanging.call()
    assert hanging.server.stop() == 0
    call.join(START_S)


def test_a_server_is_one_process_with_sixteen_experts_under_400_mb() -> None:
    with ServerProcess("--expert", "ffn", "--num-experts", "16", "--d-model", "64") as server:
        with WireClient(server.address) as client:
            for n in range(16):
                assert client.forward(f"ffn.{n}", tokens(4, 64)).code == "OK"
            process = psutil.Process(server.process.pid)
            assert process.children(recursive=True) == []
            assert process.memory_info().rss < 400 << 20
        assert server.stop() == 0


def test_a_killed_server_leaves_no_orphan_and_its_port_free() -> None:
    with ServerProcess(*FLAGS) as server:
        address, pid = server.address, server.process.pid
        server.kill()
    assert not psutil.pid_exists(pid)
    with ServerProcess(*FLAGS, "--listen", address) as server:
        assert server.address == address
