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
        self._waiting: dict[int, int] = {}  # by thread: how many news it knows
        self._stands_for: dict[int, int] = {}  # by thread: which other waits for it

    def begin(self) -> None:
        """Say that the current thread holds something, once more."""
        self._num_holds[threading.get_ident()] += 1

    def end(self) -> None:
        """Take back one `begin` of the current thread."""
        me = threading.get_ident()
        self._num_holds[me] -= 1
        if not self._num_holds[me]:
            del self._num_holds[me]

    @property
    def has_current(self) -> bool:
        """Whether the current thread holds something, or the one that it stands for."""
        me = threading.get_ident()
        return me in self._num_holds or self._stands_for.get(me) in self._num_holds

    @contextmanager
    def standing_for(self, thread: int) -> Iterator[None]:
        """Inside, the current thread works for another one, which waits for it."""
        me = threading.get_ident()
        self._stands_for[me] = thread
        try:
            yield
        finally:
            del self._stands_for[me]

    @contextmanager
    def waiting(self, num_news: int) -> Iterator[None]:
        """Inside, the current thread waits for room: with so many news there was none.

        Waits may be nested: in the midst of one the handler of a signal may wait.
        """
        me = threading.get_ident()
        before = self._waiting.get(me)
        self._waiting[me] = num_news
        try:
            yield
        finally:
            if before is None:
                del self._waiting[me]
            else:
                self._waiting[me] = before

    def all_wait(self, num_news: int) -> bool:
        """Whether there are threads that hold something, and each of them waits: none will let go.

        Who has been told of news since is about to look again, and may go on. The last to wait again sees all others.
        A thread waits with the one that stands for it.
        """
        waiting = {one for one, known in self._waiting.items() if known == num_news}
        waiting |= {self._stands_for[one] for one in waiting & self._stands_for.keys()}
        return bool(self._num_holds) and self._num_holds.keys() <= waiting
