"""The client's name and the numbers of its calls, so that a server counts each change once.

A sequence number is *open* from the moment it is given out until its call has an answer or has been given up. That of
a step that raised stays open until its experts gather or forget gradients: repeated before, it has the same number, and
servers that have made it make no other. So does that of a step that was made: if Ctrl-C comes before its caller has
heard of it, or in an `in_thread` the task is cancelled, it counts as one that raised.

Every call tells the server below which number all are settled; the server need not remember those.

Threads: any; one lock, held for a few operations.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Collection, Iterator
from functools import partial

from moe_autograd._interrupts import uninterrupted, unwindable
from moe_autograd.remote.awaiting import SCOPE

_NONE: tuple[frozenset[str], range] = frozenset(), range(0)


class Numbering:
    """Gives out call ids and sequence numbers, and knows which are open."""

    def __init__(self) -> None:
        self.client_id = os.urandom(16)
        self._call_ids = itertools.count(1)
        self._lock = threading.Lock()
        self._next_sequence = 1
        self._open: set[int] = set()  # of what is under way
        self._unmade: dict[frozenset[str], range] = {}  # open, too: of steps, by their experts
        self._unheard: dict[frozenset[str], range] = {}  # likewise, of those made
        self._just_settled = _NONE  # of the last step, which may yet raise

    def next_call_id(self) -> int:
        """Return a name for a forward, never given before."""
        return next(self._call_ids)

    @unwindable
    def sequences(self, count: int, step_of: Collection[str] = ()) -> Iterator[tuple[range, int]]:
        """Open `count` numbers for the time of the block; yields them and the `settled_below` to send along.

        Args:
            count: how many.
            step_of: experts, of a step that may be repeated: if the block raises, the next one has the same numbers.
        """
        numbers, experts = range(0), frozenset(step_of)
        with uninterrupted() as section:  # also while one waits for the lock
            try:
                with self._lock:
                    numbers = self._unmade.get(experts) or self._new(count)
                    if experts:
                        self._unmade[experts] = numbers
                        self._unheard.pop(experts, None)  # it is another one
                    self._open.update(numbers)
                    settled_below = min(self._all_open(), default=self._next_sequence)
                with section.opened():
                    yield numbers, settled_below
                self._note_made(experts, numbers)
            finally:
                with self._lock:
                    self._open.difference_update(numbers)

    def _note_made(self, experts: frozenset[str], numbers: range) -> None:
        with self._lock:
            if self._unmade.pop(experts, None) is None:
                return
            self._unheard[experts] = numbers
        if scope := SCOPE.get():
            scope.note_step((self, experts), partial(self._hear, experts, numbers))

    def settle(self, step_of: Collection[str], numbers: range) -> None:
        """Settle a step that was made, whose caller is about to hear of it."""
        if SCOPE.get() is not None:
            return  # the scope will
        with uninterrupted():
            self._hear(frozenset(step_of), numbers, was_heard=True)

    def let_repeat(self, step_of: Collection[str], numbers: range) -> None:
        """Let a step be repeated that raised though it was made, as where Ctrl-C came just then."""
        experts = frozenset(step_of)
        with uninterrupted():
            with self._lock:
                if self._just_settled == (experts, numbers):
                    self._unheard[experts] = numbers
            self._hear(experts, numbers, was_heard=False)

    def _hear(self, experts: frozenset[str], numbers: range, was_heard: bool) -> None:
        """Settle the numbers of a step that was made, or let it be repeated; not if gradients came or went since."""
        with self._lock:
            if self._unheard.get(experts) == numbers:
                del self._unheard[experts]
                if was_heard:
                    self._just_settled = experts, numbers
                else:
                    self._unmade[experts] = numbers

    def _all_open(self) -> set[int]:
        return self._open.union(*self._unmade.values(), *self._unheard.values())

    def _new(self, count: int) -> range:
        numbers = range(self._next_sequence, self._next_sequence + count)
        self._next_sequence += count
        return numbers

    def settle_steps(self, names: Collection[str]) -> None:
        """Let the next step of any of these experts be another one: it has other gradients."""
        with self._lock:
            for steps in (self._unmade, self._unheard):
                for experts in [own for own in steps if not own.isdisjoint(names)]:
                    del steps[experts]
            if not self._just_settled[0].isdisjoint(names):
                self._just_settled = _NONE

    def __repr__(self) -> str:
        return f"Numbering({self.client_id.hex()}, next {self._next_sequence}, {len(self._all_open())} open)"
