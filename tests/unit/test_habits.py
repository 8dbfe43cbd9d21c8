"""What the next map of a kind expects of its calls: only to wait, or to compute on all cores."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from typing import Any

import pytest

from moe_autograd import _crew, _habits, _workers
from moe_autograd._ambient import Ambient
from moe_autograd._crew import TINY_S, Crew
from moe_autograd._habits import LIGHT_S, MOST_NEEDED, Habit, habit_of
from moe_autograd._intraop import SPIN_S
from moe_autograd._lookout import lookout
from moe_autograd._workers import run_all
from tests.support.lookouts import NobodyLooks


def void(_: object) -> None:
    """Turn an expression into an action."""


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


def test_some_maps_in_a_row_that_only_wait_are_enough_however_often_a_guess_was_wrong() -> None:
    habit = Habit()
    for _ in range(MOST_NEEDED):
        for _ in range(MOST_NEEDED):
            habit.note(only_waited=True)
        assert habit.only_wait
        habit.note(only_waited=False)


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


def test_calls_that_want_all_cores_have_them_without_a_look(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_crew, "lookout", NobodyLooks())
    monkeypatch.setattr(_workers, "num_cores", lambda: 2)
    habit, both = Habit(), threading.Barrier(2)
    habit.want_all_cores = True
    assert run_all(lambda _: both.wait(60), range(2), habit=habit) == {}
    assert run_all(void, range(2), habit=habit) == {}
    assert not habit.want_all_cores


def test_calls_within_others_that_want_all_cores_begin_on_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_crew, "lookout", NobodyLooks())
    habit, threads = Habit(), list[int]()

    def call(_: int) -> None:
        habit.want_all_cores = True
        run_all(lambda _: threads.append(threading.get_ident()), range(8), habit=habit)
        run_all(lambda _: spin(0.001), range(8), habit=habit)

    assert run_all(call, range(2)) == {}
    assert set(threads) == {threading.get_ident()}


def test_tiny_calls_do_not_want_all_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their threads would mostly hand each other the interpreter lock."""
    monkeypatch.setattr(_crew, "lookout", NobodyLooks())
    monkeypatch.setattr(_workers, "num_cores", lambda: 2)
    habit, both = Habit(), threading.Barrier(2)
    habit.want_all_cores = True

    def call(index: int) -> None:
        if index < 2:
            both.wait(60)  # both threads have come
            spin(SPIN_S)  # longer than a team spins
        spin(TINY_S / 4)

    assert run_all(call, range(64), habit=habit) == {}
    assert not habit.want_all_cores


def test_what_one_thread_computed_does_not_want_all_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_crew, "lookout", NobodyLooks(is_watching=True))
    habit = Habit()
    habit.want_all_cores = True
    assert run_all(lambda _: spin(SPIN_S), range(2), habit=habit) == {}
    assert not habit.want_all_cores


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


class Unreachable(Ambient):
    def run(self, function: Any) -> Any:
        raise RuntimeError("this world cannot be made here")


def test_threads_that_cannot_have_the_callers_world_make_no_calls_and_say_why(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    habit, ran = Habit(), list[int]()
    habit.only_wait = True
    monkeypatch.setattr(_crew, "Ambient", Unreachable)
    failures = run_all(ran.append, range(8), habit=habit)
    assert ran == list(range(8))
    assert ["cannot be made" in str(error) for error in failures.values()] == [True]


def test_a_habit_goes_with_what_has_it() -> None:
    class Function:
        pass

    assert habit_of(Function, is_backward=True) is habit_of(Function, is_backward=True)
    assert habit_of(Function, is_backward=False) is not habit_of(Function, is_backward=True)
    left = weakref.ref(habit_of(Function, is_backward=True)), weakref.ref(Function)
    del Function
    gc.collect()  # a class is a cycle of its own
    assert [one() for one in left] == [None, None]
