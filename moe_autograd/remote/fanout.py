"""Do something at several servers at the same time.

The calling thread serves the first itself; each other one gets a thread of a small pool, or is served after the first
where the system has no thread to give. All come to rest before the caller goes on, except on Ctrl-C: then what is under
way is cancelled and the caller goes on at once.

The threads wait for servers only, never for each other. The calling thread waits for them at a queue, since Ctrl-C can
leave the lock of a future locked.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from moe_autograd._waiting import get, wait
from moe_autograd.errors import RemoteError
from moe_autograd.remote.interrupts import interrupts_held_back
from moe_autograd.remote.pool import Pool

T = TypeVar("T")
R = TypeVar("R")

_PASSES_AT_ONCE = 8


class Cancellation:
    """What is under way, so that it can be cancelled from another thread: of one operation, or several operations.

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

    @property
    def is_unwanted(self) -> bool:
        """Whether it was cancelled without a reason of its own: by `close`, with its task, or by Ctrl-C."""
        return self._is_cancelled and not self.reason

    def cancel(self, reason: str = "") -> None:
        """Cancel all that is under way, and whatever may be added; the first `reason` says why, if one is given."""
        with interrupts_held_back():  # a second Ctrl-C would leave the rest, or a lock of grpc's locked
            with self._lock:
                if not self._is_cancelled:
                    self.reason = reason
                    self._is_cancelled = True
                    self._bell.release()
                cancels = tuple(self._cancels)
            for cancel in cancels:
                cancel()

    def wait(self, pause_s: float) -> bool:
        """Pause; return at once with True if the operation is cancelled."""
        if not self._is_cancelled and pause_s > 0 and wait(self._hear, pause_s):
            self._bell.release()  # for others that wait
        return self._is_cancelled

    def _hear(self, pause_s: float) -> bool:
        return self._bell.acquire(timeout=pause_s)

    def __repr__(self) -> str:
        return f"Cancellation({len(self._cancels)} under way)"


class Fanout:
    """Threads for some servers.

    Args:
        num_servers: how many there are.
    """

    def __init__(self, num_servers: int) -> None:
        self._pool = Pool(_PASSES_AT_ONCE * max(num_servers, 1), "remote")

    def at_each(
        self, work: Mapping[str, T], do: Callable[[str, T], R], cancellation: Cancellation
    ) -> dict[str, R | Exception]:
        """Call `do(address, work)` for all addresses at the same time.

        Returns:
            What each returned or raised, by address, in the order of `work`.

        Raises:
            BaseException: such as Ctrl-C on the calling thread, after `cancellation` has been called.
        """
        try:
            if len(work) == 1:  # mostly: without a queue
                return {address: attempt(do, address, own) for address, own in work.items()}
            return self._at_several(work, do)
        except BaseException:
            cancellation.cancel()
            raise

    def _at_several(self, work: Mapping[str, T], do: Callable[[str, T], R]) -> dict[str, R | Exception]:
        ended: queue.SimpleQueue[tuple[str, R | BaseException]] = queue.SimpleQueue()

        def do_on_thread(address: str, own: T) -> None:
            try:
                ended.put((address, attempt(do, address, own)))
            except BaseException as error:
                ended.put((address, error))

        results: dict[str, R | Exception] = {}
        here = list(work)[:1]
        for address in list(work)[1:]:
            if not self._pool.has_taken(partial(do_on_thread, address, work[address])):
                here.append(address)
        for address in here:
            results[address] = attempt(do, address, work[address])
        while len(results) < len(work):
            address, outcome = get(ended)
            if isinstance(outcome, BaseException) and not isinstance(outcome, Exception):
                raise outcome
            results[address] = outcome
        return {address: results[address] for address in work}

    def close(self) -> None:
        """Let the threads go when they are done."""
        self._pool.close()


def attempt(do: Callable[[str, T], R], address: str, work: T) -> R | Exception:
    """Return what `do` returned or raised; our errors tell where, and go on without a traceback, which knows them."""
    try:
        return do(address, work)
    except RemoteError as error:
        return error.with_traceback(None)
    except Exception as error:
        return error


def values_or_raise(results: dict[str, R | Exception]) -> list[R]:
    """Return what servers returned, or raise what the first that failed raised; the results go from their dict."""
    values = [result for result in results.values() if not isinstance(result, Exception)]
    errors = [result for result in results.values() if isinstance(result, Exception)]
    results.clear()  # as in `raise_first`
    raise_first(errors, "servers")
    return values


def raise_first(errors: list[Any], of_what: str) -> None:
    """Raise the first of the errors, if there is one, with a note on how many others there are; empty the list."""
    if errors:
        if len(errors) > 1:
            errors[0].add_note(f"{len(errors) - 1} more of the {of_what} failed.")
        try:
            raise errors[0]
        finally:
            errors.clear()  # frames in the traceback hold the list: the exception must not hold itself
