"""Turns on workers: short ones get theirs whatever else runs, and a crowd makes no expert look long."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest

import experts_server.queues.executor as executor
import experts_server.queues.turn_lengths as turn_lengths
from experts_server.queues.executor import MIDDLING_S, WorkerPool
from experts_server.queues.turn_lengths import TurnLength
from tests.support.scarce import no_thread_to_give
from tests.support.servers import START_S


class Lasting:
    """Lasts until it is told to end."""

    def __init__(self, expected_s: float) -> None:
        self.expected_s = expected_s
        self.has_begun, self.may_end = threading.Event(), threading.Event()

    def run(self) -> None:
        self.has_begun.set()
        assert self.may_end.wait(START_S)


def test_a_short_turn_begins_while_more_long_ones_run_than_may_compute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One came through the short lane and is not short; another long one waits."""
    monkeypatch.setattr(executor, "WAITING_SHARE", -1.0)  # nobody waits: all are taken to compute
    pool = WorkerPool(num_computing=1)
    long, mistaken, waiting, short = Lasting(1.0), Lasting(0.0), Lasting(1.0), Lasting(0.0)
    pool.put([long, mistaken, waiting])
    assert long.has_begun.wait(START_S)
    assert mistaken.has_begun.wait(START_S)
    while [worker.lane for worker in pool._workers].count("long") < 2:  # the watcher has found out
        threading.Event().wait(0.001)
    pool.put([short])
    assert short.has_begun.wait(START_S), repr(pool)
    for turn in (long, mistaken, waiting, short):
        turn.may_end.set()
    assert pool.close(START_S)


def test_workers_that_nobody_needs_end_but_one_and_new_ones_come(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "IDLE_S", 0.02)
    pool = WorkerPool(num_computing=3)
    for _ in range(3):
        turns = [Lasting(1.0) for _ in range(3)]
        pool.put(turns)
        for turn in turns:
            assert turn.has_begun.wait(START_S)
            turn.may_end.set()
        until = time.monotonic() + START_S
        while len(pool._workers) > 1:
            assert time.monotonic() < until, repr(pool)
            threading.Event().wait(0.01)
    assert pool.close(START_S)


def test_the_last_worker_stays_for_a_system_that_has_no_other_to_give(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(executor, "IDLE_S", 0.01)
    pool = WorkerPool()
    (worker,) = pool._workers
    worker.join(10 * executor.IDLE_S)
    turn = Lasting(0.0)
    with no_thread_to_give():
        pool.put([turn])
        assert turn.has_begun.wait(START_S), repr(pool)
    turn.may_end.set()
    assert pool.close(START_S)


@pytest.mark.parametrize(
    ("turns", "is_long"),
    [
        ([(0.5, 0.5)] * 20, False),
        ([(0.5, 0.5)] * 10 + [(150.0, 0.5)] + [(0.5, 0.5)], False),
        ([(8.0, 0.5)] * 200, False),
        ([(0.5, 0.5)] * 10 + [(150.0, 150.0)], True),
        ([(5.0, 5.0)] * 20, True),
        ([(50.0, 0.1)] * 20, True),
        ([(50.0, 50.0)] * 20 + [(0.5, 0.5)] * 10, False),
    ],
    ids=["short", "crowded once", "crowded always", "once long", "long", "waits", "short again"],
)
def test_an_expert_is_long_by_what_it_computes_and_waits_for_not_by_the_crowd(
    turns: list[tuple[float, float]], is_long: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = SimpleNamespace(wall=1000.0, cpu=0.0)
    fake = SimpleNamespace(monotonic=lambda: clock.wall, thread_time=lambda: clock.cpu)
    monkeypatch.setattr(turn_lengths, "time", fake)
    length = TurnLength()
    for wall_ms, cpu_ms in turns:
        length.begin()
        clock.wall += wall_ms / 1e3
        clock.cpu += cpu_ms / 1e3
        length.end()
    assert (length.expected_s >= MIDDLING_S) is is_long, length


def test_turns_wait_for_a_system_that_has_no_thread_to_give(caplog: pytest.LogCaptureFixture) -> None:
    pool = WorkerPool(num_computing=1)
    first, second, third = Lasting(0.0), Lasting(1.0), Lasting(1.0)
    with no_thread_to_give():
        for turn in (first, second, third):
            pool.put([turn])
        assert first.has_begun.wait(START_S)  # by the worker that is always there
        assert not second.has_begun.wait(0.1)
    for turn in (first, second, third):
        turn.may_end.set()
        assert turn.has_begun.wait(START_S)
    assert pool.close(START_S)
    assert not pool.has_threads
    assert caplog.text.count("expected another thread, got RuntimeError") == 1


def test_a_system_that_has_no_thread_to_give_is_told_of_each_time_that_it_comes_to_that(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(executor, "STALL_S", START_S)  # nobody tries but who puts turns
    pool = WorkerPool(num_computing=2)
    turns = [Lasting(expected_s) for expected_s in (0.0, MIDDLING_S / 2, 1.0, 1.0)]
    with no_thread_to_give():
        pool.put(turns[:2])
        pool.put([])
    pool.put(turns[2:3])
    for turn in turns[:3]:
        assert turn.has_begun.wait(START_S)
    with no_thread_to_give():
        pool.put(turns[3:])
    pool.put([])
    assert turns[3].has_begun.wait(START_S)
    for turn in turns:
        turn.may_end.set()
    assert pool.close(START_S)
    assert caplog.text.count("expected another thread, got RuntimeError") == 2
