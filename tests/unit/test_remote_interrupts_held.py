"""What holds back Ctrl-C: when the handler runs, when what it raises is raised, and what a second one meets."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from moe_autograd.remote.cancelling import Cancellation
from moe_autograd.remote.interrupts import interrupts_held_back


@contextmanager
def handling(handler: Callable[..., Any]) -> Iterator[None]:
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
        assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)


def interrupt() -> None:
    signal.raise_signal(signal.SIGINT)


def stop(*_: object) -> None:
    raise KeyboardInterrupt


def test_what_comes_while_a_call_begins_runs_the_handler_when_it_can_be_cancelled() -> None:
    events: list[str] = []
    with handling(lambda *_: events.append("handled")), interrupts_held_back() as held:
        interrupt()
        events.append("begun")
        held.cancel_with(lambda: events.append("cancelled"))
        events.append("waiting")
        interrupt()
    assert events == ["begun", "handled", "waiting", "handled"]


def test_what_comes_while_a_call_begins_cancels_it_if_the_handler_raises() -> None:
    events: list[str] = []

    def begin_and_wait() -> None:
        with interrupts_held_back() as held:
            interrupt()
            held.cancel_with(lambda: events.append("cancelled"))
            events.append("over")

    with handling(stop), pytest.raises(KeyboardInterrupt):
        begin_and_wait()
    assert events == ["cancelled", "over"]


def test_what_comes_where_nothing_can_be_cancelled_runs_the_handler_at_the_end() -> None:
    events: list[str] = []
    with handling(lambda *_: events.append("handled")):
        with interrupts_held_back():
            interrupt()
            events.append("over")
        assert events == ["over", "handled"]


def test_a_second_one_is_held_back_while_the_first_cancels() -> None:
    """In grpc's `cancel` it would leave a lock of the channel locked, for which all later calls wait."""
    events: list[str] = []

    def cancel() -> None:
        if not events:
            events.append("begun")
            interrupt()
            events.append("cancelled")

    def wait() -> None:
        with interrupts_held_back() as held:
            held.cancel_with(cancel)
            interrupt()
            events.append("over")

    with handling(stop), pytest.raises(KeyboardInterrupt):
        wait()
    assert events == ["begun", "cancelled", "over"]


def test_one_that_comes_while_an_operation_is_cancelled_waits_until_all_of_it_is() -> None:
    cancellation, cancelled = Cancellation(), []
    for number in range(3):
        cancellation.add(lambda number=number: (interrupt(), cancelled.append(number)))
    with handling(stop), pytest.raises(KeyboardInterrupt):
        cancellation.cancel()
    assert sorted(cancelled) == [0, 1, 2]


def test_what_the_handler_was_doing_when_it_failed_is_told_and_the_cancelled_call_is_not() -> None:
    def save(*_: object) -> None:
        try:
            raise OSError("the disk is full")
        except OSError:
            raise KeyboardInterrupt  # noqa: B904

    def wait() -> None:
        with interrupts_held_back() as held:
            held.cancel_with(lambda: None)
            interrupt()
            raise LookupError("cancelled")

    with handling(save), pytest.raises(KeyboardInterrupt) as raised:
        wait()
    assert isinstance(raised.value.__context__, OSError)
    assert not raised.value.__suppress_context__
    assert raised.value.__context__.__context__ is None
