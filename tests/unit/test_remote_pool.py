"""Threads that wait for servers: what is given to them, and what is not theirs."""

from __future__ import annotations

import signal
import sys
import threading
from concurrent.futures.thread import _global_shutdown_lock  # type: ignore[attr-defined]
from types import FrameType
from typing import Any

import pytest

from moe_autograd.remote.pool import Pool


class StopTrainingError(RuntimeError):
    """What a handler of the user's raises."""


def test_what_a_handler_of_the_users_raises_is_not_taken_for_a_refusal() -> None:
    """The signal comes while the pool takes something; a refusal of the pool is a `RuntimeError` as well."""
    pool, done = Pool(1, "test"), threading.Event()

    def stop(*_: object) -> None:
        raise StopTrainingError

    def interrupt(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_name == "submit":
            sys.setprofile(None)
            signal.raise_signal(signal.SIGINT)

    before = signal.signal(signal.SIGINT, stop)
    try:
        sys.setprofile(interrupt)
        with pytest.raises(StopTrainingError):
            pool.try_start(done.set)
        assert done.wait(10)
    finally:
        sys.setprofile(None)
        signal.signal(signal.SIGINT, before)
        pool.close()


def test_a_handler_may_use_other_threads_though_a_pool_is_just_taking_something() -> None:
    """It holds locks meanwhile that all of Python's pools share: a handler that makes a remote call would hang."""
    pool, were_locked = Pool(1, "test"), []

    def interrupt(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_name == "_adjust_thread_count":
            sys.setprofile(None)
            signal.raise_signal(signal.SIGINT)

    def look(*_: object) -> None:
        were_locked.append(_global_shutdown_lock.locked())

    before = signal.signal(signal.SIGINT, look)
    try:
        sys.setprofile(interrupt)
        assert pool.try_start(lambda: None)
        assert were_locked == [False]
    finally:
        sys.setprofile(None)
        signal.signal(signal.SIGINT, before)
        pool.close()


def test_a_closed_pool_takes_nothing() -> None:
    pool = Pool(1, "test")
    pool.close()
    assert not pool.try_start(lambda: None)
