"""Checkpoints of offloaded experts that are asked for while another is made, or one is restored."""

from __future__ import annotations

import copy
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import nn

from moe_autograd.autograd.offload import OffloadedExperts, checkpoints, shared
from tests.support.offload_checkpoints import adam, build

PATIENCE_S = 60
WITHIN_A_STEP = r"expected checkpoint\(\) between updates, got one within its optimizer's step"
REFUSED = r"expected checkpoint\(\) and restore\(\) one after the other, got one in the midst of another"


@pytest.mark.parametrize("what", ["checkpoint", "restore"])
def test_one_in_the_midst_of_another_as_of_a_handler_is_refused_and_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    """No checkpoint at all was left: each had removed the other's."""
    rename, told = os.rename, []

    def rename_and_interrupt(source: Path, target: Path) -> None:
        rename(source, target)
        with pytest.raises(RuntimeError, match=REFUSED) as raised:
            getattr(experts, what)()
        told.append(str(raised.value))

    with build(tmp_path) as experts:
        experts.checkpoint("before")
        with monkeypatch.context() as patch:
            patch.setattr(checkpoints.os, "rename", rename_and_interrupt)
            path = experts.checkpoint("new")
        assert len(told) == 1
        assert list(tmp_path.glob("checkpoint-*")) == [path]
        assert experts.restore() == "new"
        assert experts.checkpoint().name == "checkpoint-00000002"


def test_layers_beside_each_other_that_save_at_once_save_one_after_the_other(tmp_path: Path) -> None:
    """Each had removed what the other was about to make."""
    first = build(tmp_path)
    second = OffloadedExperts([nn.Linear(8, 8)], adam, beside=first)
    together = threading.Barrier(2, timeout=PATIENCE_S)

    def save(experts: OffloadedExperts) -> list[str]:
        together.wait()
        return [experts.checkpoint().name for _ in range(4)]

    with first, ThreadPoolExecutor(2) as pool:
        names = [name for of_one in pool.map(save, (first, second)) for name in of_one]
        assert sorted(names) == [f"checkpoint-{number:08}" for number in range(8)]
        assert [path.name for path in tmp_path.glob("checkpoint-*")] == [max(names)]
        first.restore()


def _in_a_step(experts: OffloadedExperts, what: Callable[[], object]) -> None:
    experts.optimizers[0].register_step_pre_hook(lambda *_: what() and None)


def _in_a_backward(experts: OffloadedExperts, what: Callable[[], object]) -> None:
    experts[0].apply(lambda module: module.register_full_backward_hook(lambda *_: what() and None) and None)


def _in_a_forward(experts: OffloadedExperts, what: Callable[[], object]) -> None:
    experts[0].apply(lambda module: module.register_forward_hook(lambda *_: what() and None) and None)


@pytest.mark.parametrize("update", ["on_step", "on_backward"])
@pytest.mark.parametrize(
    ("register", "saves"), [(_in_a_step, False), (_in_a_backward, True), (_in_a_forward, True)]
)
def test_restore_within_a_call_or_an_update_is_refused_and_checkpoint_in_an_update_alone(
    tmp_path: Path,
    register: Callable[[OffloadedExperts, Callable[[], object]], None],
    saves: bool,
    update: Literal["on_step", "on_backward"],
) -> None:
    """It waited for ever for who waited for it, or raised an `AssertionError` once all had been restored."""
    told: list[str] = []
    with OffloadedExperts(
        [nn.Linear(8, 8)], adam, max_resident_bytes=10_000, store=tmp_path, update=update
    ) as experts:
        experts.checkpoint("before")

        def save_and_restore() -> None:
            with nullcontext() if saves else pytest.raises(RuntimeError, match=WITHIN_A_STEP):
                experts.checkpoint("within")
            with pytest.raises(
                RuntimeError, match=r"expected restore\(\) between calls, got one within"
            ) as raised:
                experts.restore()
            told.append(str(raised.value))

        register(experts, save_and_restore)
        experts[0](torch.randn(2, 8, requires_grad=True)).sum().backward()
        if update == "on_step":
            experts.step()
        assert told
        assert experts.restore() == ("within" if saves else "before")


@pytest.mark.parametrize("limit", [1500, 100_000])
@pytest.mark.parametrize("update", ["on_step", "on_backward"])
def test_a_checkpoint_after_a_step_is_refused_in_its_hook_and_training_goes_on_as_without(
    tmp_path: Path, limit: int, update: Literal["on_step", "on_backward"]
) -> None:
    """It had new weights and the optimizer's state of before; in a first step, that state was lost for good."""
    want = [nn.Linear(8, 8) for _ in range(2)]
    modules, optimizers = copy.deepcopy(want), [adam(module.parameters()) for module in want]
    told: list[str] = []
    with OffloadedExperts(modules, adam, max_resident_bytes=limit, store=tmp_path, update=update) as experts:

        def save(*_: object) -> None:
            with pytest.raises(RuntimeError, match=WITHIN_A_STEP) as raised:
                experts.checkpoint()
            told.append(str(raised.value).partition(":")[0])

        for optimizer in experts.optimizers:
            optimizer.register_step_post_hook(save)
        for _ in range(3):
            x = torch.randn(4, 8)
            for model in (experts, want):
                sum(module(x) for module in model).square().sum().backward()
            experts.step()
            experts.zero_grad()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        assert sorted(told) == ["expert-00000"] * 3 + ["expert-00001"] * 3
        for index, module in enumerate(want):
            torch.testing.assert_close(experts.state_dict(index), {**module.state_dict()}, rtol=0, atol=0)
        experts.checkpoint("after")
        assert experts.restore() == "after"


def test_a_step_that_saves_while_another_thread_restores_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The step waited for the other thread, which waited for the expert that was held for the step."""
    link, is_restoring, may_go_on = shared.link_files, threading.Event(), threading.Event()

    def link_when_told(*args: Any) -> None:
        is_restoring.set()
        assert may_go_on.wait(PATIENCE_S)
        link(*args)

    with (
        OffloadedExperts(
            [nn.Linear(8, 8)], adam, max_resident_bytes=10_000, store=tmp_path, update="on_backward"
        ) as experts,
        ThreadPoolExecutor(1) as pool,
    ):
        experts.checkpoint()
        monkeypatch.setattr(shared, "link_files", link_when_told)

        def save() -> None:
            assert is_restoring.wait(PATIENCE_S)
            try:
                experts.checkpoint()
            finally:
                may_go_on.set()

        _in_a_step(experts, save)
        y = experts[0](torch.randn(2, 8)).sum()
        restoring = pool.submit(experts.restore)
        with pytest.raises(RuntimeError, match=REFUSED):
            y.backward()
        restoring.result(PATIENCE_S)


class Saving(nn.Linear):
    """Has another thread save, and tries to itself, while its weights are held."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.tries()
        return super().forward(x)

    def tries(self) -> None:
        pass


def test_who_holds_an_expert_does_not_wait_for_a_thread_that_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expert, saves, may_go_on = Saving(8, 8), threading.Event(), threading.Event()
    rename = os.rename

    def rename_when_told(source: Path, target: Path) -> None:
        saves.set()
        assert may_go_on.wait(PATIENCE_S)
        rename(source, target)

    def tries() -> None:
        saving.append(pool.submit(experts.checkpoint))
        assert saves.wait(PATIENCE_S)
        with pytest.raises(RuntimeError, match="or of an expert's call while another thread is in one"):
            experts.checkpoint()
        may_go_on.set()

    monkeypatch.setattr(checkpoints.os, "rename", rename_when_told)
    monkeypatch.setattr(expert, "tries", tries)
    saving: list[Any] = []
    with (
        ThreadPoolExecutor(1) as pool,
        OffloadedExperts([expert], adam, max_resident_bytes=2000, store=tmp_path) as experts,
    ):
        experts[0](torch.ones(1, 8))
        assert saving[0].result(PATIENCE_S).name == "checkpoint-00000000"


def test_who_has_waited_while_the_experts_were_closed_restores_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their folder may be another's by then."""
    experts, waits = build(tmp_path), threading.Event()
    experts.checkpoint()
    rename, wait = os.rename, shared.wait

    def wait_noticed(acquire: Callable[[float], bool]) -> bool:
        waits.set()
        return wait(acquire)

    def rename_and_close(source: Path, target: Path) -> None:
        monkeypatch.setattr(shared, "wait", wait_noticed)
        restoring.append(pool.submit(experts.restore))
        assert waits.wait(PATIENCE_S)
        rename(source, target)
        experts.close()

    restoring: list[Future[object]] = []
    with ThreadPoolExecutor(1) as pool:
        monkeypatch.setattr(checkpoints.os, "rename", rename_and_close)
        experts.checkpoint()
        with pytest.raises(RuntimeError, match="closed"):
            restoring[0].result(PATIENCE_S)
    assert not list((tmp_path / "resident-store").glob("*.linked"))
