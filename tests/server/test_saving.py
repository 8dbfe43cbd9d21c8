"""When checkpoints are taken: every so often, between updates, and with all experts on the same side of a step."""

from __future__ import annotations

import asyncio
import logging
import tempfile
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch
from torch import nn

import experts_server.checkpoints.saving as saving_module
import experts_server.queues.executor as executor_module
import experts_server.serving.server as server_module
from experts_server import ExpertsServer
from experts_server.budget import Budget
from experts_server.checkpoints.checkpoint import CheckpointFolder
from experts_server.checkpoints.saving import Saver
from experts_server.checkpoints.snapshot import Snapshot
from experts_server.configuration.config import LimitsConfig, ServingConfig
from experts_server.hosting.kept import KeptForward, KeptForwards
from experts_server.queues.batching import QueueLimits
from experts_server.queues.registry import Registry
from tests.support.gated import Gated, Waiting
from tests.support.hosting import sgd
from tests.support.scarce import no_thread_to_give
from tests.support.servers import START_S, WireClient, tokens

D = 8


class Clock:
    """Stands still until it is told."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def wait_for(condition: Callable[[], bool]) -> None:
    pause = threading.Event()
    for _ in range(int(START_S / 0.01)):
        if condition():
            return
        pause.wait(0.01)
    raise AssertionError("it did not come about")


# ---- every so often


def saver_of(folder: Path, clock: Clock) -> Saver:
    pool: Any = None  # there are no experts that could need one
    config = ServingConfig(checkpoint_dir=folder, checkpoint_interval_s=60, keep_checkpoints=10)
    limits = QueueLimits(Budget(0, ""), Budget(0, ""))
    saver = Saver(Registry([], pool, limits), config, clock=clock)
    saver.open()
    return saver


def num_generations(folder: Path) -> int:
    return len(list(folder.glob("generation-*")))


def test_it_is_saved_whenever_the_interval_has_passed_and_not_before(tmp_path: Path) -> None:
    clock = Clock()

    async def run() -> list[int]:
        saver, counts = saver_of(tmp_path, clock), []
        for seconds in (0, 59, 1, 59, 2, 600):
            clock.now += seconds
            await saver.save_when_due()
            counts.append(num_generations(tmp_path))
        saver.close()
        return counts

    assert asyncio.run(run()) == [1, 1, 2, 2, 3, 4], "the first is of the start"


def test_a_timed_save_that_fails_is_logged_and_tried_again_after_the_next_interval(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()

    async def run() -> list[tuple[int, float]]:
        saver, found = saver_of(tmp_path, clock), []
        away = tmp_path.with_name("away")
        tmp_path.rename(away)
        for seconds in (60, 59, 1):
            clock.now += seconds
            await saver.save_when_due()
            if away.exists():
                away.rename(tmp_path)
            found.append((num_generations(tmp_path), saver.age_s))
        saver.close()
        return found

    with caplog.at_level(logging.ERROR):
        assert asyncio.run(run()) == [(1, 60), (1, 119), (2, 0)], "metrics tell how old the last save is"
    assert "expected the folder that was opened" in caplog.text


def test_a_server_saves_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "UPKEEP_S", 0.01)
    config = ServingConfig(checkpoint_dir=tmp_path, checkpoint_interval_s=0.05)
    with ExpertsServer({"e": nn.Linear(D, D)}, config=config):
        wait_for(lambda: len(list(tmp_path.glob("generation-*/manifest.json"))) >= 2)


def test_upkeep_that_fails_is_logged_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Otherwise it would be a server that never saves again, and not at its end either."""
    failures = iter([RuntimeError("a bug"), RuntimeError("a bug")])
    save_when_due = Saver.save_when_due

    async def failing_at_first(saver: Saver) -> None:
        for failure in failures:
            raise failure
        await save_when_due(saver)

    monkeypatch.setattr(server_module, "UPKEEP_S", 0.01)
    monkeypatch.setattr(Saver, "save_when_due", failing_at_first)
    config = ServingConfig(checkpoint_dir=tmp_path, checkpoint_interval_s=0.05)
    with caplog.at_level(logging.ERROR), ExpertsServer({"e": nn.Linear(D, D)}, config=config):
        wait_for(lambda: len(list(tmp_path.glob("generation-*/manifest.json"))) >= 3)
    assert caplog.text.count("RuntimeError: a bug") == 2


# ---- between updates


class HalfDone(torch.optim.SGD):
    """Stops in the middle of a step until it is let go."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.half, self.may_go = threading.Event(), threading.Event()
        super().__init__(parameters, lr=1.0)

    def step(self, closure: Any = None) -> None:
        first, *rest = self.param_groups[0]["params"]
        with torch.no_grad():
            first -= first.grad
            self.half.set()
            assert self.may_go.wait(START_S)
            for parameter in rest:
                parameter -= parameter.grad


def test_a_save_that_comes_in_the_middle_of_an_update_holds_the_whole_update(tmp_path: Path) -> None:
    made: list[HalfDone] = []

    def optimizer(parameters: Iterable[nn.Parameter]) -> HalfDone:
        made.append(HalfDone(parameters))
        return made[0]

    module = nn.Linear(D, D)
    before = {key: value.clone() for key, value in module.state_dict().items()}
    config = ServingConfig(checkpoint_dir=tmp_path)
    with (
        ExpertsServer({"e": module}, optimizer=optimizer, config=config) as server,
        WireClient(server.address) as client,
        WireClient(server.address) as operator,
    ):
        client.forward("e", tokens(2, D))
        client.backward("e", torch.ones(2, D))
        stepping = Waiting(client.step)
        assert made[0].half.wait(START_S)
        saving = Waiting(operator.save)
        wait_for(lambda: _num_waiting(server, "e") == 1)
        made[0].may_go.set()
        assert stepping.result().updates[0].num_updates == 1
        snapshot = generation_in(tmp_path, saving.result())["e"]
        assert snapshot.plain["num_updates"] == 1
        for key, weight in before.items():
            torch.testing.assert_close(snapshot.tensors[f"weights.{key}"], module.state_dict()[key])
            assert not torch.equal(weight, module.state_dict()[key])


def generation_in(folder: Path, name: str) -> dict[str, Snapshot]:
    """Read a generation of a folder that a server still holds, through a folder of links."""
    beside = folder.parent / f"{folder.name}-read"
    beside.mkdir()
    (beside / name).symlink_to(folder / name)
    with CheckpointFolder(beside) as opened:
        newest = opened.read_newest()
    assert newest is not None
    return newest[1]


def _num_waiting(server: ExpertsServer, name: str) -> int:
    assert server._server is not None
    return len(server._server.registry[name])


@pytest.mark.parametrize("first", ["step", "save"])
def test_all_experts_of_a_checkpoint_are_on_the_same_side_of_a_step(tmp_path: Path, first: str) -> None:
    """One expert is busy, so that its part of the step comes late; the other's does not wait for it."""
    busy, idle = Gated(), nn.Linear(D, D)
    busy.let_go(1)
    config = ServingConfig(checkpoint_dir=tmp_path)

    with (
        ExpertsServer({"busy": busy, "idle": idle}, optimizer=sgd, config=config) as server,
        WireClient(server.address) as client,
        WireClient(server.address, client_id=b"other") as other,
    ):
        for name in ("busy", "idle"):
            client.forward(name, tokens(2, D))
            client.backward(name, torch.ones(2, D))
        blocking = Waiting(lambda: other.forward("busy", tokens(1, D)))
        assert busy.started.acquire(timeout=START_S)  # the first forward's
        assert busy.started.acquire(timeout=START_S)
        if first == "step":
            stepping = Waiting(client.step)
            wait_for(lambda: server.num_updates["idle"] == 1)
            saving = Waiting(other.save)
            wait_for(lambda: _num_waiting(server, "busy") == 2)
        else:
            saving = Waiting(other.save)
            wait_for(lambda: _num_waiting(server, "busy") == 1)
            stepping = Waiting(client.step)
            wait_for(lambda: server.num_updates["idle"] == 1)
        busy.let_go()
        assert blocking.result().code == "OK"
        assert [update.num_updates for update in stepping.result().updates] == [1, 1]
        saved = {name: s.plain["num_updates"] for name, s in generation_in(tmp_path, saving.result()).items()}
    expected = 1 if first == "step" else 0
    assert saved == {"busy": expected, "idle": expected}


@pytest.mark.parametrize("first", ["load", "save"])
def test_all_experts_of_a_checkpoint_are_on_the_same_side_of_a_load(tmp_path: Path, first: str) -> None:
    """The first expert is busy, so that it is set late; the other one is not."""
    busy, idle = Gated(), nn.Linear(D, D)
    biases = {"busy": "weights.linear.bias", "idle": "weights.bias"}
    with (
        ExpertsServer({"busy": busy, "idle": idle}, config=ServingConfig(checkpoint_dir=tmp_path)) as server,
        WireClient(server.address) as client,
        WireClient(server.address, client_id=b"other") as other,
    ):
        states = {
            name: {key: torch.full_like(value, 7.0) for key, value in state.items()}
            for name, state in client.get_state("busy", "idle").items()
        }
        blocking = Waiting(lambda: other.forward("busy", tokens(1, D)))
        assert busy.started.acquire(timeout=START_S)
        calls = {"load": lambda: client.set_state(states), "save": other.save}
        running = {first: Waiting(calls.pop(first))}
        wait_for(lambda: _num_waiting(server, "busy") == 1)
        running |= {name: Waiting(call) for name, call in calls.items()}
        wait_for(lambda: _num_waiting(server, "busy") == 2)
        busy.let_go()
        assert blocking.result().code == "OK"
        assert not any(update.HasField("status") for update in running["load"].result().updates)
        saved = generation_in(tmp_path, running["save"].result())
    assert set(busy.linear.bias.tolist() + idle.bias.tolist()) == {7.0}
    were_set = {name: bool((saved[name].tensors[key] == 7.0).all()) for name, key in biases.items()}
    assert were_set == dict.fromkeys(biases, first == "load")


@pytest.mark.parametrize("when", ["by itself", "at the end"])
def test_an_expert_that_hangs_keeps_no_other_from_being_saved(
    tmp_path: Path, when: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It goes on with what was saved of it before, be it at the start of the first server."""
    monkeypatch.setattr(saving_module, "HANGING_TIMEOUT_S", 3.0)
    monkeypatch.setattr(server_module, "UPKEEP_S", 0.01)
    interval_s = 1000.0 if when == "at the end" else 0.1
    hanging, well = Gated(), nn.Linear(D, D)
    config = ServingConfig(
        checkpoint_dir=tmp_path, checkpoint_interval_s=interval_s, drain_timeout_s=0.05, keep_checkpoints=5
    )

    server = ExpertsServer({"hanging": hanging, "well": well}, optimizer=sgd, config=config).start()
    with WireClient(server.address) as client, WireClient(server.address, client_id=b"other") as other:
        if when == "by itself":
            monkeypatch.setattr(saving_module, "SNAPSHOT_TIMEOUT_S", 0.5)
        calling = threading.Thread(target=_until_cut_off, args=(other,))
        calling.start()
        assert hanging.started.acquire(timeout=START_S)
        client.forward("well", tokens(2, D))
        client.backward("well", torch.ones(2, D))
        client.step("well")
        if when == "by itself":
            with pytest.raises(grpc.RpcError, match="got 'hanging' still computing"):
                client.save()  # who asks for all of it is not given less
            wait_for(lambda: _saved_updates(tmp_path) == {"hanging": 0, "well": 1})
        server.stop()
        calling.join(START_S)
    hanging.let_go()
    assert _saved_updates(tmp_path) == {"hanging": 0, "well": 1}
    assert "expert 'hanging' still computes" in caplog.text


class OnASlowDisk(nn.Linear):
    """Its state takes a while, and one reads at a time."""

    disk = threading.Lock()
    takes_s = 0.0

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        with self.disk:
            threading.Event().wait(self.takes_s)
        return super().state_dict(*args, **kwargs)


def test_a_save_may_take_long_as_long_as_it_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sixty seconds were those of all experts together: a large server could never be saved."""
    experts = {f"e.{n}": OnASlowDisk(D, D) for n in range(8)}
    with (
        ExpertsServer(experts, config=ServingConfig(checkpoint_dir=tmp_path)) as server,
        WireClient(server.address) as client,
    ):
        monkeypatch.setattr(OnASlowDisk, "takes_s", 0.5)
        monkeypatch.setattr(saving_module, "SNAPSHOT_TIMEOUT_S", 2.5)
        assert client.save() == "generation-00000002"
        monkeypatch.setattr(OnASlowDisk, "takes_s", 0.0)  # the last save comes


def _until_cut_off(client: WireClient) -> None:
    with pytest.raises(grpc.RpcError):
        client.forward("hanging", tokens(1, D))


def _saved_updates(folder: Path) -> dict[str, int]:
    beside = Path(tempfile.mkdtemp(dir=folder.parent))
    for generation in folder.glob("generation-*"):
        (beside / generation.name).symlink_to(generation)
    with CheckpointFolder(beside) as opened:
        newest = opened.read_newest()
    assert newest is not None
    return {name: snapshot.plain["num_updates"] for name, snapshot in newest[1].items()}


def test_a_server_is_saved_at_its_end_though_the_system_has_no_thread_to_give(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(executor_module, "IDLE_S", 0.01)
    server = ExpertsServer(
        {"e": nn.Linear(D, D)}, optimizer=sgd, config=ServingConfig(checkpoint_dir=tmp_path)
    ).start()
    with WireClient(server.address) as client:
        client.forward("e", tokens(2, D))
        client.backward("e", torch.ones(2, D))
        client.step("e")
    assert server._server is not None
    pool = server._server.pool
    wait_for(lambda: len(pool._workers) == 1)
    with no_thread_to_give():
        server.stop()
    assert _saved_updates(tmp_path) == {"e": 1}


# ---- forwards that wait


def test_forwards_go_when_their_time_is_over_oldest_first() -> None:
    clock = Clock()
    kept = KeptForwards(1 << 20, max_age_s=300, clock=clock)
    for number in range(3):
        kept.put(("e", b"", number), KeptForward((torch.zeros(1),), None, None, False, 0))
        clock.now += 100
    kept.let_go_expired()
    assert len(kept) == 3, "the oldest is 300 s old, and no older"
    clock.now += 1
    kept.let_go_expired()
    assert [kept.get(("e", b"", n)) is None for n in range(3)] == [True, False, False]
    clock.now += 1000
    kept.let_go_expired()
    assert (len(kept), kept.num_let_go) == (0, 3)


def test_a_backward_that_comes_too_late_for_its_graph_is_computed_from_inputs_that_come_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server_module, "UPKEEP_S", 0.01)
    module = nn.Linear(D, D)
    config = ServingConfig(limits=LimitsConfig(kept_forward_s=0.01))
    with ExpertsServer({"e": module}, config=config) as server, WireClient(server.address) as client:
        client.forward("e", tokens(2, D))
        assert server._server is not None
        kept = server._server.memory.kept
        wait_for(lambda: len(kept) == 0 and kept.num_let_go == 1)
        assert kept.num_bytes == 0
        late = client.backward("e", torch.ones(2, D))
        assert (late.code, late.tensors) == ("INPUTS_NEEDED", ())
        again = client.backward("e", torch.ones(2, D), inputs=[tokens(2, D)])
        torch.testing.assert_close(again.tensors[0], torch.ones(2, D) @ module.weight.detach())
