"""A server that is told to stop while a save waits, for an expert that hangs or a slow disk: it saves all the same."""

from __future__ import annotations

import contextlib
import copy
import functools
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from torch import nn

import experts_server.checkpoints.saving as saving_module
import experts_server.serving.server as server_module
from experts_server import ExpertsServer
from experts_server.checkpoints.checkpoint import CheckpointFolder
from experts_server.configuration.config import MemoryConfig, ServingConfig
from experts_server.hosting.calls import InspectCall
from moe_autograd.errors import ConfigError
from tests.support.gated import D, Gated, Waiting
from tests.support.held import Held
from tests.support.hosting import sgd
from tests.support.servers import START_S, WireClient, tokens, wait_until

ENDLESS_S = 1e6


@pytest.fixture
def hanging() -> Iterator[Gated]:
    hanging = Gated()
    yield hanging
    hanging.let_go()


def serve(
    folder: Path, hanging: Gated, *, drain_timeout_s: float, interval_s: float = ENDLESS_S
) -> ExpertsServer:
    config = ServingConfig(
        checkpoint_dir=folder, checkpoint_interval_s=interval_s, drain_timeout_s=drain_timeout_s
    )
    return ExpertsServer({"hanging": hanging, "well": nn.Linear(D, D)}, optimizer=sgd, config=config).start()


def train(client: WireClient) -> None:
    client.forward("well", tokens(2, D))
    client.backward("well", torch.ones(2, D))
    client.step("well")


def saved_updates(folder: Path) -> dict[str, int]:
    assert not list(folder.glob("writing-*"))
    with CheckpointFolder(folder) as opened:
        newest = opened.read_newest()
        assert newest is not None
        assert newest[0] == f"generation-{opened.generations()[-1]:08}", "the last one is whole"
    return {name: snapshot.plain["num_updates"] for name, snapshot in newest[1].items()}


def until_cut_off(call: Callable[[], object]) -> threading.Thread:
    """Call on a thread."""

    def run() -> None:
        with pytest.raises(grpc.RpcError):
            call()

    thread = threading.Thread(target=run)
    thread.start()
    return thread


@pytest.mark.parametrize("saves", ["by itself", "when asked"])
def test_a_save_that_waits_for_an_expert_that_hangs_is_left_to_the_last_one(
    tmp_path: Path,
    hanging: Gated,
    saves: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.setattr(saving_module, "SNAPSHOT_TIMEOUT_S", ENDLESS_S)
    monkeypatch.setattr(saving_module, "HANGING_TIMEOUT_S", 0.5)
    monkeypatch.setattr(server_module, "UPKEEP_S", 0.01)
    server = serve(
        tmp_path, hanging, drain_timeout_s=0.05, interval_s=0.01 if saves == "by itself" else ENDLESS_S
    )
    with WireClient(server.address) as client, WireClient(server.address, client_id=b"other") as other:
        threads = [until_cut_off(lambda: other.forward("hanging", tokens(1, D)))]
        assert hanging.started.acquire(timeout=START_S)
        if saves == "when asked":
            threads.append(until_cut_off(other.save))
        assert server._server is not None
        queue = server._server.registry["hanging"]
        wait_until(lambda: len(queue) == 1)  # the copy that is to be saved
        train(client)
        server.stop()
        for thread in threads:
            thread.join(START_S)
    assert saved_updates(tmp_path) == {"hanging": 0, "well": 1}
    assert "expected every expert to come to rest, got a stop while 'hanging' still computed" in caplog.text
    assert "expert 'hanging' still computes" in caplog.text


def test_a_save_that_is_left_to_the_last_one_names_nobody_who_is_at_rest(
    tmp_path: Path, hanging: Gated
) -> None:
    server = serve(tmp_path, hanging, drain_timeout_s=1.0)
    try:
        assert server._server is not None
        server._server.saver.leave_to_last()
        with WireClient(server.address) as client, pytest.raises(grpc.RpcError, match="stop before all had"):
            client.save()
    finally:
        server.stop()


def test_an_expert_that_hangs_for_nobody_holds_up_a_stop_no_longer_than_a_drain(
    tmp_path: Path, hanging: Gated, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its caller has given up, so that no call is in flight."""
    monkeypatch.setattr(saving_module, "SNAPSHOT_TIMEOUT_S", ENDLESS_S)
    monkeypatch.setattr(saving_module, "HANGING_TIMEOUT_S", 0.5)
    server = serve(tmp_path, hanging, drain_timeout_s=1.0)
    with WireClient(server.address) as client:
        train(client)
        with pytest.raises(grpc.RpcError):
            client.stream("Forward", [client.forward_call("hanging", tokens(1, D))], timeout_s=0.2)
        assert hanging.started.acquire(timeout=START_S)
        server.stop()
    assert saved_updates(tmp_path) == {"hanging": 0, "well": 1}
    assert "expert 'hanging' still computes" in caplog.text


def test_an_expert_that_comes_to_rest_before_the_drain_is_over_is_saved_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody waits for its call any more, which has the time of a drain all the same."""
    monkeypatch.setattr(saving_module, "HANGING_TIMEOUT_S", 0.0)
    slow = Held("backward", D)
    config = ServingConfig(checkpoint_dir=tmp_path, drain_timeout_s=ENDLESS_S)
    server = ExpertsServer({"slow": slow}, optimizer=sgd, update="on_backward", config=config).start()
    with WireClient(server.address) as client:
        client.forward("slow", tokens(2, D))
        with pytest.raises(grpc.RpcError):
            client.stream("Backward", [client.backward_call("slow", torch.ones(2, D))], timeout_s=1.0)
        assert slow.begun.wait(START_S)
        stopping = threading.Thread(target=server.stop)
        stopping.start()
        assert server._server is not None
        queue = server._server.registry["slow"]
        wait_until(lambda: len(queue) == 1)
        slow.may_go.set()
        stopping.join(START_S)
    assert saved_updates(tmp_path) == {"slow": 1}


def test_no_call_begins_when_an_expert_that_hung_returns_after_the_stop(
    tmp_path: Path, hanging: Gated, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its queue came again to a pool that was closed: "a turn raised", and who waited had no answer."""
    monkeypatch.setattr(saving_module, "HANGING_TIMEOUT_S", 0.1)
    server = serve(tmp_path, hanging, drain_timeout_s=0.05)
    assert server._server is not None
    queue, pool = server._server.registry["hanging"], server._server.pool
    answered, looked = threading.Event(), threading.Event()
    look = InspectCall(b"", lambda call, result: answered.set(), lambda hosted: looked.set())
    with WireClient(server.address) as client:
        caller = until_cut_off(lambda: client.forward("hanging", tokens(1, D)))
        assert hanging.started.acquire(timeout=START_S)
        queue.add(look)
        server.stop()
        caller.join(START_S)
    assert answered.is_set()
    assert len(queue) == 0
    hanging.let_go()
    wait_until(lambda: not pool.has_threads)
    assert not looked.is_set()
    assert hanging.rows == [1]
    assert "a turn raised" not in caplog.text


class Refusing(Gated):
    """Raises for what was joined, when it is let go."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        if len(x) > 1:
            raise ValueError("too many rows")
        return y


def test_joined_calls_that_raise_when_they_return_after_the_stop_are_not_made_one_by_one() -> None:
    expert = Refusing()
    config = ServingConfig(drain_timeout_s=0.05)
    server = ExpertsServer({"e": expert}, config=config).start()
    assert server._server is not None
    queue, pool = server._server.registry["e"], server._server.pool
    with contextlib.ExitStack() as clients:
        calls = [
            functools.partial(clients.enter_context(client).forward, "e", tokens(1, D))
            for client in [WireClient(server.address, client_id=bytes([number])) for number in range(3)]
        ]
        first = Waiting(calls[0])
        assert expert.started.acquire(timeout=START_S)
        callers = [until_cut_off(call) for call in calls[1:]]
        wait_until(lambda: len(queue) == 2)
        expert.let_go(1)
        assert first.result().code == "OK"
        assert expert.started.acquire(timeout=START_S)
        server.stop()
        for caller in callers:
            caller.join(START_S)
    expert.let_go()
    wait_until(lambda: not pool.has_threads)
    assert expert.rows == [1, 2]


def test_gradients_that_are_left_when_an_expert_returns_after_the_stop_are_let_go(
    caplog: pytest.LogCaptureFixture,
) -> None:
    slow = Held("backward", D)
    config = ServingConfig(drain_timeout_s=0.05, memory=MemoryConfig(split_backward=True))
    server = ExpertsServer({"slow": slow}, optimizer=sgd, config=config).start()
    assert server._server is not None
    pool = server._server.pool
    with WireClient(server.address) as client:
        client.forward("slow", tokens(2, D))
        caller = until_cut_off(lambda: client.backward("slow", torch.ones(2, D)))
        assert slow.begun.wait(START_S)
        server.stop()
        caller.join(START_S)
    slow.may_go.set()
    wait_until(lambda: not pool.has_threads)
    assert "a turn raised" not in caplog.text


class WaitingSGD(torch.optim.SGD):
    """An optimizer whose steps wait until they are let go."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, lr=0.1)
        self.has_begun, self.may_go = threading.Event(), threading.Event()

    def step(self, closure: Any = None) -> None:
        self.has_begun.set()
        assert self.may_go.wait(START_S)
        super().step()


def test_while_an_update_outlasts_a_stop_no_other_server_hosts_its_module() -> None:
    """It came while the second one served, and that did not know of it."""
    module, made = nn.Linear(D, D), list[WaitingSGD]()

    def make(parameters: Iterable[nn.Parameter]) -> WaitingSGD:
        made.append(WaitingSGD(parameters))
        return made[-1]

    config = ServingConfig(drain_timeout_s=0.05)
    server = ExpertsServer({"well": module}, optimizer=make, config=config).start()
    assert server._server is not None
    pool = server._server.pool
    with WireClient(server.address) as client:
        caller = until_cut_off(lambda: train(client))
        assert made[0].has_begun.wait(START_S)
        server.stop()
        caller.join(START_S)
    before = module.weight.clone()
    others = {
        "the same": server,
        "of the same module": ExpertsServer({"e": module}, optimizer=sgd),
        "of the same weights": ExpertsServer({"a": nn.Linear(D, D), "e": nn.Sequential(module)}),
    }
    for other in others.values():
        with pytest.raises(ConfigError, match=r"expected a module at rest, got one .* of expert 'well' of a"):
            other.start()
    with ExpertsServer({"copy": copy.deepcopy(module)}, optimizer=sgd):
        pass
    made[0].may_go.set()
    wait_until(lambda: not pool.has_threads)
    assert not torch.equal(module.weight, before)
    for other in others.values():
        with other:
            pass


def test_an_expert_that_is_not_trained_may_be_hosted_again_while_it_hangs(hanging: Gated) -> None:
    server = ExpertsServer({"e": hanging}, config=ServingConfig(drain_timeout_s=0.05)).start()
    with WireClient(server.address) as client:
        caller = until_cut_off(lambda: client.forward("e", tokens(1, D)))
        assert hanging.started.acquire(timeout=START_S)
        server.stop()
        caller.join(START_S)
    with ExpertsServer({"e": hanging}) as again, WireClient(again.address) as client:
        hanging.let_go()
        assert client.forward("e", tokens(1, D)).code == "OK"


def test_a_stop_when_a_save_is_due_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The last save is that one."""
    monkeypatch.setattr(server_module, "UPKEEP_S", ENDLESS_S)  # it looks again when it stops
    config = ServingConfig(checkpoint_dir=tmp_path, checkpoint_interval_s=0.001)
    with (
        ExpertsServer({"well": nn.Linear(D, D)}, optimizer=sgd, config=config) as server,
        WireClient(server.address) as client,
    ):
        train(client)
    assert saved_updates(tmp_path) == {"well": 1}
    assert [record.message for record in caplog.records if record.levelname == "ERROR"] == []


def test_a_stop_waits_for_a_save_that_a_slow_disk_takes_and_says_so(
    tmp_path: Path, hanging: Gated, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(saving_module, "SLOW_DISK_S", 0.1)
    monkeypatch.setattr(server_module, "UPKEEP_S", 0.01)
    server = serve(tmp_path, hanging, drain_timeout_s=0.05, interval_s=0.5)
    disk_is_asked, disk_answers, fsync = threading.Event(), threading.Event(), os.fsync

    def slow_fsync(descriptor: int) -> None:
        disk_is_asked.set()
        assert disk_answers.wait(START_S)
        fsync(descriptor)

    with monkeypatch.context() as slow, WireClient(server.address) as client:
        slow.setattr(os, "fsync", slow_fsync)
        saving = until_cut_off(client.save)
        assert disk_is_asked.wait(START_S)
        with WireClient(server.address, client_id=b"other") as other:
            train(other)
        stopping = threading.Thread(target=server.stop)
        stopping.start()
        assert server._server is not None
        saver = server._server.saver
        wait_until(lambda: saver._is_ending)
        num_lines = len(caplog.records)
        wait_until(lambda: len(caplog.records) > num_lines + 5, 20.0)
        disk_answers.set()
        stopping.join(START_S)
        saving.join(START_S)
    assert saved_updates(tmp_path) == {"hanging": 0, "well": 1}
    assert "ERROR" not in caplog.text
