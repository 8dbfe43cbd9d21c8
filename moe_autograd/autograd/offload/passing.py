"""Parts that go with a graph. Their places in the store are used again, since a file is best written over.

A graph may go by the garbage collector, in the middle of anything: on a thread that has `Residency`'s lock, or that
writes the very part. So whoever loses a part only says so, and waits for nothing; the part is put away by the next who
has the lock anyway.
"""

from __future__ import annotations

import itertools
from collections import deque

from moe_autograd.autograd.offload.flat import Layout
from moe_autograd.autograd.offload.parts import Part


class Passing:
    """Parts that go, and the names of those that have gone. `Residency` has the lock, but for `lose`."""

    def __init__(self) -> None:
        self._free_names: dict[int, list[str]] = {}  # by size
        self._lost: deque[Part] = deque()
        self._serial_numbers = itertools.count()

    def new(self, layout: Layout) -> Part:
        """Return a part; it gets the name of one of its size that has gone, if there is any."""
        names = self._free_names.get(layout.num_bytes)
        return Part(names.pop() if names else f"activations-{next(self._serial_numbers):08}", layout)

    def lose(self, part: Part) -> None:
        """Say that nobody has a part any more; from anywhere, at any time."""
        self._lost.append(part)

    def take_lost(self) -> list[Part]:
        """Return those that are to be put away, and can be now; their names are free."""
        taken = []
        for _ in range(len(self._lost)):
            part = self._lost.popleft()
            if part.is_busy:
                self._lost.append(part)
            else:
                self._free_names.setdefault(part.layout.num_bytes, []).append(part.name)
                taken.append(part)
        return taken
