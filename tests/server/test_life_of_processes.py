"""How a server's process ends: at a signal or two, beside experts that hang, killed; what it has done is saved."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import grpc
import psutil
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from torch import Tensor

from tests.support.servers import START_S, ServerProcess, WireClient, tokens

D = 8
FLAGS = ("--expert", "ffn", "--num-experts", "4", "--d-model", str(D), "--optimizer", "sgd", "--lr", "0.01")
HANGS = """
import threading, torch
class Hangs(torch.nn.Linear):
    def forward(self, x):
        open({pipe!r}, "w").close()
        threading.Event().wait()
"""


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_under_sigterm_with_eight_clients_no_accepted_call_fails_and_no_update_is_lost(
    tmp_path: Path, is_full_size: bool
) -> None:
    config = tmp_path / "server.toml"
    config.write_text(
        f"""
        listen = "127.0.0.1:0"
        checkpoint_dir = {json.dumps(str(tmp_path / "saved"))}
        optimizer = {{ name = "sgd", lr = 0.01 }}
        experts."ffn.[0:4]" = {{ class = "ffn", args = {{ d_model = {D} }} }}
        """
    )
    trainers = [Trainer(number) for number in range(8)]
    server = ServerProcess("--config", str(config))
    for _ in range(10 if is_full_size else 2):
        with server:
            warm = threading.Barrier(9)
            given = (server.address, warm)
            workers = [threading.Thread(target=t.train_until_stopped, args=given) for t in trainers]
            for worker in workers:
                worker.start()
            warm.wait(START_S)
            server.signal(signal.SIGTERM)
            for worker in workers:
                worker.join(START_S)
            assert server.wait() == 0
        assert [t.unexpected for t in trainers] == [[]] * 8
    with server, WireClient(server.address) as client:
        saved = client.num_updates()
        assert server.stop() == 0
    assert saved == {f"ffn.{n}": trainers[n].acknowledged + trainers[n + 4].acknowledged for n in range(4)}


class Trainer:
    """A client that trains one expert, on one server after the other, and counts the updates it knows of."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.sequence = 0
        self.acknowledged = 0
        self.unexpected: list[str] = []

    def train_until_stopped(self, address: str, warm: threading.Barrier) -> None:
        """Train; wait at the barrier after two updates."""
        name = f"ffn.{self.number % 4}"
        with WireClient(address, client_id=bytes([self.number])) as client:
            client.sequence = self.sequence
            try:
                for turn in itertools.count():
                    if turn == 2:
                        warm.wait(START_S)
                    client.zero_grad(name)
                    answers = client.forward(name, tokens(2, D)), client.backward(name, tokens(2, D))
                    self.unexpected += [f"{a.code}: {a.text}" for a in answers if a.code != "OK"]
                    client.step(name)
                    self.acknowledged += 1
            except grpc.RpcError as error:
                if error.code() != grpc.StatusCode.UNAVAILABLE:
                    self.unexpected.append(f"{error.code()}: {error.details()}")
            self.sequence = client.sequence


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
    with (
        ServerProcess("--config", str(config), path=tmp_path) as server,
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


def test_a_last_save_that_fails_is_said_and_the_exit_status_is_1(tmp_path: Path) -> None:
    with ServerProcess(*FLAGS, "--checkpoint-dir", str(tmp_path / "saved")) as server:
        shutil.rmtree(tmp_path / "saved")
        with WireClient(server.address) as client, pytest.raises(grpc.RpcError) as refused:
            client.save()
        assert (
            "expected the folder that was opened, got 'No such file or directory'" in refused.value.details()
        )
        assert server.stop() == 1
    log = "".join(server.log)
    assert "the last save failed: checkpoint_dir" in log
    assert ("stopped" in log, "Traceback" in log) == (True, False), log


def test_a_server_is_one_process_with_sixteen_experts_under_400_mb() -> None:
    with ServerProcess("--expert", "ffn", "--num-experts", "16", "--d-model", "64", is_warm=False) as server:
        with WireClient(server.address) as client:
            for n in range(16):
                assert client.forward(f"ffn.{n}", tokens(4, 64)).code == "OK"
            process = psutil.Process(server.process.pid)
            assert process.children(recursive=True) == []
            assert process.memory_info().rss < 400 << 20
        assert server.stop() == 0


def test_a_killed_server_leaves_no_orphan_and_its_port_free() -> None:
    with ServerProcess(*FLAGS, is_warm=False) as server:
        address, pid = server.address, server.process.pid
        server.kill()
    assert not psutil.pid_exists(pid)
    with ServerProcess(*FLAGS, "--listen", address) as server:
        assert server.address == address


class TellsInterval(torch.nn.Identity):
    """Returns the interpreter's switch interval."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.full_like(x, sys.getswitchinterval())


def test_a_worker_in_pure_python_lets_the_event_loop_run_after_a_millisecond() -> None:
    with (
        ServerProcess("--expert", f"{__name__}:TellsInterval") as server,
        WireClient(server.address) as client,
    ):
        (interval_s,) = client.forward("TellsInterval.0", torch.ones(1, 1)).tensors
        assert interval_s is not None
        assert interval_s.item() == pytest.approx(0.001)
