"""Ctrl-C where it does the most harm: in grpc, and in Python's own locks, which then stay locked for ever.

A `threading.Condition` is entered by a function in Python, `__enter__`. An interrupt that comes when that has taken the
lock, and has not returned, leaves it locked; so do all that are made of one: events, semaphores, futures. Signals hit
such a moment once in a thousand times. Here a trace function raises there, and where else Ctrl-C may.

Where grpc waits for a call, real signals come; on a machine of Linux, which tells what sockets are open.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator

import pytest
import torch

from experts_server import ExpertsServer
from moe_autograd.autograd.parallel import parallel_apply
from moe_autograd.remote import RemoteExperts, RemoteOptimizer, connect
from moe_autograd.remote.forking import GATE
from tests.support.held import Held
from tests.support.hosting import make_modules, sgd
from tests.support.servers import wait_until, wait_until_inside

PATIENCE_S = 60.0


@pytest.fixture(scope="module", params=[False, True], ids=["", "hedged"])
def experts(request) -> Iterator[RemoteExperts]:
    with (
        ExpertsServer(make_modules(0, 1), optimizer=sgd) as first,
        ExpertsServer(make_modules(1, 2), optimizer=sgd) as second,
        connect([first.address, second.address], hedge=request.param, timeout_s=PATIENCE_S) as experts,
    ):
        yield experts


class Interrupting:
    """Raises KeyboardInterrupt when a lock has been taken for the nth time, unless Ctrl-C is held back."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.has_raised = False
        self.taken_in = ""  # the file

    def __call__(self, frame, event: str, argument: object):
        is_lock = frame.f_code.co_name == "__enter__" and frame.f_code.co_filename == threading.__file__
        if event == "call":
            # what Python raises in a finalizer it ignores
            return self if is_lock and frame.f_back.f_code.co_name != "__del__" else None
        if event == "return" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self.number -= 1
            if self.number == 0:
                self.has_raised = True
                self.taken_in = frame.f_back.f_code.co_filename
                raise KeyboardInterrupt
        return self


def train(experts: RemoteExperts) -> None:
    optimizer = RemoteOptimizer(experts)
    optimizer.zero_grad()
    outputs = parallel_apply(list(experts.values()), [(torch.ones(1, 4),)] * len(experts))
    sum(y.sum() for y in outputs).backward()
    optimizer.step()


def forget(experts: RemoteExperts) -> None:
    for _ in range(2):  # the second tells that the first has no backward
        parallel_apply(list(experts.values()), [(torch.ones(1, 4),)] * len(experts))


def load(experts: RemoteExperts) -> None:
    experts.load_state_dict(experts.state_dict())


@pytest.mark.parametrize("call", [train, forget, load, RemoteExperts.info])
def test_after_ctrl_c_in_any_lock_other_calls_go_on(experts, call: Callable[[RemoteExperts], object]):
    number, has_raised = 0, True
    while has_raised:
        number += 1
        interrupting = Interrupting(number)
        sys.settrace(interrupting)
        try:
            call(experts)
        except KeyboardInterrupt:
            pass
        finally:
            sys.settrace(None)
        has_raised = interrupting.has_raised
        assert "grpc" not in interrupting.taken_in  # whose threads may need it at once, or never
        other = threading.Thread(target=call, args=(experts,), daemon=True)
        other.start()
        other.join(PATIENCE_S)
        assert not other.is_alive(), f"it waits for ever after an interrupt in lock {number}"
        call(experts)
        wait_until(lambda: "(0 RPCs under way" in repr(GATE))  # else a fork would wait for it
    # One that was interrupted as it was begun never is alive, and the interpreter would wait for it at exit.
    wait_until(lambda: all(thread.is_alive() for thread in threading.enumerate()), patience_s=10.0)


def num_sockets() -> int:
    names = []
    for file in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # that of the listing
            names.append(os.readlink(f"/proc/self/fd/{file}"))
    return sum(name.startswith("socket:") for name in names)


@pytest.fixture
def busy() -> Iterator[ExpertsServer]:
    """A server whose expert is held by a call: what is asked of it waits."""
    held = Held("forward")
    with (
        ExpertsServer({"held": held}, optimizer=sgd) as server,
        connect(server.address, timeout_s=1000) as others,
    ):
        call = threading.Thread(target=others["held"], args=(torch.ones(1, 4),))
        call.start()
        try:
            assert held.begun.wait(PATIENCE_S)
            yield server
        finally:
            held.may_go.set()
            call.join()


def interrupt_what_waits(server: ExpertsServer) -> threading.Thread:
    """Send SIGINT once a second call is with the server."""
    wait_until_inside(server, 1)  # what has been asked before has left

    def interrupt() -> None:
        wait_until_inside(server, 2)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    return thread


@contextlib.contextmanager
def handling(handler: Callable[[int, object], object]) -> Iterator[None]:
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


WAITING = {
    "forward": lambda experts: experts["held"](torch.ones(1, 4)),
    "state_dict": RemoteExperts.state_dict,
}


@pytest.mark.parametrize("what", WAITING)
def test_ctrl_c_in_a_call_leaves_no_socket_open(busy: ExpertsServer, what: str):
    before = num_sockets()
    for _ in range(3):
        with connect(busy.address, timeout_s=PATIENCE_S) as experts:
            interrupting = interrupt_what_waits(busy)
            with pytest.raises(KeyboardInterrupt) as raised:
                WAITING[what](experts)
            interrupting.join()
        told = "".join(traceback.format_exception(raised.value))
        assert "During handling" not in told  # of the call that was cancelled for it
        wait_until_inside(busy, 1)
    wait_until(lambda: num_sockets() <= before, PATIENCE_S)


def test_a_backward_that_ctrl_c_has_ended_before_its_turn_is_not_missed_by_the_step():
    held = Held("backward")
    with (
        ExpertsServer({"held": held}, optimizer=sgd) as server,
        connect(server.address, timeout_s=1000) as others,
        connect(server.address, timeout_s=1000) as experts,
    ):
        others_y, y = (own["held"](torch.ones(1, 4)).sum() for own in (others, experts))
        before = threading.Thread(target=others_y.backward)
        before.start()
        assert held.begun.wait(PATIENCE_S)
        interrupting = interrupt_what_waits(server)
        with pytest.raises(KeyboardInterrupt):
            y.backward()
        interrupting.join()
        wait_until_inside(server, 1)
        held.may_go.set()
        before.join()
        experts["held"](torch.ones(1, 4)).sum().backward()
        RemoteOptimizer(experts).step()
        assert server.num_updates == {"held": 1}


def test_a_handler_that_raises_nothing_lets_the_call_go_on(busy: ExpertsServer):
    came, held = threading.Event(), busy._server.registry["held"].hosted.module
    with handling(lambda *_: came.set()), connect(busy.address, timeout_s=PATIENCE_S) as experts:
        interrupting = interrupt_what_waits(busy)
        going_on = threading.Thread(target=lambda: came.wait(PATIENCE_S) and held.may_go.set())
        going_on.start()
        assert WAITING["forward"](experts).shape == (1, 4)
        interrupting.join()
        going_on.join()


def test_what_a_handler_puts_in_its_place_in_the_middle_of_a_call_stays_there(busy: ExpertsServer):
    class StopError(Exception):
        pass

    def stop(*_: object) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        raise StopError("enough") from LookupError("why")

    with handling(stop), connect(busy.address, timeout_s=PATIENCE_S) as experts:
        interrupting = interrupt_what_waits(busy)
        with pytest.raises(StopError) as raised:
            WAITING["forward"](experts)
        interrupting.join()
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    assert isinstance(raised.value.__cause__, LookupError)
