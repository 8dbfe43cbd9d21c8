"""What users have under way on a connection: each operation has one deadline, and all its parts are cancelled together.

Mutable state: the operations under way, under `_lock`.

Threads: any number of operations at once.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from moe_autograd.remote.awaiting import SCOPE
from moe_autograd.remote.deadline import Deadline
from moe_autograd.remote.fanout import Cancellation


@dataclass(frozen=True)
class Operation:
    """One thing a user asked for."""

    deadline: Deadline
    cancellation: Cancellation

    def part(self, timeout_s: float) -> Operation:
        """Return a part of it, of so many seconds from now on, and not after its end."""
        return Operation(self.deadline.part(timeout_s), self.cancellation)


class Operations:
    """All of one connection.

    Args:
        given: the addresses that the user gave, for errors.
        timeout_s: of each operation.
    """

    def __init__(self, given: Sequence[str], timeout_s: float) -> None:
        self._given = given
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._under_way: set[Cancellation] = set()
        self._is_open = True
        self._process = os.getpid()

    @property
    def is_here(self) -> bool:
        """Whether this is the process that connected, and not its fork."""
        return os.getpid() == self._process

    @contextmanager
    def begin(self) -> Iterator[Operation]:
        """Begin an operation: its deadline runs, and `close` cancels it, or the scope that this thread is in.

        Raises:
            RuntimeError: in a forked child.
        """
        if not self.is_here:
            raise RuntimeError(
                f"connection to {', '.join(self._given)}: expected to be used in the process that made it, "
                f"{self._process}, got {os.getpid()}, its fork. A fork cannot share a connection: connect anew in it."
            )
        cancellation, scope = Cancellation(), SCOPE.get()
        if scope is not None:
            scope.add(cancellation)
        with self._lock:
            self._under_way.add(cancellation)
            if not self._is_open:  # nothing is waited for any more: what is tried fails, once
                cancellation.cancel()
        try:
            yield Operation(Deadline(self._timeout_s), cancellation)
        finally:
            with self._lock:
                self._under_way.discard(cancellation)
            if scope is not None:
                scope.remove(cancellation)

    def close(self) -> None:
        """Cancel what is under way."""
        with self._lock:
            self._is_open = False
            under_way = tuple(self._under_way)
        for cancellation in under_way:
            cancellation.cancel()

    def __repr__(self) -> str:
        return f"Operations({len(self._under_way)} under way, timeout_s={self._timeout_s})"
