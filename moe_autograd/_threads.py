"""Threads that are kept for the next job, as trio's thread cache keeps its workers.

Starting a thread costs some 100 us, waking one 10. A job runs at once, on the thread that was idle last or on a new
one: nothing ever waits for a free thread. A thread that is done keeps no reference to what it ran, and leaves after
`IDLE_S` seconds without work. In a forked child there are none at first; at interpreter exit idle ones leave.

Mutable state: `_idle`, `_threads` and `_left_at_s` are changed only by single operations that the interpreter makes
atomic.
"""

from __future__ import annotations

import atexit
import os
import sys
import threading
import time
from collections.abc import Callable

from torch.autograd.graph import _engine_run_backward

from moe_autograd._frames import beneath, on_each_thread
from moe_autograd._interrupts import uninterrupted
from moe_autograd._intraop import end_team
from moe_autograd._switching import interval

IDLE_S = 5.0  # how long a thread waits for the next job before it leaves
EXIT_GRACE_S = 1.0
LEAVE_S = 1.0  # what a fork waits for a thread that leaves, at most

RUNNING = b"R"  # or it would, on a core
READING = b"D"  # from a disk, such as code that runs for the first time


class _Worker:
    """A thread that runs one job after another; between jobs it waits in `_idle`.

    `_wake` is held while there is nothing to do, and released once for each job given.
    """

    def __init__(self, job: Callable[[], None]) -> None:
        self._job: Callable[[], None] | None = job
        self._wake = threading.Lock()
        self._wake.acquire()
        self.thread = threading.Thread(target=self._run, name="moe-autograd worker", daemon=True)
        self.thread.start()

    def give(self, job: Callable[[], None] | None) -> None:
        """Hand over the next job; `None` lets the thread leave."""
        self._job = job
        self._wake.release()

    def _run(self) -> None:
        _threads.add(self.thread)
        _left_at_s.pop(threading.get_native_id(), None)  # of a thread of before
        interval.suit(_threads)
        try:
            while (job := self._job) is not None:
                self._job = None
                job()
                del job  # an idle thread keeps nothing alive
                if self.thread not in _threads:
                    _end_child()
                end_team()
                _idle.append(self)
                if not self._wake.acquire(timeout=IDLE_S) and self._try_leave():
                    return
        finally:
            _threads.discard(self.thread)
            interval.suit(_threads)

    def _try_leave(self) -> bool:
        """Give up, and return True, unless a job has been given: whoever takes us off `_idle` first has won."""
        try:
            _idle.remove(self)
        except ValueError:  # `start_soon` took us: its job is on the way
            self._wake.acquire()
            return False
        now_s = time.perf_counter()
        for thread_id, left_at_s in [*_left_at_s.items()]:  # the oldest first
            if now_s < left_at_s + LEAVE_S:
                break
            _left_at_s.pop(thread_id, None)
        _left_at_s[threading.get_native_id()] = now_s
        return True


_idle: list[_Worker] = []
_threads: set[threading.Thread] = set()
_left_at_s: dict[int, float] = {}  # by the system's id, of those that may not be gone yet


def start_soon(job: Callable[[], None]) -> None:
    """Run `job`, which must not raise, on a thread of its own.

    Raises:
        RuntimeError: the system has no thread left to give.
    """
    with uninterrupted():  # or a thread would wait for a job for ever, or run one though this raises
        try:
            worker = _idle.pop()
        except IndexError:
            _Worker(job)
        else:
            worker.give(job)


def _see_off() -> None:
    """Before a fork, let threads that leave be gone, for the system too.

    At a thread's very end MKL takes its buffers back, under a lock of its own. In a child forked just then nobody
    gives that back: matrix products hang there, or end the child by a segmentation fault.
    """
    for thread_id, left_at_s in [*_left_at_s.items()]:
        while time.perf_counter() < left_at_s + LEAVE_S and state_of(thread_id):
            time.sleep(0.0001)  # the interpreter lock is its
        _left_at_s.pop(thread_id, None)


def _forget_threads() -> None:
    """In a forked child only the forking thread lives on: start with none."""
    _idle.clear()
    _threads.clear()
    _left_at_s.clear()


def left_in_child() -> str:
    """Say that a child that was forked in a job goes on, where only its parent could."""
    return (
        f"process {os.getpid()}: expected to end in the call that it was forked in, got to that call's end. The map "
        "goes on in its parent alone, whose threads make the other calls. End the child by `os._exit`, or fork "
        "outside of calls."
    )


def _end_child() -> None:
    """End a child that was forked in a job and has come to its end: nobody is there to go on."""
    print(left_in_child(), file=sys.stderr, flush=True)
    os._exit(1)


def _rest_before_exit() -> None:
    """Let idle threads leave, and those that are in C++ end, before the interpreter takes itself apart.

    A daemon thread that comes back from C++ into a finalised interpreter is ended in the middle of C++ frames, and
    the process may abort. Those are threads that compute, and those that wait within a backward of torch's engine.
    Other calls that wait sit in Python and are safe to leave.
    """
    while _idle:
        worker = _idle.pop()
        worker.give(None)
        worker.thread.join(EXIT_GRACE_S)
    deadline_s = time.perf_counter() + EXIT_GRACE_S
    while time.perf_counter() < deadline_s and (_some_compute() or _some_are_within_backwards()):
        pass


def _some_compute() -> bool:
    """Look for 5 ms whether a thread computes, or would if it had a core, or what it reads from a disk."""
    before_s = {thread: _cpu_s(thread) for thread in [*_threads]}
    time.sleep(0.005)  # the interpreter lock is theirs
    return any(
        thread.is_alive() and (_cpu_s(thread) > cpu_s or state_of(thread.native_id) in (RUNNING, READING))
        for thread, cpu_s in before_s.items()
    )


def _some_are_within_backwards() -> bool:
    """Whether a thread is beneath torch's engine, such as in the backward of an autograd function."""
    is_within = on_each_thread(lambda frame: beneath(frame, _engine_run_backward.__code__) is not None)
    return any(is_within.get(thread.ident or 0) for thread in [*_threads])


def _cpu_s(thread: threading.Thread) -> float:
    """Return how long the thread has computed; 0 if it has ended, or the system does not tell."""
    if thread.ident is None or not hasattr(time, "pthread_getcpuclockid"):
        return 0.0
    try:
        return time.clock_gettime(time.pthread_getcpuclockid(thread.ident))
    except OSError:
        return 0.0


def state_of(thread_id: int | None) -> bytes:
    """Return what the system does with the thread of this native id; nothing where it does not tell."""
    try:
        with open(f"/proc/self/task/{thread_id}/stat", "rb") as stat:
            return stat.read().rpartition(b")")[2][1:2]
    except OSError:  # the thread has ended, or the system has no such file
        return b""


atexit.register(_rest_before_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_see_off, after_in_child=_forget_threads)
