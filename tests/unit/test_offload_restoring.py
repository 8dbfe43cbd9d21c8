"""What else may go on while offloaded experts are restored, and what a `restore` that fails leaves behind."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_autograd.autograd.offload import OffloadedExperts
from moe_autograd.autograd.offload.residency import Residency
from tests.support.offload_checkpoints import assert_equal, build, states, train
from tests.support.stores import WatchedStore, part_of, put_all_out

PATIENCE_S = 60


@pytest.mark.parametrize("wants", ["wish", "hold"])
def test_a_part_that_others_want_while_it_is_adopted_has_the_bytes_that_come(wants: str) -> None:
    """Who took it in between found nothing stored, and had what was in the buffer."""
    store = WatchedStore()
    residency = Residency(300, store, torch.device("cpu"))
    part, begun = part_of(residency, "a"), threading.Event()
    put_all_out(residency)
    large = part_of(residency, "large")  # whose buffer it would get
    residency.forget(large)
    seen: list[int] = []

    def want() -> None:
        begun.set()
        if wants == "wish":
            residency.prefetch([part])
        with residency.hold([part]):
            assert part.buffer is not None
            seen.append(int(part.buffer[0]))

    with ThreadPoolExecutor(1) as pool:

        def place(name: str) -> None:
            wanting.append(pool.submit(want))
            assert begun.wait(PATIENCE_S)
            assert not part.is_busy
            store.write(name, part.layout, torch.full((100,), 77, dtype=torch.uint8))

        wanting: list[Any] = []
        residency.adopt(part, place)
        wanting[0].result(PATIENCE_S)
    assert seen == [77]
    residency.close()


def test_a_part_that_another_thread_holds_is_adopted_when_that_lets_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its buffer had been taken away, which the other then read from."""
    residency = Residency(300, WatchedStore(), torch.device("cpu"))
    part, held, seen = part_of(residency, "a"), threading.Event(), []

    def hold() -> None:
        with residency.hold([part]):
            held.set()
            adopting.wait(PATIENCE_S)
            seen.append(part.buffer is not None)

    adopting = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        holding = pool.submit(hold)
        assert held.wait(PATIENCE_S)
        wait = residency._lock.wait_awhile

        def wait_and_say_so() -> None:
            adopting.set()
            wait()

        monkeypatch.setattr(residency._lock, "wait_awhile", wait_and_say_so)
        residency.adopt(part, lambda name: seen.append("adopted"))
        holding.result(PATIENCE_S)
    assert seen == [True, "adopted"]
    residency.close()


@pytest.fixture
def want(tmp_path: Path) -> list[list[dict[str, torch.Tensor]]]:
    """The weights after each step."""
    with build(tmp_path / "straight") as straight:
        after = [states(straight)]
        for step in range(4):
            train(straight, range(step, step + 1))
            after.append(states(straight))
    return after


def failing(name: str, file: str, code: int) -> Callable[[Path, Path], None]:
    """Return what does as a function of `os`, and fails for one file."""
    function = getattr(os, name)

    def call(source: Path, target: Path) -> None:
        if file in str(source):
            raise OSError(code, os.strerror(code), str(source))
        function(source, target)

    return call


def train_beyond_a_checkpoint(experts: OffloadedExperts) -> None:
    train(experts, range(1))
    experts.checkpoint()
    train(experts, range(1, 2))
    experts.residency.flush()


def files(folder: Path) -> set[str]:
    return {path.name for path in (folder / "resident-store").iterdir()}


@pytest.mark.parametrize("part", ["weights", "optimizer"])
def test_a_restore_that_finds_no_room_for_a_file_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, want: list[list[dict[str, torch.Tensor]]], part: str
) -> None:
    """The weights of the expert were whatever a buffer had, and its optimizer's state was not defined."""
    link_some = failing("link", f"00001.{part}", errno.ENOSPC)
    with build(tmp_path) as experts:
        train_beyond_a_checkpoint(experts)
        before, known_bytes = files(tmp_path), experts.residency.known_bytes
        for is_repeated in (False, True):
            with monkeypatch.context() as patch:
                patch.setattr(os, "link", link_some)
                with pytest.raises(OSError, match="No space left"):
                    experts.restore()
            assert (files(tmp_path), experts.residency.known_bytes) == (before, known_bytes)
            assert_equal(states(experts), want[2 + is_repeated])
            train(experts, range(2 + is_repeated, 3 + is_repeated))
        assert_equal(states(experts), want[4])
        experts.restore()
        train(experts, range(1, 4))
        assert_equal(states(experts), want[4])


@pytest.mark.parametrize("part", ["weights", "optimizer"])
def test_a_restore_whose_file_cannot_be_put_in_place_leaves_that_part_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, want: list[list[dict[str, torch.Tensor]]], part: str
) -> None:
    replace_some = failing("replace", f"00001.{part}", errno.EIO)
    with build(tmp_path) as experts:
        train_beyond_a_checkpoint(experts)
        before, known_bytes = files(tmp_path), experts.residency.known_bytes
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", replace_some)
            with pytest.raises(OSError, match="Input/output error"):
                experts.restore()
        assert (files(tmp_path), experts.residency.known_bytes) == (before, known_bytes)
        old, new = want[2], want[1]
        assert_equal(states(experts), [new[0], old[1] if part == "weights" else new[1], *old[2:]])
        experts.restore()
        train(experts, range(1, 4))
        assert_equal(states(experts), want[4])


def test_a_restore_without_the_folder_of_the_store_changes_nothing(
    tmp_path: Path, want: list[list[dict[str, torch.Tensor]]]
) -> None:
    with build(tmp_path) as experts, ThreadPoolExecutor(1) as another:
        experts.checkpoint("none")
        with experts.residency.hold([held.weights for held in experts._held]):
            shutil.rmtree(tmp_path / "resident-store")
            with pytest.raises(FileNotFoundError, match="resident-store"):
                another.submit(experts.restore).result(PATIENCE_S)
            assert_equal(states(experts), want[0])
        (tmp_path / "resident-store").mkdir()
        assert experts.restore() == "none"
        train(experts, range(4))
        assert_equal(states(experts), want[4])


@pytest.mark.parametrize(("comes_in", "leaves"), [("link", "before"), ("replace", "after")])
def test_ctrl_c_in_a_restore_leaves_all_experts_as_they_were_or_as_in_the_checkpoint(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    want: list[list[dict[str, torch.Tensor]]],
    comes_in: str,
    leaves: str,
) -> None:
    """One that came between a part's old bytes and its new ones left others, which a checkpoint then saved."""
    call = getattr(os, comes_in)
    numbers = iter(range(1000))

    def call_and_interrupt(*args: Any) -> Any:
        if next(numbers) == 2:
            signal.raise_signal(signal.SIGINT)
        return call(*args)

    with build(tmp_path) as experts:
        train(experts, range(1))
        experts.checkpoint()
        train(experts, range(1, 2))
        experts.residency.flush()
        with monkeypatch.context() as patch:
            patch.setattr(os, comes_in, call_and_interrupt)
            with pytest.raises(KeyboardInterrupt):
                experts.restore()
        assert not [name for name in files(tmp_path) if name.endswith(".linked")]
        step = 2 if leaves == "before" else 1
        assert_equal(states(experts), want[step])
        train(experts, range(step, 3))
        experts.checkpoint()
        train(experts, range(5))
        experts.restore()
        train(experts, range(3, 4))
        assert_equal(states(experts), want[4])
