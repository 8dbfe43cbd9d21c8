"""Do something at several servers at the same time.

The calling thread serves the first itself; each other one gets a thread of a small pool, or is served after the first
where the system has no thread to give. All come to rest before the caller goes on, except on Ctrl-C: then what is under
way is cancelled and the caller goes on at once.

The threads wait for servers only, never for each other. The calling thread waits for them at a queue, since Ctrl-C can
leave the lock of a future locked.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

from moe_autograd._waiting import get
from moe_autograd.errors import RemoteError
from moe_autograd.remote.cancelling import Cancellation
from moe_autograd.remote.pool import Pool

T = TypeVar("T")
R = TypeVar("R")

_PASSES_AT_ONCE = 8


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
            if not self._pool.try_start(partial(do_on_thread, address, work[address])):
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
