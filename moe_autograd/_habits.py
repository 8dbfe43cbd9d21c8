"""What calls of one kind did last time: whether all they did was wait.

To find out that its calls wait takes a map some 2 ms (`_crew`), each time. Calls of one autograd function, or of
modules of one class, mostly do the same again, so the next map of that kind begins with what the last one found out.

A habit is a guess. A map whose calls compute after all has a thread for most of them: all are woken before anybody can
tell. Where a kind's calls wait in one map and compute in the next (a cache, two layers that share it), every other
guess would be wrong. So each wrong one doubles how many maps in a row must have only waited, up to `MOST_NEEDED`.

Threads: any may ask and note. Two maps of one kind at a time may note different things: either will do.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

LIGHT_S = 0.0003  # of processor time for each call: mostly what a thread costs that wakes up and goes to sleep again
MOST_NEEDED = 16


class Habit:
    """What the calls of one kind do."""

    __slots__ = ("__weakref__", "_num_in_row", "_num_needed", "only_wait")

    def __init__(self) -> None:
        self.only_wait = False
        self._num_in_row = 0  # maps of late that only waited
        self._num_needed = 1  # until the next one is expected to

    def note(self, *, only_waited: bool) -> None:
        """Note what the calls of a map did."""
        if self.only_wait and not only_waited:
            self._num_needed = min(2 * self._num_needed, MOST_NEEDED)
        self._num_in_row = self._num_in_row + 1 if only_waited else 0
        self.only_wait = self._num_in_row >= self._num_needed


_habits: tuple[WeakKeyDictionary[object, Habit], ...] = (WeakKeyDictionary(), WeakKeyDictionary())


def habit_of(kind: object, *, is_backward: bool) -> Habit:
    """Return what forwards, or backwards, of `kind` did last time; it goes with `kind`."""
    habits = _habits[is_backward]
    found = habits.get(kind)
    return habits.setdefault(kind, Habit()) if found is None else found
