"""The client's name and the numbers of its calls, so that a server counts each change once.

A sequence number is *open* from the moment it is given out until its call has an answer or has been given up.
Every call tells the server below which number all are settled; the server need not remember those.

Threads: any; one lock, held for a few operations.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterator

from moe_autograd._interrupts import unwindable


class Numbering:
    """Gives out call ids and sequence numbers, and knows which are open."""

    def __init__(self) -> None:
        self.client_id = os.urandom(16)
        self._call_ids = itertools.count(1)
        self._lock = threading.Lock()
        self._next_sequence = 1
        self._open: set[int] = set()

    def next_call_id(self) -> int:
        """Return a name for a forward, never given before."""
        return next(self._call_ids)

    @unwindable
    def sequences(self, count: int) -> Iterator[tuple[range, int]]:
        """Open `count` numbers for the time of the block; yields them and the `settled_below` to send along."""
        numbers = range(0)
        try:
            with self._lock:
                numbers = range(self._next_sequence, self._next_sequence + count)
                self._next_sequence += count
                self._open.update(numbers)
                settled_below = min(self._open, default=self._next_sequence)
            yield numbers, settled_below
        finally:
            with self._lock:
                self._open.difference_update(numbers)

    def __repr__(self) -> str:
        return f"Numbering({self.client_id.hex()}, next {self._next_sequence}, {len(self._open)} open)"
