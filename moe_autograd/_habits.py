"""What calls of one kind did last time: whether all they did was wait, or whether they computed side by side.

To find out that its calls wait takes a map some 2 ms (`_crew`), each time. Calls of one autograd function, or of
modules of one class, mostly do the same again, so the next map of that kind begins with what the last one found out.

A habit is a guess. A map whose calls compute after all has a thread for most of them: all are woken before anybody can
tell. Where a kind's calls wait in one map and compute in the next (a cache, two layers that share it), every other
guess would be wrong. So each wrong one doubles how many maps in a row must have only waited, up to `MOST_NEEDED`.

Calls that computed side by side want all cores, from the beginning: the next map of that kind has a thread for each.
The calling thread has mostly just used its team, for a router or a loss, and its members spin for `SPIN_S` (`_intraop`,
rule 5). So it ends that first: behind a plain loop, forwards of eight transformer layers take 18 to 21 ms for 20 to 22.
A wrong guess costs 60 us on two cores.

Threads: any may ask and note. Two maps of one kind at a time may note different things: either will do.
"""

from __future__ import annotations

from weakref import WeakKeyDictionary

from moe_autograd._intraop import SPIN_S

LIGHT_S = 0.0003  # of processor time for each call: mostly what a thread costs that wakes up and goes to sleep again
MOST_NEEDED = 16


class Habit:
    """What the calls of one kind do.

    Attributes:
        only_wait: whether they are expected to do nothing but wait.
        want_all_cores: whether they are expected to compute side by side, for longer than a team spins, and none for
            next to nothing.
    """

    __slots__ = ("__weakref__", "_num_in_row", "_num_needed", "only_wait", "want_all_cores")

    def __init__(self) -> None:
        self.only_wait = self.want_all_cores = False
        self._num_in_row = 0  # maps of late that only waited
        self._num_needed = 1  # until the next one is expected to

    def note(self, *, only_waited: bool, side_by_side_s: float = 0.0) -> None:
        """Note what the calls of a map did, and how long, if they did it on several threads."""
        self.want_all_cores = side_by_side_s >= SPIN_S and not only_waited
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
