"""How many threads a map gets, and what is left of them."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moe_autograd import _crew, _threads, _workers
from moe_autograd._crew import MOST_LOOKS_AGAIN, Crew
from moe_autograd._habits import Habit
from moe_autograd._intraop import (
    num_cores,
)
from moe_autograd._lookout import lookout
from moe_autograd._workers import run_all
from tests.support.servers import wait_until
from tests.support.subprocesses import assert_prints

ROOT = Path(__file__).parents[2]


def names_of_threads(num_calls: int, **options: int) -> set[str]:
    names: set[str] = set()
    assert run_all(lambda _: names.add(threading.current_thread().name), range(num_calls), **options) == {}
    return names


def test_calls_that_wait_for_each_other_all_run_at_once() -> None:
    barrier = threading.Barrier(64)
    assert run_all(lambda _: void(barrier.wait(60)), range(64)) == {}


@pytest.mark.parametrize(
    ("only_wait", "want_all_cores"), [(False, False), (True, False), (False, True), (True, True)]
)
def test_a_bound_is_kept(only_wait: bool, want_all_cores: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three at a time meet at a barrier, so three do run at once; a fourth would be counted."""
    monkeypatch.setattr(_workers, "num_cores", lambda: 4)
    habit = Habit()
    habit.only_wait, habit.want_all_cores = only_wait, want_all_cores  # both: two maps of a kind at a time
    running, most, lock, barrier = set[int](), [0], threading.Lock(), threading.Barrier(3)

    def call(index: int) -> None:
        with lock:
            running.add(index)
            most[0] = max(most[0], len(running))
        barrier.wait(60)
        with lock:
            running.discard(index)

    assert run_all(call, range(24), max_concurrency=3, habit=habit) == {}
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


def test_a_keyboard_interrupt_that_a_call_raises_on_another_thread_is_that_calls_failure() -> None:
    caller, barrier, raised = threading.current_thread(), threading.Barrier(2), list[int]()

    def call(index: int) -> None:
        if index < 2:
            barrier.wait(60)
        if threading.current_thread() is not caller:
            raised.append(index)
            raise KeyboardInterrupt

    failures = run_all(call, range(6))
    assert raised
    assert {index: type(error) for index, error in failures.items()} == dict.fromkeys(
        raised, KeyboardInterrupt
    )


def test_after_ctrl_c_calls_that_have_not_begun_never_do() -> None:
    caller, barrier, has_raised = threading.current_thread(), threading.Barrier(2), threading.Event()
    ran, others = list[int](), list[threading.Thread]()

    def call(index: int) -> None:
        ran.append(index)
        if index < 2 and threading.current_thread() is caller:
            barrier.wait(60)
            raise KeyboardInterrupt
        if index < 2:
            others.append(threading.current_thread())
            barrier.wait(60)
            has_raised.wait(60)

    with pytest.raises(KeyboardInterrupt):
        run_all(call, range(8), max_concurrency=2)
    has_raised.set()
    wait_until(lambda: others[0] in [idle.thread for idle in _threads._idle])
    assert sorted(ran) == [0, 1]


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


def test_a_thread_that_is_given_a_job_just_as_it_gives_up_does_it(monkeypatch: pytest.MonkeyPatch) -> None:
    has_run = threading.Event()

    class Shared(list[_threads._Worker]):
        """Another thread is a moment faster."""

        def remove(self, worker: _threads._Worker) -> None:
            if not has_run.is_set():
                _threads.start_soon(has_run.set)
            super().remove(worker)

    workers = Shared()
    monkeypatch.setattr(_threads, "IDLE_S", 0.01)
    monkeypatch.setattr(_threads, "_idle", workers)
    threads = list[threading.Thread]()
    _threads.start_soon(lambda: threads.append(threading.current_thread()))
    assert has_run.wait(60)
    threads[0].join(60)
    assert not threads[0].is_alive()
    assert workers == []  # else it would be given the next job


def test_a_thread_at_rest_keeps_nothing_of_what_it_ran() -> None:
    threads = list[threading.Thread]()

    def job() -> None:
        threads.append(threading.current_thread())

    left = weakref.ref(job)
    _threads.start_soon(job)
    del job
    wait_until(lambda: bool(threads) and threads[0] in [idle.thread for idle in _threads._idle])
    assert left() is None


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
    crew = Crew(
        void, range(1000), 1000, contextlib.nullcontext, even_shares=False, habit=Habit(), cores=num_cores()
    )
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


def test_whoever_still_looks_at_a_map_that_has_ended_keeps_none_of_its_calls() -> None:
    def call(index: int) -> None: ...

    crew = Crew(
        call, range(4), 4, contextlib.nullcontext, even_shares=False, habit=Habit(), cores=num_cores()
    )
    left = weakref.ref(call)
    del call
    assert crew.run() == {}
    assert crew not in lookout._crews
    wait_until(lambda: crew._num_running == 0)
    assert left() is None


def test_a_map_ends_though_the_thread_it_waits_for_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    is_coming = threading.Event()

    def refuse(job: Any) -> None:
        is_coming.set()
        wait_until(lambda: crew._num_running == 1)  # the calling thread has left
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(_crew, "start_soon", refuse)
    crew = Crew(
        lambda _: void(is_coming.wait(60)), range(2), 2, contextlib.nullcontext, False, Habit(), num_cores()
    )
    assert crew.run() == {}


def test_a_thread_that_waited_and_now_computes_is_seen() -> None:
    threads = [
        Looked(computes=True, seemed_to_wait=True),
        *[Looked(computes=False, seemed_to_wait=True)] * 50,
    ]
    assert crew_of(threads).census(0.0) == (1, 50)


def test_threads_may_come_as_a_collection_delays_the_look_at_them() -> None:
    """A finalizer gives away the interpreter lock in the midst of it: here wherever the look allocates something."""
    program = """
        import gc, sys, threading, time
        import torch
        from moe_autograd import parallel_apply

        class Slow:
            def __init__(self):
                self.own = self

            def __del__(self):
                time.sleep(0.003)

        def make_garbage(phase, info):
            beneath = sys._getframe().f_back
            if phase == "start" and beneath is not None and beneath.f_code.co_name == "census":
                Slow()

        gc.callbacks.append(make_garbage)
        gc.freeze()
        for _ in range(40):
            class Waits(torch.nn.Module):  # a kind that no map has had
                def forward(self, x, barrier):
                    barrier.wait()
                    return x

            barrier = threading.Barrier(64)
            gc.set_threshold(1, 10, 10)
            parallel_apply([Waits() for _ in range(64)], [(torch.ones(1), barrier) for _ in range(64)])
            gc.set_threshold(700)
        """
    assert_prints(program, "", limit_s=100)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # Python's own, of any thread
def test_a_fork_waits_until_threads_that_leave_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    """At their end MKL takes its buffers back, under a lock that nobody would give back in a child."""
    leaves, is_looked_at, ids = threading.Event(), threading.Event(), list[int]()

    class Interval:
        def suit(self, _threads: object) -> None:
            if leaving.is_set():
                leaves.set()
                is_looked_at.wait(60)

    def state_of(thread_id: int | None) -> bytes:
        state = real_state_of(thread_id)
        if thread_id in ids and leaves.is_set():
            is_looked_at.set()
        return state

    def job() -> None:
        ids.append(threading.get_native_id())
        leaving.set()

    leaving, real_state_of = threading.Event(), _threads.state_of
    monkeypatch.setattr(_threads, "_idle", [])
    monkeypatch.setattr(_threads, "IDLE_S", 0.0)
    monkeypatch.setattr(_threads, "interval", Interval())
    monkeypatch.setattr(_threads, "state_of", state_of)
    try:
        _threads.start_soon(job)
        assert leaves.wait(60)
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
        assert real_state_of(*ids) == b""
    finally:
        is_looked_at.set()
