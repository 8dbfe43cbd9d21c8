"""Where Ctrl-C waits, when what waits is raised, and that the handler is the user's again, wherever it came."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import pytest

from moe_autograd._interrupts import let_through, uninterrupted, unwindable, unwinding
from tests.support.interrupting import interrupted_everywhere
from tests.support.subprocesses import assert_prints, run_python


@pytest.fixture(autouse=True)
def handler_is_as_before() -> Iterator[None]:
    before = signal.getsignal(signal.SIGINT)
    yield
    now = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, before)
    assert now is before


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


@pytest.fixture
def handled() -> Iterator[list[str]]:
    """Handle SIGINT without raising; the handler is the user's own each time it runs."""
    events: list[str] = []

    def handle(*_: object) -> None:
        assert signal.getsignal(signal.SIGINT) is handle
        events.append("handled")

    before = signal.signal(signal.SIGINT, handle)
    yield events
    signal.signal(signal.SIGINT, before)


def test_the_handler_waits_for_the_end_of_the_outermost_section(handled: list[str]) -> None:
    with uninterrupted():
        with uninterrupted():
            interrupt()
        handled.append("inner is over")
    handled.append("outer is over")
    interrupt()
    assert handled == ["inner is over", "handled", "outer is over", "handled"]


def test_it_runs_where_a_section_is_opened_but_in_an_outer_one(handled: list[str]) -> None:
    with uninterrupted() as outer:
        with uninterrupted() as inner, inner.opened():
            interrupt()
        handled.append("still waits")
        with outer.opened():
            handled.append("opened")
            interrupt()
        interrupt()
        handled.append("closed")
    assert handled == ["still waits", "handled", "opened", "handled", "closed", "handled"]


def test_it_is_let_through_within_any_section_once(handled: list[str]) -> None:
    with uninterrupted(), uninterrupted():
        let_through()
        interrupt()
        handled.append("waits")
        let_through()
        let_through()
        interrupt()
        handled.append("waits again")
    let_through()
    assert handled == ["waits", "handled", "waits again", "handled"]


def test_it_waits_again_where_what_was_let_through_has_raised() -> None:
    events: list[str] = []

    def let_one_through() -> None:
        with uninterrupted():
            interrupt()
            with pytest.raises(KeyboardInterrupt):
                let_through()
            interrupt()
            events.append("waited")

    with pytest.raises(KeyboardInterrupt):
        let_one_through()
    assert events == ["waited"]


def test_what_it_raises_is_raised_at_the_end_beside_what_is_raised_inside() -> None:
    def fail() -> None:
        with uninterrupted():
            interrupt()
            raise ValueError("inside")

    with pytest.raises(KeyboardInterrupt) as caught:
        fail()
    assert isinstance(caught.value.__context__, ValueError)


@pytest.mark.parametrize("handler", [signal.SIG_IGN, signal.default_int_handler])
def test_other_threads_hold_nothing_back(handler: Any) -> None:
    seen = []

    def look() -> None:
        with uninterrupted() as section, section.opened():
            let_through()
            seen.append(signal.getsignal(signal.SIGINT))

    before = signal.signal(signal.SIGINT, handler)
    thread = threading.Thread(target=look)
    with uninterrupted():
        thread.start()
        thread.join()
    assert signal.signal(signal.SIGINT, before) is handler
    assert len(seen) == 1


@pytest.mark.parametrize("is_within", [False, True])
def test_what_another_thread_ends_leaves_sections_as_they_are(is_within: bool, handled: list[str]) -> None:
    """As its collection of garbage ends generators."""

    def entered() -> Iterator[None]:
        with uninterrupted() as section, section.opened():
            yield

    left: Any = entered()
    next(left)
    thread = threading.Thread(target=left.close)
    with uninterrupted() if is_within else nullcontext():
        thread.start()
        thread.join()
        interrupt()
        handled.append("over")
    assert handled == (["over", "handled"] if is_within else ["handled", "over"])


def nested(done: Callable[[str], None]) -> None:
    with uninterrupted() as section:
        done("taken")
        try:
            with section.opened():
                done("worked")
                with uninterrupted():
                    done("more")
                    let_through()
        finally:
            done("given back")


def test_what_is_taken_is_given_back_wherever_it_comes() -> None:
    events: list[str] = []
    num_points = 0
    for point in interrupted_everywhere(lambda: nested(events.append)):
        num_points += 1
        assert events.count("taken") == events.count("given back"), point
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, point
        with uninterrupted():
            pass
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler, point
    assert num_points > 20


@pytest.mark.parametrize(
    "other", [signal.SIG_IGN, signal.SIG_DFL, lambda *_: None], ids=["ignore", "default", "own"]
)
def test_a_handler_that_is_set_inside_stays(other: Any) -> None:
    before = signal.getsignal(signal.SIGINT)
    with uninterrupted() as section:
        with section.opened():
            signal.signal(signal.SIGINT, other)
        let_through()
    with uninterrupted():
        pass
    assert signal.signal(signal.SIGINT, before) == other
    with uninterrupted():
        signal.signal(signal.SIGINT, other)
        let_through()
    assert signal.signal(signal.SIGINT, before) == other


def test_a_child_that_another_thread_forks_within_a_section_hears_ctrl_c() -> None:
    """In a process of its own, as the next: where grpc had served, a fork on a thread crashed now and then."""
    assert_prints(
        """
        import os, signal, threading
        from moe_autograd._interrupts import uninterrupted

        def fork():
            child = os.fork()
            if not child:
                is_heard = signal.getsignal(signal.SIGINT) is signal.default_int_handler
                os._exit(3 if is_heard else 4)
            print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))

        thread = threading.Thread(target=fork)
        with uninterrupted():
            thread.start()
            thread.join()
        """,
        "3",
    )


def test_ctrl_c_ends_a_process_that_goes_back_to_the_default_inside() -> None:
    program = """
        import signal
        from moe_autograd._interrupts import uninterrupted

        with uninterrupted():
            signal.raise_signal(signal.SIGINT)
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        """
    assert run_python(program).returncode == -signal.SIGINT


def test_what_was_entered_ends_where_the_exception_leaves_what_is_unwinding() -> None:
    events: list[str] = []

    @unwindable
    def entered(name: str) -> Iterator[str]:
        try:
            events.append(f"{name} begins")
            yield name
        finally:
            events.append(f"{name} ends")

    @unwinding
    def program() -> None:
        with entered("outer"), entered("inner"):
            events.append("inside")

    whole = ["outer begins", "inner begins", "inside", "inner ends", "outer ends"]
    program()
    assert events == whole
    events.clear()
    num_points = 0
    for point in interrupted_everywhere(program):
        begun = {event.removesuffix(" begins") for event in events if event.endswith(" begins")}
        ended = [event.removesuffix(" ends") for event in events if event.endswith(" ends")]
        assert sorted(ended) == sorted(begun), point
        num_points += 1
        events.clear()
    assert num_points > 20
