"""Checkpoints of offloaded experts that are asked for while another is made, or one is restored."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from moe_autograd.autograd.offload import OffloadedExperts, checkpoints, shared
from tests.support.offload_checkpoints import adam, build

PATIENCE_S = 60
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
