"""What calls of one kind did last time: whether all they did was wait.

To find out that its calls wait takes a map some 2 ms (`_workers`), each time. Calls of one autograd function mostly do
the same again, so the next map of that function begins with what the last one has found out.

A habit is a guess. A map whose calls compute after all sends home the threads that have not come yet.

Threads: any may ask and note. Two maps of one function at a time may note different things: either will do.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

LIGHT_S = 0.0003  # of processor time for each call: mostly what a thread costs that wakes up and goes to sleep again


class Habit:
    """What the calls of one kind do."""

    __slots__ = ("__weakref__", "only_wait")

    def __init__(self) -> None:
        self.only_wait = False


_habits: tuple[WeakKeyDictionary[object, Habit], ...] = (WeakKeyDictionary(), WeakKeyDictionary())


def habit_of(kind: object, *, is_backward: bool) -> Habit:
    """Return what forwards, or backwards, of `kind` did last time; it goes with `kind`."""
    habits = _habits[is_backward]
    found = habits.get(kind)
    return habits.setdefault(kind, Habit()) if found is None else found
