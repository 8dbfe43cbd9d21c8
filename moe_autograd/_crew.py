"""The threads that run one map's calls: how many there are, and when each begins.

How many run at once follows from what the calls do:

- The calling thread works too. It starts with the first call while a thread of its own kind, the lookout
  (`_lookout`), takes a first look 0.3 ms later, so a map of tiny calls is over before anybody was woken for it.
- At each look the lookout learns which of the threads that run calls compute, and which wait (`_progress`). While
  fewer compute than there are cores, others are added: as many as there is room on the cores, or two for each that
  waits, whichever is more. Waiting calls thus treble at each look, and 64 of them all run within some 2 ms; computing
  calls get one thread a core. (With three for each, 64 calls end half a millisecond earlier still; but calls that begin
  with waiting and go on with computing would get the more threads.)
- Added threads come one after the other: each wakes the next just before its first call, so that the next one finds
  the interpreter lock free if that call waits. Woken all at once they fight for the lock: 1,024 calls then took 35,000
  changes of threads, against 7,000.
- Calls that compute for less than `TINY_S` are not worth a second thread: their operators are so short that two
  threads mostly hand each other the interpreter lock.
- Calls that only waited in the last map of their kind (`_habits`) get a thread each without a look, and count as
  waiting: nobody looks what their threads do. (Tiny calls are as light, but over before most threads come to one.)
- Where calls computed side by side in the last map of their kind, and no other map runs, there is a thread for each
  core without a look.
- If nothing has ended for a second, one more is added each second whatever the processor times say: a call that
  spins until another one has run looks as if it computed, and rule 2 of `_workers` is to hold for it as well.

The number of threads an operator uses is shared out among the calls that run side by side (`_intraop`).

Mutable state, and who guards it: a crew's `_num_running` its lock; its `_pending`, `_to_come`, `_came`, `_progress` and
`_failures` are changed by single operations that the interpreter makes atomic.
"""

from __future__ import annotations

import contextlib
import functools
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import TypeAlias

from moe_autograd._ambient import Ambient
from moe_autograd._habits import LIGHT_S, Habit
from moe_autograd._interrupts import came_by_signal
from moe_autograd._intraop import end_team, get_team_size, num_cores, set_team_size
from moe_autograd._lookout import LONGEST_PAUSE_S, lookout
from moe_autograd._progress import Progress, here
from moe_autograd._threads import left_in_child, start_soon
from moe_autograd._waiting import acquire

FIRST_LOOK_S = 0.0003
SHORTEST_PAUSE_S = 0.00015  # after threads were added
TINY_S = 0.001
STALL_S = 1.0
ADDED_FOR_EACH = 2  # thread that waits, in a look
MOST_LOOKS_AGAIN = 16  # in a look, at threads that waited before
MOSTLY = 0.75  # of the threads came to a call: so many at least did of 64 that wait 0.3 ms, a third of 64 that are tiny


Failure: TypeAlias = tuple[BaseException, TracebackType | None]


def taken_from(failures: dict[int, Failure]) -> dict[int, BaseException]:
    """Return the failures, and empty the dictionary: frames in their tracebacks hold it, and it is not to hold them.

    An exception that several calls have raised, as that of a future is, has the traceback of the first of them.
    """
    last_first = sorted(failures.items(), reverse=True)
    failures.clear()
    return {index: BaseException.with_traceback(*failure) for index, failure in last_first}


_process = object()  # another one in a forked child


def _start_anew() -> None:
    global _process
    _process = object()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_anew)


def _nothing(index: int) -> None:
    """Stand for the call of a crew that is at rest."""


class Crew:
    """The threads of one map; see `_workers.run_all` for what they are given."""

    def __init__(
        self,
        call: Callable[[int], None],
        order: range,
        limit: int,
        scope: Callable[[], AbstractContextManager[object]],
        even_shares: bool,
        habit: Habit,
        cores: int,
    ) -> None:
        self._call = call
        self._process = _process
        self._habit = habit
        self._even_shares = even_shares
        self._pending = deque(order)
        self._limit = limit
        self._scope = scope
        self._failures: dict[int, Failure] = {}
        self._ambient: Ambient | None = Ambient()
        self._cores = cores  # that many calls may compute at once
        # That many have intra-op threads of their own: where there are more cores than calls, each gets several.
        self._most_shares = num_cores() if even_shares else min(num_cores(), limit)
        self._callers_team = get_team_size()
        self._smallest_share = max(1, self._callers_team.num_threads // self._most_shares)
        self._num_calls = len(order)
        self._num_running = 1
        self._came: list[None] = []  # one for each thread that came to a call
        self._to_come: list[None] = []  # one for each added thread that nobody has woken yet
        self._lock = threading.Lock()
        self._at_rest = threading.Lock()
        self._at_rest.acquire()
        self._progress: dict[int, Progress] = {}
        self.has_grown = False
        self._begun_s = self._last_end_s = time.perf_counter()
        self._last_num_pending = len(order)
        self._pause_s = FIRST_LOOK_S
        self.next_look_s = self._begun_s + FIRST_LOOK_S
        self._cpu_s = 0.0  # of the process, when threads were first added
        self._have_all = habit.only_wait  # whether there is a thread for each call from the beginning
        if self._have_all:
            self._count_in(limit - 1)
            self.next_look_s = self._begun_s + LONGEST_PAUSE_S

    def run(self) -> dict[int, BaseException]:
        """Take part in the calls, wait for the rest, and return the failures."""
        outer = here.progress
        try:
            if self._habit.want_all_cores:
                end_team()
                is_alone = outer is None and not lookout.is_watching
                if is_alone and self._cores > 1 and not self.has_grown:
                    self._count_in(min(self._cores, self._limit) - 1)
            lookout.watch(self)
            self._work()
            if not self._leave():
                if outer is not None:
                    outer.joining = self
                self._wait_for_rest()
            self._note_habit()
        except BaseException:  # Ctrl-C, or a scope that cannot be entered
            self._pending.clear()
            raise
        finally:
            here.progress = outer
            if outer is not None:
                outer.joining = None
            try:
                set_team_size(self._callers_team)
            except BaseException:  # of a signal's handler
                set_team_size(self._callers_team)
                raise
            lookout.forget(self)
            # A lookout that looks just now holds this crew; it is not to hold the calls' tensors.
            self._call, self._scope, self._ambient = _nothing, contextlib.nullcontext, None
        return taken_from(self._failures)

    def _wait_for_rest(self) -> None:
        """Wait until the last thread has left."""
        if self._process is not _process:
            raise RuntimeError(left_in_child())
        acquire(self._at_rest)

    def _work(self, *, is_added: bool = False) -> None:
        scope = self._scope()
        try:
            with scope:
                self._run_pending(is_added)
        except BaseException:
            scope.__exit__(None, None, None)
            raise
        finally:
            if not self._have_all:
                self._progress.pop(threading.get_ident(), None)

    def _run_pending(self, is_added: bool) -> None:
        """Run calls until none is left that has not begun."""
        pending, call = self._pending, self._call
        most, smallest, team_size = self._most_shares, self._smallest_share, 0
        has_come = False
        while pending:
            try:
                index = pending.popleft()
            except IndexError:  # another thread was faster
                return
            # The first call may get company while it runs, and then has the smallest share; later ones know.
            side_by_side = self._num_running if team_size and not self._even_shares else most
            share = smallest if side_by_side >= most else self._callers_team.num_threads // side_by_side
            if share != team_size:
                set_team_size(share)
                team_size = share
            if self._to_come:
                self._wake_next()
            if not has_come:  # there is time for it while the next thread comes
                has_come = True
                self._came.append(None)
                if not self._have_all:  # else the lookout has not to know
                    here.progress = self._progress[threading.get_ident()] = Progress()
            try:
                call(index)
            except BaseException as error:
                if not is_added and came_by_signal(error):
                    raise
                self._failures[index] = error, error.__traceback__

    def _leave(self, count: int = 1) -> bool:
        """Take `count` threads off; return whether none is left."""
        with self._lock:
            self._num_running -= count
            return self._num_running == 0

    def _wake_next(self) -> None:
        """Wake the next of the threads that are to come; before its first call it does the same."""
        if not self._to_come:
            return
        try:
            self._to_come.pop()
        except IndexError:  # another thread was faster
            return
        try:
            if self._pending:
                start_soon(self._help)
                return
        except (RuntimeError, MemoryError):
            pass  # the system has no thread left to give: those that run do the work
        num_left = 1
        with contextlib.suppress(IndexError):
            while True:  # one by one: other threads may do the same, and the lookout add some
                self._to_come.pop()
                num_left += 1
        if self._leave(num_left):
            self._at_rest.release()

    def _help(self) -> None:
        """What an added thread does."""
        ambient = self._ambient
        try:
            if ambient is not None:  # else Ctrl-C has ended the map before this thread came
                ambient.run(functools.partial(self._work, is_added=True))
        except BaseException as error:
            # the world could not be reinstated: no call of ours
            self._failures[self._num_calls] = error, error.__traceback__
        finally:
            if not self._have_all:
                here.progress = None
            self._wake_next()  # if this thread came to no call
            if self._leave():
                self._at_rest.release()

    @property
    def num_pending(self) -> int:
        """How many calls have not begun."""
        return len(self._pending)

    def census(self, now_s: float) -> tuple[int, int]:
        """Return how many threads of this crew compute, and how many wait; those still to come compute.

        A look at a thread takes over a microsecond, with the interpreter lock held. So there are no more looks than
        it takes to see all cores busy, and of the threads that seemed to wait last time only some get another.
        """
        if self._have_all:
            return 0, self._num_running
        # No tuple: it would be allocated in the midst of the walk, which may collect garbage. What runs for that lets
        # threads come and go, and the walk would raise.
        known = [*self._progress.values()]
        num_computing, num_looks_again = max(0, self._num_running - len(known)), 0
        waiting: list[Progress] = []
        for progress in known:
            if num_computing >= self._cores:
                break
            if progress.seemed_to_wait:
                if num_looks_again == MOST_LOOKS_AGAIN:
                    continue
                num_looks_again += 1
            if progress.look(now_s):
                num_computing += 1
            else:
                waiting.append(progress)
        # Whether a thread is queued is dear to learn: one that truly waits settles it for all.
        for progress in waiting[: self._cores + 1]:
            if not progress.is_queued():
                break
            num_computing += 1
        return num_computing, max(0, self._num_running - num_computing)

    def look(self, now_s: float, num_waiting: int, num_computing_everywhere: int, *, is_late: bool) -> None:
        """Add threads if the calls make room for more, and settle when to look again."""
        num_pending, num_running = len(self._pending), self._num_running
        if num_pending != self._last_num_pending:
            self._last_num_pending, self._last_end_s = num_pending, now_s
        room = self._cores - num_computing_everywhere
        if now_s - self._last_end_s > STALL_S:
            self._last_end_s = now_s
            num_added = 1
        elif is_late or room <= 0 or (num_waiting == 0 and self._are_tiny(now_s, num_pending, num_running)):
            num_added = 0
        else:
            num_added = max(room, ADDED_FOR_EACH * num_waiting)
        if self._add(min(num_added, num_pending, self._limit - num_running)):
            self._pause_s = SHORTEST_PAUSE_S
        else:
            self._pause_s = min(1.5 * self._pause_s, LONGEST_PAUSE_S)
        self.next_look_s = now_s + self._pause_s

    def _are_tiny(self, now_s: float, num_pending: int, num_running: int) -> bool:
        num_done = max(1, self._num_calls - num_pending - num_running)
        return (now_s - self._begun_s) * num_running / num_done < TINY_S

    def _add(self, count: int) -> bool:
        if count <= 0:
            return False
        # One that leaves has the lock for a moment; but a handler of a signal may make it long, and need the lookout.
        if not self._lock.acquire(blocking=False):
            return False
        try:
            if self._num_running == 0:  # all came to rest meanwhile
                return False
            self._count_in(count)
        finally:
            self._lock.release()
        self._wake_next()
        return True

    def _count_in(self, count: int) -> None:
        """Let `count` threads come, as soon as somebody wakes the first."""
        if not self.has_grown:
            self.has_grown, self._cpu_s = True, time.process_time()
        self._num_running += count
        self._to_come.extend([None] * count)

    def _note_habit(self) -> None:
        """Note what the calls of this map did."""
        cpu_s = time.process_time() - self._cpu_s if self.has_grown else 0.0
        # whether each call needed a thread, or nearly, and the calls computed for next to nothing
        only_waited = len(self._came) > MOSTLY * self._limit and cpu_s < LIGHT_S * self._num_calls
        computed = self.has_grown and cpu_s >= TINY_S * self._num_calls
        side_by_side_s = time.perf_counter() - self._begun_s if computed else 0.0
        self._habit.note(only_waited=only_waited, side_by_side_s=side_by_side_s)
