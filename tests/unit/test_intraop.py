"""How many intra-op threads operators use: set for one thread, given back, and none that rest."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

import pytest
import torch

from moe_autograd import _crew, _workers
from moe_autograd._intraop import _openmp, _set_mkl_threads, get_team_size, num_cores, set_team_size
from moe_autograd._workers import run_all
from tests.support.subprocesses import ROOT, assert_prints, run_ranks


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


@pytest.mark.parametrize(("num_calls", "share"), [(2, 8), (3, 5), (8, 2), (16, 1), (20, 1)])
def test_calls_share_out_all_cores_also_where_there_are_more_of_these(
    num_calls: int, share: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On sixteen cores eight large experts had a core each, and took three times as long as one after the other."""
    monkeypatch.setattr(_crew, "num_cores", lambda: 16)
    before, barrier, seen = get_team_size(), threading.Barrier(num_calls), []

    def call(index: int) -> None:
        barrier.wait(60)
        seen.append(torch.get_num_threads())

    try:
        set_team_size(16)
        assert run_all(call, range(num_calls)) == {}
    finally:
        set_team_size(before)
    assert seen == [share] * num_calls


@pytest.mark.parametrize("max_concurrency", [1, 2, None])
def test_with_even_shares_each_call_has_the_smallest_whatever_runs_beside_it(
    max_concurrency: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (_crew, _workers):
        monkeypatch.setattr(module, "num_cores", lambda: 16)
    before, seen = get_team_size(), []
    try:
        set_team_size(32)
        call = lambda _: seen.append(torch.get_num_threads())  # noqa: E731
        assert run_all(call, range(4), max_concurrency=max_concurrency, even_shares=True) == {}
    finally:
        set_team_size(before)
    assert seen == [2] * 4


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="the system does not know affinity")
def test_cores_that_a_thread_may_not_run_on_do_not_count() -> None:
    counts: list[int] = []

    def stay_on_one() -> None:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        counts.append(num_cores())

    thread = threading.Thread(target=stay_on_one)
    thread.start()
    thread.join()
    assert counts == [1]


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="there are no timers")
def test_the_callers_team_is_given_back_whenever_ctrl_c_comes() -> None:
    # What comes in a callback of `threading`'s own is told on stderr, and goes no further.
    (printed,) = run_ranks(
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
        num_ranks=1,
    )
    assert printed.split() == ["True", "True"]


@pytest.mark.skipif(_openmp.end_team is None, reason="this torch has no libgomp")
def test_a_worker_at_rest_keeps_no_team() -> None:
    """Else the caller's own operators are slower for it (`_intraop`, rule 4)."""
    command = [sys.executable, "-m", "tests.support.team_at_rest"]
    told = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True, timeout=120).stdout
    assert told == "2 0\n"


@pytest.mark.skipif(_openmp.end_team is None, reason="this torch has no libgomp")
def test_a_team_is_ended_though_its_thread_now_uses_one_thread_alone() -> None:
    assert_prints(
        """
        import os, threading, torch
        from moe_autograd._intraop import end_team, set_team_size
        from tests.support.servers import wait_until

        def run():
            others = set(os.listdir("/proc/self/task"))
            set_team_size(2)
            torch.ones(1 << 20).add_(1)
            members = set(os.listdir("/proc/self/task")) - others
            set_team_size(1)
            end_team()
            wait_until(lambda: not members & set(os.listdir("/proc/self/task")))
            print(len(members))

        thread = threading.Thread(target=run)  # this process may have been forked, too
        thread.start()
        thread.join()
        """,
        "1",
    )


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
