"""A look tells threads that compute from those that wait."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from types import SimpleNamespace

from moe_autograd._progress import Progress


def progress_of(work: Callable[[], object]) -> tuple[Progress, threading.Thread]:
    """Start a thread that does `work`."""
    made: Future[Progress] = Future()

    def run() -> None:
        made.set_result(Progress())
        work()

    thread = threading.Thread(target=run)
    thread.start()
    return made.result(60), thread


def crew(num_computing: int) -> SimpleNamespace:
    """Stands for the crew of a nested map."""
    return SimpleNamespace(census=lambda now_s: (num_computing, 0))


def see_it_wait(progress: Progress) -> None:
    """Look until it neither computes nor wants to, as it does once it sits in a lock or has ended."""
    while progress.look(time.perf_counter()) or progress.is_queued():
        time.sleep(0)


def test_a_thread_computes_that_used_the_processor_since_the_last_look() -> None:
    progress, begun_s, cpu_s = Progress(), time.perf_counter(), time.thread_time()
    while time.thread_time() - cpu_s <= 0.2 * (time.perf_counter() - begun_s):
        pass
    assert progress.look(time.perf_counter())
    assert not progress.seemed_to_wait


def test_a_thread_that_sits_in_a_lock_is_seen_to_wait() -> None:
    gate = threading.Event()
    progress, thread = progress_of(lambda: gate.wait(60))
    see_it_wait(progress)
    assert progress.seemed_to_wait
    gate.set()
    thread.join(60)


def test_a_thread_that_waits_for_a_nested_map_computes_while_one_of_its_calls_does() -> None:
    gate = threading.Event()
    progress, thread = progress_of(lambda: gate.wait(60))
    see_it_wait(progress)
    progress.joining = crew(num_computing=1)  # type: ignore[assignment]
    assert progress.look(time.perf_counter())
    progress.joining = crew(num_computing=0)  # type: ignore[assignment]
    see_it_wait(progress)
    gate.set()
    thread.join(60)


def test_a_thread_that_has_ended_is_seen_to_wait_not_to_compute() -> None:
    progress, thread = progress_of(lambda: None)
    thread.join(60)
    see_it_wait(progress)  # at once or nearly so: Python is done with it a little earlier than the system
