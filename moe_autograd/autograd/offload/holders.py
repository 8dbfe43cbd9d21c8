"""Which threads hold parts, and which of them wait for more: all of them, and nobody would ever go on.

No locks here: `Residency` has the only one.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator

from moe_autograd._contexts import contextmanager


class Holders:
    """Threads that hold parts or wait for room."""

    def __init__(self) -> None:
        self._num_holds: Counter[int] = Counter()  # by thread: one may hold several times
        self._waiting: set[int] = set()

    def begin(self) -> None:
        """Say that the current thread holds something, once more."""
        self._num_holds[threading.get_ident()] += 1

    def end(self) -> None:
        """Take back one `begin` of the current thread."""
        me = threading.get_ident()
        self._num_holds[me] -= 1
        if not self._num_holds[me]:
            del self._num_holds[me]

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Inside, the current thread waits for room."""
        me = threading.get_ident()
        self._waiting.add(me)
        try:
            yield
        finally:
            self._waiting.discard(me)

    @property
    def all_wait(self) -> bool:
        """Whether there are threads that hold something, and each of them waits: none will let go."""
        return bool(self._num_holds) and self._num_holds.keys() <= self._waiting
