"""Do something at several servers at the same time.

The calling thread serves the first itself; each other one gets a thread of a small pool, or is served after the first
where the system has no thread to give. All come to rest before the caller goes on, except on Ctrl-C: then what is under
way is cancelled and the caller goes on at once.

Mutable state: the pool, made when first needed, under `_lock`. A pool's threads wait for servers only, never for
each other. The calling thread waits for them at a queue, since Ctrl-C can leave the lock of a future locked.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from typing import TypeVar

from moe_autograd.remote.closing import closed
from moe_autograd.remote.interrupts import interrupts_held_back

T = TypeVar("T")
R = TypeVar("R")

Taken = Future[list[R | BaseException]]  # what came of it; the list is emptied when that is taken

_PASSES_AT_ONCE = 8


class Cancellation:
    """What one operation has under way, so that it can be cancelled from another thread.

    `_bell` is a lock that is held until then: an interrupt that comes in an event leaves it locked for ever.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cancels: set[Callable[[], object]] = set()
        self._bell = threading.Lock()
        self._bell.acquire()
        self._is_cancelled = False
        self.reason = ""

    def add(self, cancel: Callable[[], object]) -> None:
        """Have `cancel` called if the operation is cancelled; at once if it has been."""
        with self._lock:
            self._cancels.add(cancel)
        if self._is_cancelled:
            cancel()

    def remove(self, cancel: Callable[[], object]) -> None:
        """Forget `cancel`: what it cancels has ended."""
        with self._lock:
            self._cancels.discard(cancel)

    def cancel(self, reason: str = "") -> None:
        """Cancel all that is under way, and whatever may be added; `reason` says why, if the user is to know."""
        self.reason = self.reason or reason
        with self._lock:
            if not self._is_cancelled:
                self._is_cancelled = True
                self._bell.release()
            cancels = tuple(self._cancels)
        for cancel in cancels:
            cancel()

    def wait(self, pause_s: float) -> bool:
        """Pause; return at once with True if the operation is cancelled."""
        if not self._is_cancelled and pause_s > 0 and self._bell.acquire(timeout=pause_s):
            self._bell.release()  # for others that wait
        return self._is_cancelled


class Fanout:
    """A pool of threads for some servers.

    Args:
        num_servers: how many there are.
    """

    def __init__(self, num_servers: int) -> None:
        self._num_servers = num_servers
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None
        self._is_open = True

    def at_each(
        self, work: Mapping[str, T], do: Callable[[str, T], R], cancellation: Cancellation
    ) -> dict[str, R | Exception]:
        """Call `do(address, work)` for all addresses at the same time.

        Returns:
            What each returned or raised, by address, in the order of `work`.

        Raises:
            BaseException: such as Ctrl-C on the calling thread, after `cancellation` has been called.
        """
        if not work:
            return {}
        first, *others = work
        futures: dict[str, Taken[R]] = {}
        ended: queue.SimpleQueue[Taken[R]] = queue.SimpleQueue()
        try:
            for address in others:
                with interrupts_held_back():
                    futures[address] = self._submit(do, address, work[address])
                    futures[address].add_done_callback(ended.put)
            here = [first, *(address for address, future in futures.items() if future.cancelled())]
            results: dict[str, R | Exception] = {}
            for address in here:
                results[address] = _attempt(do, address, work[address])
            for _ in others:
                ended.get()
            for address, future in futures.items():
                if address not in results:
                    outcome = _result(future, address)
                    results[address] = outcome
        except BaseException:
            cancellation.cancel()
            raise
        return {address: results[address] for address in work}

    def close(self) -> None:
        """Let the threads go when they are done."""
        with self._lock:
            self._is_open = False
            if self._pool is not None:
                self._pool.shutdown(wait=False, cancel_futures=True)

    def _submit(self, do: Callable[[str, T], R], address: str, work: T) -> Taken[R]:
        """Let a thread of the pool do it; return a cancelled future where the system has none to give.

        The pool keeps what it has no thread for, and would do it when everybody has gone on: so it is cancelled.
        """
        future: Taken[R] = Future()
        try:
            in_pool = self._threads().submit(_run, future, do, address, work)
            in_pool.add_done_callback(lambda own: own.cancelled() and future.cancel())  # by `close`
        except RuntimeError as error:
            if not self._is_open:
                future.set_result([closed(address, error)])
            else:
                future.cancel()
        return future

    def _threads(self) -> ThreadPoolExecutor:
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(
                    max_workers=_PASSES_AT_ONCE * self._num_servers, thread_name_prefix="moe_autograd remote"
                )
            return self._pool


def _run(future: Taken[R], do: Callable[[str, T], R], address: str, work: T) -> None:
    """Let the future hold what `do` returns or raises, in a list, from which it is taken out.

    An exception has this frame in its traceback, and with it the future: held there it would hold itself.
    """
    if future.set_running_or_notify_cancel():
        outcome: list[R | BaseException] = []
        try:
            outcome.append(do(address, work))
        except BaseException as error:
            outcome.append(error)
        future.set_result(outcome)


def _attempt(do: Callable[[str, T], R], address: str, work: T) -> R | Exception:
    try:
        return do(address, work)
    except Exception as error:
        return error


def _result(future: Taken[R], address: str) -> R | Exception:
    """Return what a thread returned or raised."""
    try:
        outcome = future.result().pop()
    except CancelledError as cancelled:  # by `close`, before a thread took it
        return closed(address, cancelled)
    if isinstance(outcome, BaseException) and not isinstance(outcome, Exception):
        raise outcome
    return outcome


def values_or_raise(results: Mapping[str, R | Exception]) -> list[R]:
    """Return what servers returned, or raise what the first that failed raised."""
    raise_first([result for result in results.values() if isinstance(result, Exception)], "servers")
    return [result for result in results.values() if not isinstance(result, Exception)]


def raise_first(errors: Sequence[Exception], of_what: str) -> None:
    """Raise the first of the errors, if there is one, with a note on how many others there are."""
    if errors:
        if len(errors) > 1:
            errors[0].add_note(f"{len(errors) - 1} other {of_what} failed too.")
        raise errors[0]
