"""Threads that wait for servers.

`ThreadPoolExecutor` raises where the system has no thread to give (a limit of the process, or of its container), and
keeps all the same what it had none for: it would do that later, when everybody has gone on.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from moe_autograd.remote.interrupts import interrupts_held_back


class Pool:
    """Some threads, begun when they are needed.

    Args:
        most: how many there are at most.
        name: of what they do.

    Threads: any.
    """

    def __init__(self, most: int, name: str) -> None:
        self._executor = ThreadPoolExecutor(most, thread_name_prefix=f"moe_autograd {name}")

    def try_start(self, do: Callable[[], object]) -> bool:
        """Let a thread do it; return False if there is none, or the pool is closed: then none will do it later."""
        claim = threading.Lock()

        def do_once() -> None:
            if claim.acquire(blocking=False):
                do()

        with interrupts_held_back():  # around it: what a handler of the user's raises is no refusal
            try:
                self._executor.submit(do_once)
            except RuntimeError:  # one of the threads that there are may have taken it
                return not claim.acquire(blocking=False)
        return True

    def close(self) -> None:
        """Let the threads go when they are done."""
        self._executor.shutdown(wait=False)
