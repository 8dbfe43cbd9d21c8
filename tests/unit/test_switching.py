"""The interpreter's switch interval is longer while there are very many threads of ours, and else the user's."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

import pytest

from moe_autograd import _threads
from moe_autograd._switching import LONGEST_S, MANY, PER_THREAD_S, _Interval, interval
from moe_autograd._workers import run_all

USERS_S = 0.004

ResultT = TypeVar("ResultT")


@pytest.fixture(autouse=True)
def _the_users_interval() -> Iterator[None]:
    let_all_leave()  # those of earlier tests
    before_s = sys.getswitchinterval()
    sys.setswitchinterval(USERS_S)
    yield
    sys.setswitchinterval(before_s)


def have_threads(num_threads: int, action: Callable[[], ResultT]) -> list[ResultT]:
    """Run as many calls at once, and `action` in each when all have begun; return what it returned."""
    barrier = threading.Barrier(num_threads)
    told: list[ResultT] = []

    def call(index: int) -> None:
        barrier.wait(60)
        told.append(action())
        barrier.wait(60)

    assert run_all(call, range(num_threads)) == {}
    return told


def let_all_leave() -> None:
    """Send idle threads home, but for that of the lookout."""
    while len(_threads._threads) > 1:
        _threads._rest_before_exit()


def test_as_long_as_there_are_very_many_threads() -> None:
    num_threads = MANY + 72
    longest_s = max(have_threads(num_threads, sys.getswitchinterval))
    assert (num_threads - 1) * PER_THREAD_S - 1e-6 <= longest_s <= LONGEST_S
    let_all_leave()
    assert sys.getswitchinterval() == USERS_S


def test_a_few_threads_change_nothing() -> None:
    assert set(have_threads(MANY // 2, sys.getswitchinterval)) == {USERS_S}


@pytest.mark.parametrize("users_s", [0.002, 0.5])
def test_what_the_user_sets_meanwhile_stays(users_s: float) -> None:
    have_threads(MANY + 72, lambda: sys.setswitchinterval(users_s))
    let_all_leave()
    assert sys.getswitchinterval() == users_s


def test_a_longer_one_of_the_users_own_stays() -> None:
    sys.setswitchinterval(0.5)
    assert set(have_threads(MANY + 72, sys.getswitchinterval)) == {0.5}


def users_is_set_in_a_child() -> bool:
    if (child := os.fork()) == 0:
        os._exit(0 if sys.getswitchinterval() == USERS_S else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_forked_child_has_the_users() -> None:
    interval.suit([None] * (MANY + 1))
    try:
        assert sys.getswitchinterval() > USERS_S
        assert users_is_set_in_a_child()
    finally:
        interval.suit(_threads._threads)


def test_so_has_one_that_is_forked_in_the_middle_of_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """It took what was just being set for the user's."""
    set_interval, has_set = sys.setswitchinterval, threading.Event()

    def set_slowly(interval_s: float) -> None:
        set_interval(interval_s)
        has_set.set()
        threading.Event().wait(0.1)

    monkeypatch.setattr(sys, "setswitchinterval", set_slowly)
    thread = threading.Thread(target=interval.suit, args=([None] * (MANY + 1),))
    thread.start()
    try:
        assert has_set.wait(60)
        assert users_is_set_in_a_child()
    finally:
        thread.join(60)
        interval.suit(_threads._threads)


@pytest.mark.parametrize("is_set", [False, True], ids=["before", "after"])
def test_so_has_one_that_a_finalizer_forks_there(monkeypatch: pytest.MonkeyPatch, is_set: bool) -> None:
    """It waited for the lock that its own thread held."""
    set_interval = sys.setswitchinterval
    children: list[bool] = []

    def set_and_fork(interval_s: float) -> None:
        if is_set:
            set_interval(interval_s)
        if not children:
            children.append(False)  # the child sets it as well
            children[0] = users_is_set_in_a_child()
        set_interval(interval_s)

    monkeypatch.setattr(sys, "setswitchinterval", set_and_fork)
    interval.suit([None] * (MANY + 1))
    interval.suit(_threads._threads)
    assert children == [True]


def test_who_comes_while_the_interval_is_set_is_counted_and_does_not_wait(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Garbage may be collected there, and a finalizer make a map, and wait for its threads."""
    own, threads, set_interval = _Interval(), [None] * (MANY + 1), sys.setswitchinterval

    def come() -> None:
        threads.append(None)
        own.suit(threads)

    def set_while_one_comes(interval_s: float) -> None:
        if len(threads) < MANY + 3:
            thread = threading.Thread(target=come, daemon=True)
            thread.start()
            thread.join(60)
            assert not thread.is_alive()
        set_interval(interval_s)

    monkeypatch.setattr(sys, "setswitchinterval", set_while_one_comes)
    own.suit(threads)
    assert len(threads) == MANY + 3
    assert sys.getswitchinterval() == pytest.approx(len(threads) * PER_THREAD_S)
    threads.clear()
    own.suit(threads)
    assert sys.getswitchinterval() == USERS_S
