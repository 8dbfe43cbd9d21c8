"""What the machine itself allows: bare threads, each with a lock of its own, that wake, wait 50 ms and count down.

No library could start and end as many threads sooner, unless it knew when they are about to wake up. The threads are
made once and parked; a round wakes the first, and each that wakes wakes the next (woken all at once by one thread, more
of them fight for the interpreter lock).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class BareThreads:
    """Threads that run `work(index)` once a round.

    Args:
        count: how many.
        work: takes the index.
    """

    def __init__(self, count: int, work: Callable[[int], object]) -> None:
        self._work = work
        self._bells = [threading.Lock() for _ in range(count)]
        self._at_rest = threading.Lock()
        self._counting = threading.Lock()
        self._num_left = count
        self._is_over = False
        for lock in (*self._bells, self._at_rest):
            lock.acquire()
        self._threads = [threading.Thread(target=self._run, args=(index,)) for index in range(count)]
        for thread in self._threads:
            thread.start()

    def go(self) -> float:
        """Run all once; return how long it takes, in seconds."""
        self._num_left = len(self._bells)
        begun_s = time.perf_counter()
        self._bells[0].release()
        self._at_rest.acquire()
        return time.perf_counter() - begun_s

    def _run(self, index: int) -> None:
        own, *rest = self._bells[index : index + 2]
        while True:
            own.acquire()
            for following in rest:
                following.release()
            if self._is_over:
                return
            self._work(index)
            with self._counting:
                self._num_left -= 1
                is_last = self._num_left == 0
            if is_last:
                self._at_rest.release()

    def end(self) -> None:
        """Let the threads end."""
        self._is_over = True
        self._bells[0].release()
        for thread in self._threads:
            thread.join()


@contextmanager
def bare_threads(count: int, work: Callable[[int], object]) -> Iterator[BareThreads]:
    """Keep `count` threads that run `work(index)` once a round."""
    threads = BareThreads(count, work)
    try:
        yield threads
    finally:
        threads.end()
