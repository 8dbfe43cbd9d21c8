"""Waits of the main thread that see Ctrl-C, also where another thread of the process takes the signal."""

from __future__ import annotations

import os
import queue
import signal
import threading
from collections.abc import Callable, Iterator

import pytest

from moe_autograd._waiting import acquire, get, wait
from moe_autograd.autograd.turns import Turn
from moe_autograd.remote.cancelling import Cancellation
from tests.support.interrupting import interrupted_everywhere

PATIENCE_S = 60.0


@pytest.fixture
def interrupt_taken_by_another_thread() -> Iterator[None]:
    """Send a SIGINT that does not wake the calling thread from what it blocks in."""
    is_ready, may_end = threading.Event(), threading.Event()

    def take() -> None:
        is_ready.set()
        may_end.wait(PATIENCE_S)

    taker = threading.Thread(target=take)
    taker.start()
    assert is_ready.wait(PATIENCE_S)
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    sender = threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGINT))
    sender.start()
    try:
        yield
    finally:
        sender.join()
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        may_end.set()
        taker.join()


def take_a_lock_that_is_held() -> None:
    lock = threading.Lock()
    lock.acquire()
    releaser = threading.Timer(PATIENCE_S, lock.release)
    releaser.start()
    try:
        acquire(lock)
    finally:
        releaser.cancel()


@pytest.mark.parametrize(
    "block",
    [
        take_a_lock_that_is_held,
        lambda: get(queue.SimpleQueue[None](), PATIENCE_S),
        lambda: wait(threading.Event().wait, PATIENCE_S),
        lambda: Turn("second", [Turn("first", ())]).__enter__(),
        lambda: Cancellation().wait(PATIENCE_S),
    ],
    ids=["lock", "queue", "event", "turn of a module", "pause before a retry"],
)
def test_ctrl_c_that_another_thread_takes_is_seen(
    block: Callable[[], object], interrupt_taken_by_another_thread: None
) -> None:
    with pytest.raises(KeyboardInterrupt):
        block()


@pytest.mark.parametrize("timeout_s", [-1.0, 0.0, 0.15])
def test_what_does_not_come_in_time(timeout_s: float) -> None:
    assert not wait(threading.Event().wait, timeout_s)
    with pytest.raises(queue.Empty):
        get(queue.SimpleQueue[None](), timeout_s)


def test_what_comes_is_taken() -> None:
    items: queue.SimpleQueue[int] = queue.SimpleQueue()
    sender = threading.Timer(0.15, items.put, (3,))
    sender.start()
    assert get(items) == 3
    sender.join()


def test_ctrl_c_anywhere_in_a_wait_is_ctrl_c_and_the_event_is_as_good_as_before() -> None:
    event = threading.Event()
    for _ in interrupted_everywhere(lambda: wait(event.wait, 0.0)):
        assert not event.wait(0.0)
    event.set()
    for _ in interrupted_everywhere(lambda: wait(event.wait, PATIENCE_S)):
        assert event.wait(0.0)
