"""What residency tells of a store that fails, as a full disk does, and whom; it may have room again by then."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from moe_autograd.autograd.offload.residency import Residency
from tests.support.stores import WatchedStore, part_of, put_all_out

CPU = torch.device("cpu")


@pytest.fixture
def store() -> WatchedStore:
    return WatchedStore()


@pytest.fixture
def residency(store: WatchedStore) -> Iterator[Residency]:
    residency = Residency(300, store, CPU)
    yield residency
    store.gate.set()
    residency.close()


def test_a_write_that_fails_in_the_background_is_raised_where_somebody_waits(
    residency: Residency, store: WatchedStore
) -> None:
    a, b = part_of(residency, "a", 200), part_of(residency, "bb", 200)
    store.failing = "write"
    with residency.hold([a]):
        residency.changed(a)
    with pytest.raises(OSError, match="No space left on device"), residency.hold([b]):
        pass
    store.failing = ""
    with residency.hold([b]):
        assert a.buffer is None


@pytest.mark.parametrize("is_flushed", [False, True])
def test_a_write_that_failed_while_nobody_waited_is_tried_again_before_anybody_is_told(
    residency: Residency, store: WatchedStore, is_flushed: bool
) -> None:
    a, b = part_of(residency, "a", 200), part_of(residency, "bb", 200)
    store.failing = "write"
    with residency.hold([a]):
        residency.changed(a)
    with residency._lock:
        while residency._transfers._failed_try == 0:
            assert residency._lock.wait(60)
    store.failing = ""
    store.events.clear()
    if is_flushed:
        residency.flush()
    with residency.hold([b]):
        assert a.buffer is None
    assert store.events == ["write a", "read bb"]


class FailingOnce(WatchedStore):
    """A disk that gets room while it is written to."""

    def __init__(self) -> None:
        super().__init__()
        self.begun = threading.Event()

    def _happen(self, event: str) -> None:
        self.begun.set()
        try:
            super()._happen(event)
        except OSError:
            self.failing = ""
            raise


@pytest.mark.parametrize("is_flushed", [False, True])
def test_of_a_write_that_began_before_anybody_waited_nobody_is_told(
    is_flushed: bool, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    store = FailingOnce()
    residency = Residency(300, store, CPU)
    request.addfinalizer(residency.close)
    request.addfinalizer(store.gate.set)  # before that
    a, b = part_of(residency, "a", 200), part_of(residency, "bb", 200)

    wait = residency._lock.wait_awhile

    def wait_as_it_gets_room() -> None:
        store.gate.set()
        wait()

    monkeypatch.setattr(residency._lock, "wait_awhile", wait_as_it_gets_room)
    with residency.hold([a]):
        store.failing = "write"
        store.gate.clear()
        store.begun.clear()
        store.events.clear()
        residency.changed(a)
    assert store.begun.wait(60)
    if is_flushed:
        residency.flush()
        assert store.events == ["write a"]
    with residency.hold([b]):
        assert a.buffer is None
    assert (store.events, store.failing) == (["write a", "read bb"], "")


def test_who_waits_for_a_write_that_fails_is_told_if_all_is_closed_meanwhile(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    store = FailingOnce()
    residency = Residency(300, store, CPU)
    request.addfinalizer(store.gate.set)
    a, waits, wait = part_of(residency, "a", 200), threading.Event(), residency._lock.wait_awhile
    part_of(residency, "bb", 200)

    def wait_and_say_so() -> None:
        waits.set()
        wait()

    def close_with_open_gate() -> None:
        store.gate.set()
        close()

    monkeypatch.setattr(residency._lock, "wait_awhile", wait_and_say_so)
    close = residency._transfers.close
    monkeypatch.setattr(residency._transfers, "close", close_with_open_gate)
    with residency.hold([a]):
        store.failing = "write"
        store.gate.clear()
        store.begun.clear()
        residency.changed(a)
    assert store.begun.wait(60)
    with ThreadPoolExecutor(1) as pool:
        flush = pool.submit(residency.flush)
        assert waits.wait(60)
        residency.close()
        with pytest.raises(RuntimeError, match="expected open experts, got closed ones"):
            flush.result(60)


def test_a_read_that_fails_raises_and_leaves_nobody_holding(
    residency: Residency, store: WatchedStore
) -> None:
    a, b = part_of(residency, "a", 100), part_of(residency, "bb", 100)
    put_all_out(residency)
    store.failing = "read a"
    with pytest.raises(OSError, match="No space left"), residency.hold([a, b]):
        pass
    store.failing = ""
    assert (a.num_holders, b.num_holders, a.is_busy, b.is_busy) == (0, 0, False, False)
    with residency.hold([a, b]):
        assert a.buffer is not None
        assert torch.equal(a.buffer, torch.full((100,), 1, dtype=torch.uint8))
