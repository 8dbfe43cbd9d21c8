"""The thread that looks at the crews which have calls left, and lets them grow.

It only keeps time; what a look means is the crew's own business (`_crew`).
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from typing import Protocol

from moe_autograd._threads import IDLE_S, start_soon

LONGEST_PAUSE_S = 0.002
DOZE_S = 0.05

_LATE_S = 0.001


class Watched(Protocol):
    """A crew, as the lookout sees it."""

    next_look_s: float  # on the clock of `time.perf_counter`
    has_grown: bool

    @property
    def num_pending(self) -> int:
        """How many calls have not begun."""

    def census(self, now_s: float) -> tuple[int, int]:
        """Return how many threads of this crew compute, and how many wait."""

    def look(self, now_s: float, num_waiting: int, num_computing_everywhere: int, *, is_late: bool) -> None:
        """Add threads if the calls make room for more, and settle when to look again."""


class Lookout:
    """The thread that looks at the crews which have calls left, and adds threads to them.

    It sleeps until the next look is due. A new crew rings if the lookout would wake too late for it; a ring costs a
    tiny map a tenth of its time, so after a map that needed nobody the lookout stays half awake for `DOZE_S`, looks
    every `LONGEST_PAUSE_S`, and is not rung for. `IDLE_S` without crews, and it gives its thread back.

    A handler of a signal, or a finalizer, may make a map wherever its thread is: so nobody waits for a lock here. Each
    side first writes, and then reads what the other one writes, so that of two who meet at least one sees the other.
    The interpreter makes each of these steps atomic.
    """

    def __init__(self) -> None:
        self._crews: list[Watched] = []
        self._wakes_at_s = 0.0
        self._dozes_until_s = 0.0
        # The place of the lookout, of which there is one: whoever pops it has it.
        self._vacant: list[None] = [None]
        self._bell = threading.Lock()  # held; released once to ring
        self._bell.acquire()

    @property
    def is_watching(self) -> bool:
        """Whether there are crews that may have calls left."""
        return bool(self._crews)

    def watch(self, crew: Watched) -> None:
        """Look at `crew` from now on, until it has no calls left that have not begun."""
        self._crews.append(crew)
        if self._vacant:
            with contextlib.suppress(RuntimeError):  # no thread left: the caller makes its calls in turn
                start_soon(self._stand)
        elif self._would_be_late_for(crew):
            with contextlib.suppress(RuntimeError):  # it has been rung already
                self._bell.release()

    def _would_be_late_for(self, crew: Watched) -> bool:
        is_dozing = crew.next_look_s < self._dozes_until_s
        return self._wakes_at_s > crew.next_look_s + (LONGEST_PAUSE_S if is_dozing else 0.0)

    def _due_s(self, crew: Watched, now_s: float) -> float:
        """Return when to look at `crew`: half awake, the lookout keeps its own time until somebody has grown."""
        if crew.has_grown or now_s > self._dozes_until_s:
            return crew.next_look_s
        return max(crew.next_look_s, now_s + LONGEST_PAUSE_S)

    def forget(self, crew: Watched) -> None:
        """Keep no reference to `crew`, which is at rest or abandoned."""
        self._remove(crew)
        self._dozes_until_s = 0.0 if crew.has_grown else crew.next_look_s + DOZE_S

    def _remove(self, crew: Watched) -> None:
        with contextlib.suppress(ValueError):  # it has no calls left, and the lookout has done so
            self._crews.remove(crew)

    def _remove_begun(self) -> None:
        """Keep no reference to crews that have no calls left that have not begun."""
        for crew in [*self._crews]:
            if not crew.num_pending:
                self._remove(crew)

    def _stand(self) -> None:
        if not self._claims_place():  # another one was faster
            return
        try:
            self._look_on()
        except BaseException:
            self._vacant.append(None)  # the next crew finds another one
            raise

    def _claims_place(self) -> bool:
        try:
            self._vacant.pop()
        except IndexError:
            return False
        return True

    def _look_on(self) -> None:
        while True:
            was_idle, due_s = self._settle_next_look()
            has_rung = self._bell.acquire(timeout=max(0.0, due_s - time.perf_counter()))
            self._remove_begun()
            if was_idle and not has_rung and not self._crews and self._leaves():
                return
            crews = [*self._crews]
            _look(crews, due_s)
            del crews  # while it sleeps, the lookout keeps nobody's calls alive

    def _settle_next_look(self) -> tuple[bool, float]:
        """Return whether there is nothing to look at, and when to look next."""
        while True:
            crews, now_s = [*self._crews], time.perf_counter()
            was_idle = not crews and now_s > self._dozes_until_s
            idle_until_s = now_s + (IDLE_S if was_idle else LONGEST_PAUSE_S)
            self._wakes_at_s = due_s = min((self._due_s(crew, now_s) for crew in crews), default=idle_until_s)
            if self._crews == crews:  # else one has come that did not know when the lookout wakes
                return was_idle, due_s

    def _leaves(self) -> bool:
        """Give the place back; return False if a crew has come that took it for filled, and nobody else has it."""
        self._vacant.append(None)
        return not self._crews or not self._claims_place()


def _look(crews: list[Watched], due_s: float) -> None:
    """Look at the crews whose time has come.

    A late look says that the interpreter lock is fought over: a thread without progress may just lack the lock.
    """
    now_s = time.perf_counter()
    censuses = [crew.census(now_s) for crew in crews]
    total = sum(num_computing for num_computing, _ in censuses)
    for crew, (num_computing, num_waiting) in zip(crews, censuses, strict=True):
        if crew.next_look_s <= now_s:
            is_late = now_s - due_s > _LATE_S and num_computing > 0
            crew.look(now_s, num_waiting, total, is_late=is_late)


lookout = Lookout()


def _start_anew() -> None:
    """In a forked child nobody looks, and no lock is held by a thread that the child does not have."""
    lookout.__init__()  # type: ignore[misc]  # the same object, since others have imported it


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_anew)
