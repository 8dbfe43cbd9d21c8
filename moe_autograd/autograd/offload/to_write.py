"""Changed parts on their way to the store, in the order in which they are written (Rule 4 of `residency`).

No locks here: `Residency` has the only one.
"""

from __future__ import annotations

from collections import OrderedDict

from moe_autograd.autograd.offload.parts import Part


class ToWrite:
    """The queue of parts to write. A part that is held waits in it, unless it is to be written all the same."""

    def __init__(self) -> None:
        self._queue: OrderedDict[Part, bool] = OrderedDict()  # whether even if it is held

    def add(self, part: Part) -> None:
        """Write it when those before it are written."""
        self._queue.setdefault(part, False)

    def add_first(self, part: Part) -> None:
        """Write it before all others: somebody waits for its room."""
        self._queue[part] = False
        self._queue.move_to_end(part, last=False)

    def add_though_held(self, part: Part) -> None:
        """Write it in any case: somebody waits for the store to have everything."""
        self._queue[part] = True

    @property
    def has_next(self) -> bool:
        """Whether any may be written now."""
        return any(map(self._may_write, self._queue))

    @property
    def has_some_though_held(self) -> bool:
        """Whether any is yet to be written in any case."""
        return any(self._queue.values())

    def take_next(self) -> Part | None:
        """Take the first that may be written now and still is changed; mark it as being written."""
        for part in [part for part in self._queue if self._may_write(part)]:
            del self._queue[part]
            if part.is_changed and part.buffer is not None:
                part.is_writing, part.is_changed = True, False
                return part
        return None

    def _may_write(self, part: Part) -> bool:
        return part.num_holders == 0 or self._queue[part]
