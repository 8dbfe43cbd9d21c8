"""Looking at what other threads execute harms none of them."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from types import FrameType

import pytest

from moe_autograd._frames import on_each_thread
from tests.support.subprocesses import assert_prints

PROGRAM = """
import gc, threading, time
from moe_autograd._frames import on_each_thread

class Garbage:
    def __init__(self):
        self.own = self  # for the garbage collector

    def __del__(self):
        time.sleep(1e-4)  # the interpreter lock is another thread's

done = threading.Event()

def start_others():
    while not done.is_set():
        other = threading.Thread(target=int)
        other.start()
        other.join()

def call(depth=5):
    if depth:
        return call(depth - 1)
    time.sleep(1e-5)

def call_on():
    while not done.is_set():
        call()

def depth_of(frame):
    return 0 if frame is None else 1 + depth_of(frame.f_back)

threads = [threading.Thread(target=target) for target in [start_others] * 2 + [call_on] * 6]
for thread in threads:
    thread.start()
gc.set_threshold(7)
until_s = time.monotonic() + 3
while time.monotonic() < until_s:
    Garbage()
    assert on_each_thread(depth_of)[threading.get_ident()] >= 1
done.set()
for thread in threads:
    thread.join()
"""


@pytest.mark.stress
def test_it_ends_beside_threads_that_start_and_garbage_that_waits() -> None:
    assert_prints(PROGRAM, "", limit_s=60)


@pytest.fixture(params=[True, False], ids=["collecting", "not collecting"])
def collects(request: pytest.FixtureRequest) -> Iterator[bool]:
    was = gc.isenabled()
    (gc.enable if request.param else gc.disable)()
    yield request.param
    (gc.enable if was else gc.disable)()


def test_garbage_is_collected_afterwards_if_it_was_before(collects: bool) -> None:
    within = [*on_each_thread(lambda _: gc.isenabled()).values()]
    assert within == [False] * len(within)
    assert gc.isenabled() is collects

    def fail(_: FrameType) -> None:
        raise LookupError

    with pytest.raises(LookupError):
        on_each_thread(fail)
    assert gc.isenabled() is collects


def test_nothing_is_collected_as_long_as_one_of_two_looks(collects: bool) -> None:
    begun, go_on = threading.Event(), threading.Event()
    found: list[bool] = []

    def look_long() -> None:
        def look(_: FrameType) -> bool:
            begun.set()
            go_on.wait()
            return gc.isenabled()

        found.extend(on_each_thread(look).values())

    first, second = threading.Thread(target=look_long), threading.Thread(target=on_each_thread, args=[bool])
    first.start()
    begun.wait()
    second.start()
    second.join(0.2)  # it waits, or has enabled the collector behind the first one's back
    go_on.set()
    first.join()
    second.join()
    assert set(found) == {False}
    assert gc.isenabled() is collects


@pytest.mark.parametrize("collects", ["enable", "disable"])
def test_a_child_forked_meanwhile_collects_as_its_parent_does(collects: str) -> None:
    program = f"""
        import gc, os, threading
        from moe_autograd._frames import on_each_thread
        gc.{collects}()
        begun, go_on = threading.Event(), threading.Event()

        def look(frame):
            begun.set()
            go_on.wait()

        looking = threading.Thread(target=on_each_thread, args=[look])
        looking.start()
        begun.wait()
        child = os.fork()
        if child == 0:
            on_each_thread(bool)  # nobody holds the lock
            os._exit(gc.isenabled() is {collects == "enable"})
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        go_on.set()
        looking.join()
        """
    assert_prints(program, "1", limit_s=60)
