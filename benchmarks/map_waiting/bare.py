"""What the machine itself allows: bare threads, each with a lock of its own, that wake, wait 50 ms and count down.

No library could start and end as many threads sooner, unless it knew when they are about to wake up. The threads are
made once and parked; a round wakes the first, and each that wakes wakes the next (woken all at once by one thread, more
of them fight for the interpreter lock).

They have a process of their own: in that of the maps, whose threads find their caches full of the others', a map took
up to a millisecond longer.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

WAIT_S = 0.05
WAITS = "wait, and one torch call"


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


def works(count: int) -> dict[str, Callable[[int], object]]:
    """Return what the threads may do, by name."""
    tensors = [torch.ones(8) for _ in range(count)]

    def wait(index: int) -> None:
        time.sleep(WAIT_S)

    def wait_and_compute(index: int) -> None:
        time.sleep(WAIT_S)
        tensors[index] * 2

    return {WAITS: wait_and_compute, "wait": wait}


@contextmanager
def bare_threads(count: int, what: str) -> Iterator[Callable[[], float]]:
    """Keep `count` threads that do `what` once a round; yields what runs a round and returns its seconds."""
    command = [sys.executable, "-m", "benchmarks.map_waiting.bare", str(count), what]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, bufsize=1, **pipes) as process:
        assert process.stdin is not None
        assert process.stdout is not None

        def go() -> float:
            process.stdin.write("go\n")
            return float(process.stdout.readline())

        try:
            yield go
        finally:
            process.stdin.close()


def serve(count: int, what: str) -> None:
    """Run a round for each line of the input, and print its seconds."""
    threads = BareThreads(count, works(count)[what])
    for _ in sys.stdin:
        print(threads.go(), flush=True)
    threads.end()


if __name__ == "__main__":
    serve(int(sys.argv[1]), sys.argv[2])
