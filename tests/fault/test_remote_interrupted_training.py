"""Ctrl-C may come anywhere in a client's step: what follows is neither kept waiting nor told of a restart."""

from __future__ import annotations

import inspect
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import CodeType, FrameType

import pytest
import torch

from experts_server import ExpertsServer
from moe_autograd import _contexts, _interrupts
from moe_autograd.errors import RemoteError
from moe_autograd.remote import (
    RemoteExperts,
    RemoteOptimizer,
    cancelling,
    connect,
    connection,
    numbering,
    operations,
    turns,
    updates,
)
from moe_autograd.remote.cancelling import Cancellation
from moe_autograd.remote.deadline import Deadline
from moe_autograd.remote.numbering import Numbering
from moe_autograd.remote.operations import Operation
from moe_autograd.remote.turns import Turns
from tests.support.hosting import make_modules, sgd
from tests.support.interrupting import interrupted_everywhere
from tests.support.servers import wait_until

# Where a generator is let go of, Python itself drops what is raised.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


@pytest.fixture
def experts() -> Iterator[RemoteExperts]:
    with (
        ExpertsServer(make_modules(0), optimizer=sgd) as server,
        connect(server.address, timeout_s=5.0) as experts,
    ):
        yield experts


def training(experts: RemoteExperts) -> Callable[[], None]:
    expert, optimizer = experts["ffn.0"], RemoteOptimizer(experts)

    def step() -> None:
        optimizer.zero_grad()
        expert(torch.ones(1, 4)).sum().backward()
        optimizer.step()

    return step


def test_after_ctrl_c_no_turn_is_kept_and_no_number_stays_open(experts: RemoteExperts) -> None:
    step, num_points = training(experts), 0
    for point in interrupted_everywhere(step, within=[turns, numbering, _contexts, _interrupts]):
        num_points += 1
        assert repr(experts.connection._updates.turns) == "Turns(0 under way, 0 waiting)", point
        assert not experts.connection.numbering._open, point
    step()
    assert num_points > 100


def test_after_ctrl_c_the_next_step_misses_no_gradients(experts: RemoteExperts) -> None:
    step, num_points = training(experts), 0
    for point in interrupted_everywhere(step, within=[connection, updates]):
        num_points += 1
        try:
            step()
        except RemoteError as error:
            pytest.fail(f"{point}: {error}")
    assert num_points > 30


def test_a_step_after_one_that_ctrl_c_ended_is_the_same_step(experts: RemoteExperts) -> None:
    expert, optimizer, num_points = experts["ffn.0"], RemoteOptimizer(experts), 0

    def gather() -> None:
        optimizer.zero_grad()
        expert(torch.ones(1, 4)).sum().backward()

    gather()
    within = [updates, numbering, turns, operations, cancelling, _contexts, _interrupts]
    for point in interrupted_everywhere(optimizer.step, within=within):
        num_points += 1
        optimizer.step()
        assert experts.info()["ffn.0"].num_updates == num_points, point
        gather()
    assert num_points > 50


class Interrupted:
    """Keeps a lock that the main thread waits for, and sends Ctrl-C meanwhile; lets go when that has been heard."""

    def __init__(self, lock: threading.Lock, waiting_in: CodeType) -> None:
        self._lock, self._waiting_in = lock, waiting_in
        self._is_kept, self._has_left = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._interrupt)

    def __enter__(self) -> Interrupted:
        return self

    def begin(self) -> None:
        self._thread.start()
        assert self._is_kept.wait(60.0)

    def __exit__(self, *exc_info: object) -> None:
        self._has_left.set()
        self._thread.join()

    def _interrupt(self) -> None:
        with self._lock:
            self._is_kept.set()
            wait_until(lambda: _main_frame().f_code is self._waiting_in)
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            wait_until(lambda: _interrupts._main.has_come or self._has_left.is_set())


def _main_frame() -> FrameType:
    return sys._current_frames()[threading.main_thread().ident]


def test_a_turn_ends_though_ctrl_c_comes_while_its_end_waits_for_the_lock() -> None:
    own = Turns()

    def take_one(begin: Callable[[], None]) -> None:
        with own.turn("Step", ["a"], Operation(Deadline(60.0), Cancellation())):
            begin()

    with Interrupted(own._lock, Turns._end.__code__) as interrupted, pytest.raises(KeyboardInterrupt):
        take_one(interrupted.begin)
    assert not own._under_way


def test_numbers_are_settled_though_ctrl_c_comes_while_that_waits_for_the_lock() -> None:
    own = Numbering()

    def fail(begin: Callable[[], None]) -> None:
        with own.sequences(1):
            begin()
            raise LookupError

    code = inspect.unwrap(Numbering.sequences).__code__
    with Interrupted(own._lock, code) as interrupted, pytest.raises(KeyboardInterrupt):
        fail(interrupted.begin)
    assert not own._open
