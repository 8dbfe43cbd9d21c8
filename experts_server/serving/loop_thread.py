"""One event loop on a background thread, for all servers that live behind a `with` statement.

grpc.aio serves every event loop of a process from one completion queue; with several loops it wakes them for
each other's events and reports errors that are none. So there is one, started for the first server and stopped
after the last.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import os
import sys
import threading
from collections.abc import Coroutine
from typing import Any, ClassVar, TypeVar

from moe_autograd._interrupts import uninterrupted
from moe_autograd._waiting import wait

R = TypeVar("R")
ENDING_S = 0.1  # of a thread whose server has stopped just now


class LoopThread:
    """The loop's thread; get it with `acquire`, give it back with `release`.

    Threads: any but the loop's own.
    """

    _lock: ClassVar[threading.Lock] = threading.Lock()
    _current: ClassVar[LoopThread | None] = None
    _polled_in: ClassVar[int | None] = None  # the process that had one, or grpc.aio polled in, when it forked

    def __init__(self) -> None:
        self._process = os.getpid()
        self._loop = asyncio.new_event_loop()
        self._num_users = 0
        self._thread = threading.Thread(target=self._serve, name="experts-server-loop", daemon=True)
        self._thread.start()

    @classmethod
    def check_process(cls) -> None:
        """Raise `RuntimeError` in the fork of a process where servers were running, or grpc.aio was."""
        if cls._polled_in not in (None, os.getpid()):
            raise RuntimeError(
                f"process {os.getpid()}: expected one without a server when it was forked, got the fork of "
                f"{cls._polled_in}, where one runs, or grpc.aio still does for a call that hangs or an error that is "
                "kept. grpc cannot serve in it: spawn, or fork before."
            )

    @classmethod
    def acquire(cls) -> LoopThread:
        """Return the process's loop thread, started if need be."""
        with cls._lock:
            if cls._current is None:
                cls._current = cls()
            cls._current._num_users += 1
            return cls._current

    @classmethod
    def is_calling(cls) -> bool:
        """Whether the loop's own thread calls: it must not wait for what the loop does."""
        current = cls._current  # which another thread may release
        return current is not None and current._thread is threading.current_thread()

    @property
    def is_here(self) -> bool:
        """Whether this process has it; a forked child has not, nor an interpreter that takes itself apart."""
        return self._process == os.getpid() and not sys.is_finalizing()

    def release(self) -> None:
        """Give it back; the last one stops it."""
        with self._lock:
            self._num_users -= 1
            if self._num_users:
                return
            LoopThread._current = None
        with uninterrupted():
            self._loop.call_soon_threadsafe(self._loop.stop)
            wait(self._has_ended)

    def _has_ended(self, pause_s: float) -> bool:
        self._thread.join(pause_s)
        return not self._thread.is_alive()

    def _serve(self) -> None:
        """Run the loop until it is stopped, and close it here: who releases it may be inside another one."""
        self._loop.run_forever()
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()

    def run(self, coroutine: Coroutine[Any, Any, R]) -> R:
        """Run on the loop; return what it returns, or raise what it raises. After Ctrl-C it has been cancelled.

        It has begun in any case, and ends by itself: Ctrl-C comes while it is waited for, or after it.
        """
        running: list[asyncio.Task[R]] = []

        async def run() -> R:
            running.append(asyncio.ensure_future(coroutine))
            return await running[0]

        async def end() -> None:
            await asyncio.sleep(0)  # what is cancelled before it begins does nothing
            for task in running:
                task.cancel()
                await asyncio.wait([task])

        with uninterrupted():
            try:
                return self._result_of(run())
            except BaseException:
                self._result_of(end())
                raise
            finally:
                running.clear()  # the task has its error, whose traceback has this list

    def _result_of(self, coroutine: Coroutine[Any, Any, R]) -> R:
        future = asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        try:
            wait(functools.partial(_is_done, future))
            return future.result()
        finally:
            del future  # which has its error, too


def _is_done(future: concurrent.futures.Future[Any], pause_s: float) -> bool:
    return bool(concurrent.futures.wait([future], pause_s).done)


def _note_poller() -> None:
    """Before a fork, note whether grpc.aio polls here: a child has no such thread, and waits for it in vain."""
    if LoopThread._polled_in not in (None, os.getpid()):
        return  # a child's child has none either
    pollers = [thread for thread in threading.enumerate() if thread.name.endswith("(_poll_wrapper)")]
    if LoopThread._current is None:
        for poller in pollers:
            poller.join(ENDING_S)
    is_polling = any(poller.is_alive() for poller in pollers)
    LoopThread._polled_in = os.getpid() if is_polling else None


def _go_on_in_child() -> None:
    """Note whether the parent had a loop: a child has no thread of it, nor one that would let go of the lock."""
    if LoopThread._current is not None:
        LoopThread._polled_in = LoopThread._current._process
    LoopThread._lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_note_poller, after_in_child=_go_on_in_child)
