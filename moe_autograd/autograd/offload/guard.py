"""The lock of what is in memory. Ctrl-C waits as long as somebody has it: what it guards fits together again then."""

from __future__ import annotations

import os
import threading

from moe_autograd._interrupts import let_through, uninterrupted
from moe_autograd._waiting import LOOK_UP_S


class Guard:
    """A lock, and whoever waits for news of what it guards. Not reentrant: its own thread is told.

    Attributes:
        num_news: how often there were any.

    Raises:
        RuntimeError: it is entered in a fork, which has none of the threads, and would write over its parent's files.
            Nobody waits there: who had the lock at the fork does not let go of it. Or its own thread has it: Ctrl-C
            waits meanwhile, handlers of other signals do not, nor do finalizers.
    """

    def __init__(self) -> None:
        self._process = os.getpid()
        # Reentrant, as its own thread is not to wait, but to be told.
        self._condition = threading.Condition(threading.RLock())
        self._section: uninterrupted | None = None  # of who has it
        self.num_news = 0

    @property
    def is_in_fork(self) -> bool:
        """Whether this process is a fork of the one that made it."""
        return self._process != os.getpid()

    def __enter__(self) -> None:
        if self.is_in_fork:
            raise RuntimeError(
                f"OffloadedExperts: expected process {self._process}, which built them, got {os.getpid()}, its fork. "
                "Build them in the fork."
            )
        if not self._enter(blocking=True):
            raise RuntimeError(
                "OffloadedExperts: expected a signal's handler, or a finalizer, that uses experts to come when its own "
                "thread is not just taking parts of them or letting go of some. Let it set a flag, and look at that "
                "between steps."
            )

    def __exit__(self, *exc_info: object) -> None:
        section, self._section = self._section, None
        assert section is not None
        self._condition.release()
        section.__exit__()

    def enter_if_free(self) -> bool:
        """Enter it, and return whether that could be done at once; to be left by `__exit__`."""
        return self._enter(blocking=False)

    def _enter(self, *, blocking: bool) -> bool:
        section = uninterrupted()
        section.__enter__()
        if self._condition.acquire(blocking):
            if self._section is None:
                self._section = section
                return True
            self._condition.release()  # its own thread has it
        section.__exit__()
        return False

    def wait(self, timeout_s: float) -> bool:
        """Wait for news, the lock released meanwhile; return whether there are any."""
        num_news = self.num_news
        section, self._section = self._section, None
        try:
            # there may be some between a wait that is over in vain and the lock
            return self._condition.wait(timeout_s) or self.num_news != num_news
        finally:
            self._section = section  # others have had the lock

    def wait_awhile(self) -> None:
        """Wait for news; on the main thread, which runs the handlers of signals, not for long (`_waiting`).

        So whoever waits looks again whether he still has to, and calls `let_through` before that.
        """
        is_main = threading.current_thread() is threading.main_thread()
        self.wait(LOOK_UP_S if is_main else threading.TIMEOUT_MAX)

    def let_through(self) -> None:
        """Run the handler of Ctrl-C now, if it waits, the lock released meanwhile: it may want what that guards."""
        if threading.current_thread() is not threading.main_thread():
            return
        section, self._section = self._section, None
        self._condition.release()
        try:
            let_through()
        finally:
            self._condition.acquire()
            self._section = section

    def notify_all(self) -> None:
        """Tell all who wait that there are news."""
        self.num_news += 1
        self._condition.notify_all()
