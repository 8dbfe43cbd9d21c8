"""Parts that go with a graph. Their places in the store are used again, since a file is best written over.

A graph may go by the garbage collector, in the middle of anything: on a thread that has `Residency`'s lock, or that
writes the very part. So whoever loses a part only says so, and waits for nothing; the part is put away by the next who
has the lock anyway.

A place serves parts of its size alone, and a router's counts give other sizes in each step. So places are kept only up
to what parts have taken at the same time; those of the size that went least recently are given up.
"""

from __future__ import annotations

import itertools
from collections import deque

from moe_autograd.autograd.offload.flat import Layout
from moe_autograd.autograd.offload.parts import Part


class Passing:
    """Parts that go, and the names of those that have gone. `Residency` has the lock, but for `lose`."""

    def __init__(self) -> None:
        # by size, the one that went last at the end; none is empty
        self._free_names: dict[int, list[str]] = {}
        self._lost: deque[Part] = deque()
        self._serial_numbers = itertools.count()
        self._used_bytes = self._peak_bytes = self._free_bytes = 0

    def new(self, layout: Layout) -> Part:
        """Return a part; it gets the name of one of its size that has gone, if there is any."""
        size = layout.num_bytes
        self._used_bytes += size
        self._peak_bytes = max(self._peak_bytes, self._used_bytes)
        name = self._take_free(size) if size in self._free_names else None
        return Part(name or f"activations-{next(self._serial_numbers):08}", layout)

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
                self._free(part)
                taken.append(part)
        return taken

    def take_needless(self) -> str | None:
        """Return a free name that no part gets any more, as long as places take more than parts ever have."""
        if self._used_bytes + self._free_bytes <= self._peak_bytes:
            return None
        return self._take_free(next(iter(self._free_names)))

    def _free(self, part: Part) -> None:
        size = part.layout.num_bytes
        self._used_bytes -= size
        self._free_bytes += size
        names = self._free_names.pop(size, [])
        names.append(part.name)
        self._free_names[size] = names

    def _take_free(self, size: int) -> str:
        names = self._free_names[size]
        name = names.pop()
        if not names:
            del self._free_names[size]
        self._free_bytes -= size
        return name
