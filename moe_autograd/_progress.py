"""Whether a thread computes or waits, told from its processor time by whoever looks.

A thread that used some since the last look is computing, one that used none is waiting. Two appearances deceive:

1. A call that has made a map of its own waits for that map's other threads. It counts as computing while one of
   them does, or each level of nesting would ask for as many threads as there are cores.
2. On a busy machine a thread may want a core and get none. The system says so (`is_queued`), but that is dear to ask.

Threads: a thread makes its own `Progress`; one other thread looks at it, also after it has ended.
"""

from __future__ import annotations

import os
import threading
import time

from moe_autograd._lookout import Watched
from moe_autograd._threads import RUNNING, state_of

_COMPUTING_SHARE = 0.1  # of a look's time on a core; less is waiting


class Progress:
    """What the current thread does from now on, for somebody else to look at."""

    __slots__ = ("_clock", "_cpu_s", "_looked_at_s", "_thread_id", "_used_cpu", "joining", "seemed_to_wait")

    def __init__(self) -> None:
        self._thread_id, self._clock = here.thread_id, here.clock
        self._cpu_s = 0.0 if self._clock is None else time.clock_gettime(self._clock)
        self._looked_at_s = time.perf_counter()
        self._used_cpu = True
        self.seemed_to_wait = False
        # a nested crew whose calls on other threads this thread waits for
        self.joining: Watched | None = None

    def look(self, now_s: float) -> bool:
        """Return whether the thread computes; `now_s` is on the clock of `time.perf_counter`."""
        if now_s > self._looked_at_s and self._clock is not None:
            try:
                cpu_s = time.clock_gettime(self._clock)
            except OSError:  # the thread has ended since
                return False
            elapsed_s, self._looked_at_s = now_s - self._looked_at_s, now_s
            self._used_cpu = cpu_s - self._cpu_s > _COMPUTING_SHARE * elapsed_s
            self._cpu_s = cpu_s
        nested = self.joining
        self.seemed_to_wait = not (self._used_cpu or (nested is not None and nested.census(now_s)[0] > 0))
        return not self.seemed_to_wait

    def is_queued(self) -> bool:
        """Return whether the thread could compute if it had a core."""
        return state_of(self._thread_id) == RUNNING


def _cpu_clock() -> int | None:
    """Return the clock of this thread's processor time, where the system has one."""
    if hasattr(time, "pthread_getcpuclockid"):
        return time.pthread_getcpuclockid(threading.get_ident())
    return None


class _Here(threading.local):
    """The current thread: how it is known to the system, and its progress while it runs calls."""

    def __init__(self) -> None:  # runs once on each thread
        self.thread_id = threading.get_native_id()
        self.clock = _cpu_clock()
        self.progress: Progress | None = None


here = _Here()


def _look_again() -> None:
    """In a forked child the thread is another one for the system."""
    here.thread_id, here.clock = threading.get_native_id(), _cpu_clock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_look_again)
