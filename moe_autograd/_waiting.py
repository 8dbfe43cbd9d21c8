"""Wait for other threads, and see Ctrl-C meanwhile.

A signal that comes just before a lock blocks, or that another thread of the process takes, does not wake it: Ctrl-C
would be seen when the wait is over, after minutes where a server hangs. So the main thread, which runs the handlers of
signals, looks up now and then. It runs them only then: one that raises within an event of `threading` would leave that
with a lock that is not its own. Locks that are soon free need none of this.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from moe_autograd._interrupts import let_through, uninterrupted

T = TypeVar("T")

LOOK_UP_S = 0.1


def wait(block: Callable[[float], bool], timeout_s: float = threading.TIMEOUT_MAX) -> bool:
    """Wait for something; return whether it came in time.

    Args:
        block: blocks for so many seconds at most, such as `threading.Event.wait`; returns whether it has come.
        timeout_s: in seconds.
    """
    if threading.current_thread() is not threading.main_thread():
        return block(max(0.0, timeout_s))
    until_s = time.monotonic() + timeout_s
    with uninterrupted():
        while not block(max(0.0, min(LOOK_UP_S, timeout_s))):
            let_through()
            timeout_s = until_s - time.monotonic()
            if timeout_s <= 0:
                return False
        return True


def acquire(lock: threading.Lock) -> None:
    """Take a lock that may be held for long."""
    wait(lambda pause_s: lock.acquire(timeout=pause_s))


def get(items: queue.SimpleQueue[T], timeout_s: float = threading.TIMEOUT_MAX) -> T:
    """Take the next item.

    Raises:
        queue.Empty: none came in time.
    """
    taken: list[T] = []

    def block(pause_s: float) -> bool:
        try:
            taken.append(items.get(timeout=pause_s))
        except queue.Empty:
            return False
        return True

    if not wait(block, timeout_s):
        raise queue.Empty
    return taken.pop()
