"""A thread that moves parts as long as there are any to move, and one that calls functions apart."""

from __future__ import annotations

import atexit
import functools
import threading
from collections.abc import Callable
from concurrent import futures
from typing import Any, ParamSpec, TypeVar

import torch

from moe_autograd._interrupts import uninterrupted
from moe_autograd._waiting import wait
from moe_autograd.autograd.offload.apart_streams import on_stream, stream_apart
from moe_autograd.autograd.offload.guard import Guard
from moe_autograd.autograd.offload.parts import Part

P = ParamSpec("P")
T = TypeVar("T")

_late: dict[threading.Thread, OneThread] = {}  # and whose they are; single operations alone change it


class OneThread(futures.ThreadPoolExecutor):
    """An executor of one thread, which also runs functions once the main thread is through.

    From then on those of Python take none and have ended theirs, while other threads may still train, and what
    `atexit` calls may save. So each function has a thread of its own then; still one runs after the other.

    Args:
        name: of the thread.
    """

    def __init__(self, name: str) -> None:
        super().__init__(1, thread_name_prefix=name)
        self._name, self._is_closed = name, False
        self._turn = threading.Lock()  # held by the late one that runs

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> futures.Future[T]:
        """Run a function after those before it; raises `RuntimeError` where it is shut down, or gets no thread."""
        try:
            return super().submit(fn, *args, **kwargs)
        except RuntimeError:
            if self._is_closed:
                raise
        running, function = futures.Future[T](), functools.partial(fn, *args, **kwargs)
        # a daemon: `_end_late` waits for all of them alike, the interpreter no longer for those that `atexit` begins
        thread = threading.Thread(
            target=self._run_late, args=(running, function), name=self._name, daemon=True
        )
        _late[thread] = self
        try:
            thread.start()
        except BaseException:
            del _late[thread]
            raise
        return running

    def _run_late(self, running: futures.Future[T], function: Callable[[], T]) -> None:
        try:
            with self._turn:
                running.set_result(function())
        except BaseException as error:  # as that of an executor
            running.set_exception(error)
        finally:
            del _late[threading.current_thread()]

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more, and wait for what runs."""
        self._is_closed = True
        super().shutdown(wait, cancel_futures=cancel_futures)
        if wait:
            _end_late(of=self)


def _end_late(of: OneThread | None = None) -> None:
    """Wait for late threads: one that comes back from C++ into a finalised interpreter may abort the process."""
    for thread, executor in _late.copy().items():
        if of in (None, executor):
            thread.join()


atexit.register(_end_late)  # so it comes after what programs register once they have imported this


def begun_threads(*names: str) -> list[OneThread]:
    """Return executors of one thread each, which is there from the start.

    `submit` of one without a thread raises where the system has none to give, and keeps what it was given all the same:
    it would be run after what is submitted next.

    Raises:
        RuntimeError: the system has no thread to give.
    """
    executors = [OneThread(name) for name in names]
    for executor in executors:
        executor.submit(_begin)
    return executors


def _begin() -> None:
    """What a thread does first."""


class Mover:
    """Moves one part after the other until there is none left; whoever has more to move starts it again.

    Args:
        thread: that moves them.
        lock: held by whoever calls `start`, and while `choose` runs; told when it moves no more.
        choose: returns the next part, marked as being moved; `None` if there is none now.
        move: moves it, with the lock released; raises nothing.
        device: of the parts. On a GPU the thread has a stream of its own, and moves wait for nobody's kernels. So a
            part is moved only when the kernels that use it have ended, and `move` ends with its copies.
    """

    def __init__(
        self,
        thread: futures.Executor,
        lock: Guard,
        choose: Callable[[], Part | None],
        move: Callable[[Part], None],
        device: torch.device,
    ) -> None:
        self.is_moving = False
        self._stream = stream_apart(device)
        self._thread = thread
        self._lock, self._choose, self._move = lock, choose, move

    def start(self) -> None:
        """Begin, if it does not move already. The lock is held."""
        if not self.is_moving:
            self._thread.submit(self._run)  # which raises where it gets no thread
            self.is_moving = True

    def _run(self) -> None:
        try:
            with on_stream(self._stream):
                while (part := self._next()) is not None:
                    self._move(part)
        except BaseException:
            with self._lock:
                self._rest()
            raise

    def _next(self) -> Part | None:
        with self._lock:
            part = self._choose()
            if part is None:
                self._rest()
            return part

    def _rest(self) -> None:
        self.is_moving = False
        self._lock.notify_all()

    def close(self) -> None:
        """Finish what is being moved, and end the thread."""
        self._thread.shutdown()


class Apart:
    """A thread outside of the modes and random numbers of whoever calls; one function at a time."""

    def __init__(self, thread: futures.Executor) -> None:
        self._thread = thread
        self._runs_on: int | None = None  # its `ident`, while it runs a function

    def run(self, function: Callable[[], T]) -> T:
        """Call a function there; it has ended when this returns or raises.

        Raises:
            RuntimeError: it would wait for itself.
        """
        if threading.get_ident() == self._runs_on:
            raise RuntimeError(
                "OffloadedExperts: expected one update in a backward after the other, got one within another's step. "
                "Train after the backward, not in a hook of the step."
            )

        def noted() -> T:
            self._runs_on = threading.get_ident()
            try:
                return function()
            finally:
                self._runs_on = None

        with uninterrupted():
            running = self._thread.submit(noted)
            try:
                self._wait_for(running)
                return running.result()
            except BaseException:
                self._wait_for(running)  # Ctrl-C: whoever holds what it uses is about to let go
                raise

    def _wait_for(self, running: futures.Future[Any]) -> None:
        wait(lambda pause_s: bool(futures.wait([running], pause_s).done))

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown()
