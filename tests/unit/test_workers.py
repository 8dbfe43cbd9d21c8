"""How many threads a map gets, and what is left of them."""

from __future__ import annotations

import contextlib
import gc
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_autograd import _crew, _habits, _threads
from moe_autograd._crew import MOST_LOOKS_AGAIN, Crew
from moe_autograd._habits import LIGHT_S, Habit, habit_of
from moe_autograd._intraop import (
    SPIN_S,
    _openmp,
    _set_mkl_threads,
    get_team_size,
    num_cores,
    set_team_size,
)
from moe_autograd._lookout import lookout
from moe_autograd._workers import run_all
from tests.support.lookouts import NobodyLooks
from tests.support.subprocesses import assert_prints, run_ranks

ROOT = Path(__file__).parents[2]


def names_of_threads(num_calls: int, **options: int) -> set[str]:
    names: set[str] = set()
    assert run_all(lambda _: names.add(threading.current_thread().name), range(num_calls), **options) == {}
    return names


def test_calls_that_wait_for_each_other_all_run_at_once() -> None:
    barrier = threading.Barrier(64)
    assert run_all(lambda _: void(barrier.wait(60)), range(64)) == {}


def test_a_bound_is_kept() -> None:
    """Three at a time meet at a barrier, so three do run at once; a fourth would be counted."""
    running, most, lock, barrier = set[int](), [0], threading.Lock(), threading.Barrier(3)

    def call(index: int) -> None:
        with lock:
            running.add(index)
            most[0] = max(most[0], len(running))
        barrier.wait(60)
        with lock:
            running.discard(index)

    assert run_all(call, range(24), max_concurrency=3) == {}
    assert most[0] == 3


def test_one_call_at_a_time_needs_no_other_thread() -> None:
    assert names_of_threads(50, max_concurrency=1) == {threading.current_thread().name}


def test_failures_come_back_by_index_and_every_call_runs() -> None:
    ran: list[int] = []

    def call(index: int) -> None:
        ran.append(index)
        if index % 2:
            raise LookupError(index)

    failures = run_all(call, range(6))
    assert sorted(ran) == list(range(6))
    assert {index: type(error) for index, error in failures.items()} == dict.fromkeys((1, 3, 5), LookupError)


def test_the_scope_is_entered_on_each_thread_that_runs_calls() -> None:
    barrier, entered = threading.Barrier(8), set[str]()

    @contextlib.contextmanager
    def scope() -> Iterator[None]:
        entered.add(threading.current_thread().name + str(threading.get_ident()))
        yield

    run_all(lambda _: void(barrier.wait(60)), range(8), scope=scope)
    assert len(entered) == 8


def test_idle_threads_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_threads, "IDLE_S", 0.01)
    barrier = threading.Barrier(8)
    run_all(lambda _: void(barrier.wait(60)), range(8))
    leaving = [thread for thread in tuple(_threads._threads) if thread is not threading.current_thread()]
    for thread in leaving:
        thread.join(60)
    assert not any(thread.is_alive() for thread in leaving)


def test_a_team_is_set_for_one_thread_and_no_other() -> None:
    before = get_team_size()
    sizes: list[int] = []

    def note() -> None:
        sizes.append(torch.get_num_threads())

    def change() -> None:
        set_team_size(before.num_threads + 1)
        note()

    for action in (change, note):  # the second thread is made after the first has changed its team
        thread = threading.Thread(target=action)
        thread.start()
        thread.join()
    assert sizes == [before.num_threads + 1, before.num_threads]
    assert get_team_size() == before
    assert num_cores() >= 1


@pytest.mark.skipif(_set_mkl_threads is None, reason="this torch has no MKL")
@pytest.mark.parametrize(
    ("variable", "action", "mkl_is_told"),
    [(None, None, False), (None, "torch.set_num_threads(num)", True), ("MKL_NUM_THREADS", None, False)],
)
def test_mkl_takes_as_many_threads_as_a_calls_share_whatever_it_was_told(
    variable: str | None, action: str | None, mkl_is_told: bool
) -> None:
    """Else calls that run side by side would each multiply matrices with all cores (`_intraop`, rule 2)."""
    (printed,) = run_ranks(  # in a process of its own from the beginning: MKL has not looked at its variable
        f"""
        import ctypes, os, threading
        num = len(os.sched_getaffinity(0))  # MKL takes no more by itself
        os.environ[{variable!r} or "OMP_NUM_THREADS"] = str(num)
        import torch
        from moe_autograd._intraop import get_team_size
        from moe_autograd._workers import run_all

        num_mkl = ctypes.PyDLL(torch._C.__file__).MKL_Get_Max_Threads
        {action}
        before, seen = get_team_size(), []
        barrier = threading.Barrier(num + 1)  # so some calls run on threads that torch gives its default

        def call(index):
            seen.append((torch.get_num_threads(), num_mkl()))
            barrier.wait(60)

        assert run_all(call, range(num + 1)) == {{}}
        print(*set(seen))
        print(before.num_threads == num_mkl() == num, before.num_mkl_threads == {mkl_is_told} * num)
        print(get_team_size() == before)
        """,
        num_ranks=1,
    )
    assert printed.split() == ["(1,", "1)", "True", "True", "True"]


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="there are no timers")
def test_the_callers_team_is_given_back_whenever_ctrl_c_comes() -> None:
    assert_prints(
        """
        import random, signal, time, torch
        from moe_autograd._intraop import TeamSize, get_team_size
        from moe_autograd._workers import run_all

        torch.set_num_threads(2)
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        draw, until_s, found, num_interrupted = random.Random(0), time.perf_counter() + 3, set(), 0
        before = get_team_size()
        while time.perf_counter() < until_s:
            how = draw.choice([{}, dict(max_concurrency=1, even_shares=True)])
            try:
                signal.setitimer(signal.ITIMER_REAL, draw.uniform(1e-5, 1e-4))
                run_all(abs, range(3), **how)
                time.sleep(1e-3)
            except KeyboardInterrupt:
                num_interrupted += 1
            found.add(get_team_size())
        print(num_interrupted > 100, found == {before}, *(found - {before}))
        """,
        "True True",
    )


@pytest.mark.skipif(_openmp.end_team is None, reason="this torch has no libgomp")
def test_a_worker_at_rest_keeps_no_team() -> None:
    """Else the caller's own operators are slower for it (`_intraop`, rule 4)."""
    command = [sys.executable, "-m", "tests.support.team_at_rest"]
    told = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=120).stdout
    assert told == "2 0\n"


@pytest.mark.skipif(_openmp.end_team is None, reason="this torch has no libgomp")
def test_in_a_forked_child_only_the_thread_that_forked_cannot_end_its_team() -> None:
    """It has its parent's team without the members, for which it would wait for ever."""
    assert_prints(
        """
        import os, threading, torch
        from moe_autograd._intraop import end_team
        from tests.support.servers import wait_until

        def num_threads():
            return len(os.listdir("/proc/self/task"))

        def make_and_end_a_team():
            before = num_threads()
            torch.ones(1 << 20).add_(1)
            added = num_threads() - before
            end_team()
            wait_until(lambda: num_threads() <= before, patience_s=10.0)
            print(added, num_threads() - before, flush=True)

        def in_a_thread(function):
            thread = threading.Thread(target=function)
            thread.start()
            thread.join()

        def fork_with_a_team():
            torch.set_num_threads(1)
            end_team()
            torch.set_num_threads(2)
            make_and_end_a_team()
            torch.ones(1 << 20).add_(1)
            child = os.fork()
            if child == 0:
                end_team()
                in_a_thread(make_and_end_a_team)
                os._exit(0)
            assert os.waitpid(child, 0)[1] == 0

        in_a_thread(fork_with_a_team)  # this process may have been forked, too
        """,
        "1 0 1 0",
    )


def void(_: object) -> None:
    """Turn an expression into an action."""


# ---- the census


class Looked:
    """Stands for what a thread has done; counts the looks at it."""

    def __init__(self, *, computes: bool, seemed_to_wait: bool) -> None:
        self.computes, self.seemed_to_wait = computes, seemed_to_wait
        self.num_looks = 0

    def look(self, now_s: float) -> bool:
        self.num_looks += 1
        self.seemed_to_wait = not self.computes
        return self.computes

    def is_queued(self) -> bool:
        return False


def crew_of(threads: list[Looked], *, num_to_come: int = 0) -> Crew:
    crew = Crew(void, range(1000), 1000, contextlib.nullcontext, even_shares=False, habit=Habit())
    crew._progress = dict(enumerate(threads))  # type: ignore[arg-type]
    crew._num_running = len(threads) + num_to_come
    crew._cores = 2
    return crew


def test_threads_that_waited_before_get_few_looks_and_new_ones_all() -> None:
    old = [Looked(computes=False, seemed_to_wait=True) for _ in range(100)]
    new = [Looked(computes=False, seemed_to_wait=False) for _ in range(100)]
    crew = crew_of([*old, *new])
    assert crew.census(0.0) == (0, 200)
    assert sum(thread.num_looks for thread in old) == MOST_LOOKS_AGAIN
    assert [thread.num_looks for thread in new] == [1] * 100


def test_nobody_is_looked_at_once_the_cores_are_known_to_be_busy() -> None:
    threads = [Looked(computes=i < 4, seemed_to_wait=False) for i in range(100)]
    assert crew_of(threads).census(0.0)[0] == 2
    assert sum(thread.num_looks for thread in threads) == 2
    threads = [Looked(computes=False, seemed_to_wait=False) for _ in range(100)]
    assert crew_of(threads, num_to_come=50).census(0.0)[0] == 50
    assert sum(thread.num_looks for thread in threads) == 0


@pytest.mark.parametrize("step", ["__len__", "pop"])
def test_of_threads_that_nobody_needs_any_more_each_is_taken_off_once(step: str) -> None:
    def interrupted(threads: list[None], *args: Any) -> Any:
        """Another thread does the same meanwhile."""
        done = getattr(list, step)(threads, *args)
        if others:
            others.pop()()
        return done

    crew = crew_of([Looked(computes=True, seemed_to_wait=False)], num_to_come=8)
    others = [crew._wake_next] * 3
    crew._pending.clear()
    crew._to_come = type("Shared", (list,), {step: interrupted})([None] * 8)
    crew._wake_next()
    assert crew._num_running == 1


def test_a_thread_that_waited_and_now_computes_is_seen() -> None:
    threads = [
        Looked(computes=True, seemed_to_wait=True),
        *[Looked(computes=False, seemed_to_wait=True)] * 50,
    ]
    assert crew_of(threads).census(0.0) == (1, 50)


def test_calls_that_only_waited_last_time_all_begin_without_a_look(monkeypatch: pytest.MonkeyPatch) -> None:
    # The first threads have yet to be made, perhaps on a busy machine.
    monkeypatch.setattr(_crew, "LIGHT_S", 1.0)
    habit, barrier = Habit(), threading.Barrier(16)
    run_all(lambda _: void(barrier.wait(60)), range(16), habit=habit)
    assert habit.only_wait
    monkeypatch.setattr(_crew, "lookout", NobodyLooks())
    assert run_all(lambda _: void(barrier.wait(60)), range(16), habit=habit) == {}
    assert habit.only_wait


class InterruptedBehindWatch:
    """A lookout, and Ctrl-C as soon as it has learned of a crew."""

    def watch(self, crew: Crew) -> None:
        crew.next_look_s += 1.0  # not before Ctrl-C, however busy the machine is
        lookout.watch(crew)
        raise KeyboardInterrupt

    def forget(self, crew: Crew) -> None:
        lookout.forget(crew)


@pytest.mark.parametrize("only_wait", [False, True])
def test_ctrl_c_before_the_first_call_leaves_nothing_to_look_at(
    only_wait: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_crew, "lookout", InterruptedBehindWatch())
    habit, ran = Habit(), list[int]()
    habit.only_wait = only_wait
    with pytest.raises(KeyboardInterrupt):
        run_all(ran.append, range(8), habit=habit)
    assert not [crew for crew in lookout._crews if crew.num_pending]  # which the lookout would let begin
    assert ran == []


def spin(seconds: float) -> None:
    until_s = time.thread_time() + seconds
    while time.thread_time() < until_s:
        pass


def test_calls_that_compute_after_all_lose_the_habit() -> None:
    habit = Habit()
    habit.only_wait = True
    assert run_all(lambda _: spin(2 * LIGHT_S), range(8), habit=habit) == {}
    assert not habit.only_wait


def test_tiny_calls_lose_the_habit_though_they_are_as_light_as_waiting() -> None:
    habit = Habit()
    habit.only_wait = True
    assert run_all(void, range(256), habit=habit) == {}
    assert not habit.only_wait


def test_calls_that_wait_in_every_other_map_are_soon_not_expected_to() -> None:
    habit, guesses = Habit(), list[bool]()
    for _ in range(4):
        habit.note(only_waited=True)
        guesses.append(habit.only_wait)
        habit.note(only_waited=False)
        assert not habit.only_wait
    assert guesses == [True, False, False, False]
    habit.note(only_waited=True)
    habit.note(only_waited=True)
    assert habit.only_wait


@pytest.mark.parametrize(("seconds", "want_all_cores"), [(2 * SPIN_S, True), (0.0, False)])
def test_calls_that_computed_side_by_side_for_longer_than_a_team_spins_want_all_cores(
    seconds: float, want_all_cores: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_habits, "SPIN_S", SPIN_S if want_all_cores else 60.0)  # on a busy machine
    habit, both = Habit(), threading.Barrier(2)
    for _ in range(2):
        assert run_all(lambda _: (both.wait(60), spin(seconds)), range(2), habit=habit) == {}
        assert habit.want_all_cores is want_all_cores
        assert not (habit.only_wait and want_all_cores)


def test_calls_that_wait_do_not_want_all_cores() -> None:
    habit = Habit()
    habit.note(only_waited=True, side_by_side_s=1.0)
    assert not habit.want_all_cores


def test_what_one_thread_computed_does_not_want_all_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_crew, "lookout", NobodyLooks())
    habit = Habit()
    habit.want_all_cores = True
    assert run_all(lambda _: spin(SPIN_S), range(2), habit=habit) == {}
    assert not habit.want_all_cores


@pytest.mark.skipif(_openmp.end_team is None, reason="this torch has no libgomp")
def test_for_calls_that_want_all_cores_the_calling_thread_ends_its_team() -> None:
    """Its members would spin on those cores for milliseconds (`_intraop`, rule 5)."""
    assert_prints(
        """
        import os, threading, torch
        from moe_autograd._habits import Habit
        from moe_autograd._workers import run_all
        from tests.support.servers import wait_until

        def threads():
            return set(os.listdir("/proc/self/task"))

        def members_of_a_new_team():
            others = threads()
            torch.ones(1 << 20).add_(1)
            return threads() - others

        def run():
            torch.set_num_threads(2)
            expected, usual = Habit(), Habit()
            expected.want_all_cores = True
            members = members_of_a_new_team()
            assert run_all(lambda _: None, range(2), habit=usual) == {}
            print(len(members & threads()))
            assert run_all(lambda _: wait_until(lambda: not members & threads()), range(2), habit=expected) == {}
            print(len(members_of_a_new_team()), torch.get_num_threads())

        thread = threading.Thread(target=run)  # this process may have been forked, too
        thread.start()
        thread.join()
        """,
        "1 1 2",
    )


def test_calls_that_one_thread_has_made_have_no_habit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_crew, "lookout", NobodyLooks())  # else another may come, on a busy machine
    habit = Habit()
    run_all(void, range(2), max_concurrency=2, habit=habit)
    assert not habit.only_wait


@pytest.mark.parametrize("refusal", [RuntimeError("can't start new thread"), MemoryError()])
def test_a_habit_that_finds_no_threads_is_kept_by_those_there_are(
    refusal: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(job: Any) -> None:
        raise refusal

    habit, ran = Habit(), list[int]()
    habit.only_wait = True
    monkeypatch.setattr(_crew, "start_soon", refuse)
    assert run_all(ran.append, range(8), habit=habit) == {}
    assert ran == list(range(8))


def test_a_habit_goes_with_what_has_it() -> None:
    class Function:
        pass

    assert habit_of(Function, is_backward=True) is habit_of(Function, is_backward=True)
    assert habit_of(Function, is_backward=False) is not habit_of(Function, is_backward=True)
    left = weakref.ref(habit_of(Function, is_backward=True)), weakref.ref(Function)
    del Function
    gc.collect()  # a class is a cycle of its own
    assert [one() for one in left] == [None, None]
