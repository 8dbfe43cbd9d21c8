"""Run many calls at once, on as many threads as they need and no more.

Guarantees:

1. Every call runs, also after others failed, and `run_all` returns when all have come to rest. The exception is
   Ctrl-C, and whatever else the handler of a signal raises on the calling thread: it returns at once, calls that have
   not begun never do, and those that run are left to end by themselves.
2. Calls may wait for each other, all of them, at any nesting depth (unless `max_concurrency` forbids): a call that
   waits never keeps another from starting. Nothing ever waits for a free thread.
3. A thread that is done keeps no reference to what it ran (`_threads`).

The threads of one map are its crew, and how many it has is the crew's business (`_crew`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager

from moe_autograd._crew import Crew, Failure, taken_from
from moe_autograd._habits import Habit
from moe_autograd._interrupts import came_by_signal
from moe_autograd._intraop import get_team_size, num_cores, set_team_size


def run_all(
    call: Callable[[int], None],
    order: range,
    *,
    max_concurrency: int | None = None,
    scope: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext,
    even_shares: bool = False,
    habit: Habit | None = None,
    computes_elsewhere: bool = False,
) -> dict[int, BaseException]:
    """Run `call(index)` for each index, concurrently where they wait or where cores are free.

    Args:
        call: takes the index.
        order: the indices, at least one, in the order in which calls begin.
        max_concurrency: at most so many calls at once; `None` leaves the number to the library.
        scope: entered on each thread that runs calls, the calling thread included, around its share of them.
        even_shares: whether every call has the smallest share of intra-op threads, however many run beside it.
        habit: what such calls did last time; what these do is noted there.
        computes_elsewhere: whether calls mostly queue what an accelerator computes. Then further threads are for those
            that wait alone: two that queue kernels hand each other the interpreter lock, and take twice as long.

    Returns:
        The exceptions of the calls that raised, by index.

    Raises:
        KeyboardInterrupt: Ctrl-C on the calling thread; see guarantee 1.
        BaseException: of another signal's handler, likewise.

    Threads: usable from any thread, also from within a call. Other threads than the caller's run their calls in
    the caller's world (`_ambient`).
    """
    limit = len(order) if max_concurrency is None else min(len(order), max_concurrency)
    if limit == 1:
        run = _run_in_turn_with_smallest_team if even_shares else _run_in_turn
        return run(call, order, scope)
    num_computing = 1 if computes_elsewhere else num_cores()
    return Crew(call, order, limit, scope, even_shares, habit or Habit(), num_computing).run()


def _run_in_turn_with_smallest_team(
    call: Callable[[int], None], order: range, scope: Callable[[], AbstractContextManager[object]]
) -> dict[int, BaseException]:
    """Run the calls one by one with as many intra-op threads as a call has at least."""
    team_size = get_team_size()
    try:
        set_team_size(max(1, team_size.num_threads // num_cores()))
        return _run_in_turn(call, order, scope)
    finally:
        try:
            set_team_size(team_size)
        except BaseException:  # of a signal's handler
            set_team_size(team_size)
            raise


def _run_in_turn(
    call: Callable[[int], None], order: range, scope: Callable[[], AbstractContextManager[object]]
) -> dict[int, BaseException]:
    """Run the calls one by one on the calling thread."""
    failures: dict[int, Failure] = {}
    entered = scope()
    try:
        with entered:
            for index in order:
                try:
                    call(index)
                except BaseException as error:
                    if came_by_signal(error):
                        raise
                    failures[index] = error, error.__traceback__
    except BaseException:
        entered.__exit__(None, None, None)
        raise
    return taken_from(failures)
