"""What is under way for an operation, or several of them, and how it is cancelled from another thread."""

from __future__ import annotations

import threading
from collections.abc import Callable

from moe_autograd._waiting import wait
from moe_autograd.remote.interrupts import interrupts_held_back


class Cancellation:
    """What is under way, so that it can be cancelled from another thread: of one operation, or several operations.

    `_bell` is a lock that is held until then: an interrupt that comes in an event leaves it locked for ever.

    Attributes:
        is_cancelled: whether it was.
        reason: why; empty, if none was given.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a handler of a signal that makes calls takes it again
        self._cancels: set[Callable[[], object]] = set()
        self._bell = threading.Lock()
        self._bell.acquire()
        self.is_cancelled = False
        self.reason = ""

    def add(self, cancel: Callable[[], object]) -> None:
        """Have `cancel` called if the operation is cancelled; at once if it has been."""
        with self._lock:
            self._cancels.add(cancel)
        if self.is_cancelled:
            cancel()

    def remove(self, cancel: Callable[[], object]) -> None:
        """Forget `cancel`: what it cancels has ended."""
        with self._lock:
            self._cancels.discard(cancel)

    @property
    def is_unwanted(self) -> bool:
        """Whether it was cancelled without a reason of its own: by `close`, with its task, or by Ctrl-C."""
        return self.is_cancelled and not self.reason

    def cancel(self, reason: str = "") -> None:
        """Cancel all that is under way, and whatever may be added; the first `reason` says why, if one is given."""
        with interrupts_held_back():  # a second Ctrl-C would leave the rest, or a lock of grpc's locked
            with self._lock:
                if not self.is_cancelled:
                    self.reason = reason
                    self.is_cancelled = True
                    self._bell.release()
                cancels = tuple(self._cancels)
            for cancel in cancels:
                cancel()

    def wait(self, pause_s: float) -> bool:
        """Pause; return at once with True if the operation is cancelled."""
        if not self.is_cancelled and wait(self._hear, pause_s):
            self._bell.release()  # for others that wait
        return self.is_cancelled

    def _hear(self, pause_s: float) -> bool:
        return self._bell.acquire(timeout=pause_s)

    def __repr__(self) -> str:
        return f"Cancellation({len(self._cancels)} under way)"
