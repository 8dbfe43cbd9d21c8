"""Starting, ready, draining, stopped: what was accepted is finished, what was done is saved, nothing stays behind."""

from __future__ import annotations

import asyncio
import copy
import itertools
import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import psutil
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc
from torch import nn

from experts_server import ExpertsServer
from experts_server.configuration.config import ServingConfig
from moe_autograd.errors import ConfigError
from moe_autograd.moe.experts import FeedForwardExpert
from tests.support.gated import Gated, Waiting
from tests.support.servers import ROOT, START_S, ServerProcess, WireClient, tokens, wait_until

D = 8
FLAGS = ("--expert", "ffn", "--num-experts", "4", "--d-model", str(D), "--optimizer", "sgd", "--lr", "0.01")
HANGS = """
import threading, torch
class Hangs(torch.nn.Linear):
    def forward(self, x):
        open({pipe!r}, "w").close()
        threading.Event().wait()
"""


@pytest.mark.parametrize(
    ("experts", "optimizer", "text"),
    [
        ([nn.Linear(D, D)], None, "expected modules by name, got list"),
        ({0: nn.Linear(D, D)}, None, "expected names that are texts, got 0"),
        ({"e": 3}, None, "expert 'e': expected an nn.Module, got int"),
        (
            {"e": nn.Linear(D, D)},
            "adam",
            "expected optimizer to make one from an expert's parameters, got str",
        ),
        (
            {"e": nn.Linear(D, D)},
            lambda _: 3,
            "expert 'e': expected optimizer to return a torch.optim.Optimizer, got int",
        ),
        ({"e": nn.Linear}, None, "expert 'e': expected an nn.Module, got type.*of a class, pass an instance"),
    ],
)
def test_what_cannot_be_hosted_is_refused_before_it_starts(experts: Any, optimizer: Any, text: str) -> None:
    with pytest.raises(TypeError, match=f"ExpertsServer.*{text}"):
        ExpertsServer(experts, optimizer=optimizer)


@pytest.mark.parametrize(
    ("optimizer", "text"),
    [
        (torch.optim.LBFGS, "got LBFGS, which wants a closure that computes the loss again"),
        (torch.optim.SparseAdam, "got SparseAdam, which wants sparse gradients"),
        (
            lambda parameters: torch.optim.SGD(parameters, lr=0.1, differentiable=True),
            "got SGD, with 'differentiable', which is for steps that autograd goes through",
        ),
        (
            lambda parameters: torch.optim.Adam([{"params": list(parameters), "capturable": True}]),
            "got Adam, with 'capturable', which wants weights on a GPU",
        ),
    ],
)
def test_an_optimizer_whose_steps_would_all_fail_is_refused_before_it_starts(
    optimizer: Any, text: str
) -> None:
    with pytest.raises(
        ConfigError, match=f"expert 'e': expected an optimizer that a server can step, {text}"
    ):
        ExpertsServer({"e": nn.Linear(D, D)}, optimizer=optimizer)


@pytest.mark.parametrize("take", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_server_is_neither_copied_nor_pickled(take: Any) -> None:
    with ExpertsServer({"e": nn.Linear(D, D)}) as server:
        with pytest.raises(
            TypeError, match=r"<ExpertsServer ready 1 expert>: expected to stay in its process"
        ):
            take(server)
        with WireClient(server.address) as client:
            assert client.forward("e", tokens(3, D)).code == "OK"


FORKED_BESIDE_A_SERVER = """
import os, sys
from torch import nn
from experts_server import ExpertsServer
from moe_autograd.remote import connect

try:
    with ExpertsServer({"e": nn.Linear(4, 4)}) as server:
        child = os.fork()
        if child == 0:
            try:
                ExpertsServer({"e": nn.Linear(4, 4)}).start()
            except RuntimeError as error:
                assert f"got the fork of {os.getppid()}, where one runs" in str(error), error
                print("refused", flush=True)
            sys.exit(3)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
        with connect(server.address) as experts:
            print(*experts, flush=True)
finally:
    print("left", flush=True)
"""


def test_a_forked_child_leaves_a_server_alone_and_starts_none() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", FORKED_BESIDE_A_SERVER],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=START_S,
        check=False,
    )
    assert (ended.returncode, ended.stdout.split()) == (0, ["refused", "left", "3", "e", "left"]), (
        ended.stderr
    )


def test_weights_that_two_experts_use_are_refused_if_one_of_them_trains_them() -> None:
    """Their calls run side by side: a step of one would change the weights under the other's forward."""
    shared = nn.Linear(D, D)
    experts = {"a": shared, "b": nn.Sequential(shared, nn.ReLU())}
    with (
        pytest.raises(
            ConfigError, match=r"expert 'b': expected weights that no other expert uses, got '0\.weight'"
        ),
        ExpertsServer(experts, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1)),
    ):
        pass
    with ExpertsServer(experts) as server, WireClient(server.address) as client:
        assert len(client.info().experts) == 2


def test_a_server_is_started_once_at_a_time_and_may_be_started_again() -> None:
    server = ExpertsServer({"e": nn.Linear(D, D)})
    with pytest.raises(RuntimeError, match="expected a started server"):
        server.num_updates
    with server, pytest.raises(RuntimeError, match=f"expected one start, got a second at {server.address}"):
        server.start()
    with server, WireClient(server.address) as client:
        assert client.forward("e", tokens(3, D)).code == "OK"
    assert repr(server) == "<ExpertsServer stopped 1 expert>"


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


def test_a_server_is_started_and_stopped_inside_a_running_event_loop_as_in_a_notebook() -> None:
    async def cell() -> str:
        with ExpertsServer({"e": FeedForwardExpert(8)}) as server, WireClient(server.address) as client:
            return client.forward("e", tokens(2, 8)).code

    assert asyncio.run(cell()) == "OK"


def test_a_server_that_is_refused_leaves_no_threads_and_no_lock(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    offload = {"max_resident_bytes": 1 << 20, "store": tmp_path}
    config = {"memory": {"recompute": True, "offload": True}, "offload": offload}
    refused = ExpertsServer({"e": nn.LazyLinear(D)}, config=config)
    with pytest.raises(
        ConfigError, match=r"^expert 'e': expected weights with values, got 'weight' without a shape"
    ):
        refused.start()  # what it raised stays, as it does in a notebook
    wait_until(lambda: not has_threads_since(before))
    with ExpertsServer({"e": FeedForwardExpert(D)}, config=config):
        pass


def together(do: Callable[[], object], num_threads: int = 4) -> list[object]:
    """Do it in several threads at once; return what came of each, or what it raised."""
    ready = threading.Barrier(num_threads)

    def one(_: int) -> object:
        ready.wait(START_S)
        try:
            return do()
        except Exception as error:
            return error

    with ThreadPoolExecutor(num_threads) as threads:
        return list(threads.map(one, range(num_threads)))


def test_of_threads_that_start_a_server_one_does_and_all_may_stop_it() -> None:
    """Others left a server behind that nobody could stop, or raised what was no concern of theirs."""
    before = set(threading.enumerate())
    for _ in range(3):
        server = ExpertsServer({"e": nn.Linear(4, 4)})
        came = together(server.start)
        assert came.count(server) == 1
        assert ["expected one start, got a second" in str(other) for other in came].count(True) == 3
        assert together(server.stop) == [None] * 4
        assert server.state == "stopped"
        wait_until(lambda: not has_threads_since(before))


def has_threads_since(before: set[threading.Thread]) -> bool:
    names = [thread.name for thread in set(threading.enumerate()) - before]
    return any(name.startswith(("expert-", "experts-")) for name in names)


def test_threads_and_ports_of_a_stopped_server_are_free_again() -> None:
    before = set(threading.enumerate())  # other tests make servers that they never start
    for _ in range(2):
        with ExpertsServer({"e": FeedForwardExpert(D)}) as server, WireClient(server.address) as client:
            client.forward("e", tokens(1, D))
            address = server.address
        wait_until(lambda: not has_threads_since(before))  # one was told to end, and may be about to
        with ExpertsServer({"e": FeedForwardExpert(D)}, listen=address):
            pass


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
