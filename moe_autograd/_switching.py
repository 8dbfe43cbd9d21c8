"""How often threads ask for the interpreter lock, where there are very many.

A thread that waits for the interpreter lock wakes every `sys.getswitchinterval()` seconds, 5 ms, to ask for it. When a
thousand calls end at once, their threads wake 200,000 times a second for nothing but that, and leave two cores no time
for the thread that has the lock: maps of 1,024 calls that wait 50 ms took 0.15 s mostly, and now and then 20 to 50.

So with more than `MANY` threads the interval grows with their number, `PER_THREAD_S` for each. It is the whole
process's: a thread that computes in Python may keep the lock from others for so long. What the user sets meanwhile
stays, as a longer interval of his own does; once the threads have left, it is again what it was.

Mutable state: `_Interval`'s, guarded by its lock, for which nobody waits.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Sized

MANY = 128
PER_THREAD_S = 40e-6
LONGEST_S = 0.1


class _Interval:
    """The process's switch interval, and what it was before we set it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._users_s: float | None = None  # None: we have set nothing
        self._ours_s: float | None = None  # None: it is just being set

    def suit(self, threads: Sized) -> None:
        """Set the interval for as many threads of ours as there are now."""
        lock, num_suited = self._lock, -1  # a child that is forked in the midst of it has another lock
        while (len(threads) > MANY or self._users_s is not None) and len(threads) != num_suited:
            if not lock.acquire(blocking=False):
                return  # who has it looks once more; to wait, it might wait for us: a finalizer there may make a map
            try:
                num_suited = len(threads)
                self._set_for(num_suited)
            finally:
                lock.release()

    def _set_for(self, num_threads: int) -> None:
        now_s = sys.getswitchinterval()
        if self._users_s is None or (self._ours_s is not None and self._ours_s != now_s):
            self._users_s = now_s
        self._ours_s = None
        if num_threads > MANY:
            wanted_s = min(LONGEST_S, num_threads * PER_THREAD_S)
            sys.setswitchinterval(max(wanted_s, self._users_s))
            self._ours_s = sys.getswitchinterval()  # in whole microseconds
        else:
            sys.setswitchinterval(self._users_s)
            self._users_s = None


interval = _Interval()


def _start_anew() -> None:
    """In a forked child there are no threads of ours, also none that has the lock."""
    interval._lock = threading.Lock()
    interval.suit(())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_anew)
