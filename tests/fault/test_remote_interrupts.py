"""Ctrl-C where it does the most harm: in Python's own locks, which then stay locked for ever.

A `threading.Condition` is entered by a function in Python, `__enter__`. An interrupt that comes when that has taken the
lock, and has not returned, leaves it locked; so do all that are made of one: events, semaphores, futures. Signals hit
such a moment once in a thousand times. Here a trace function raises there, and where else Ctrl-C may.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
import torch

from experts_server import ExpertsServer
from moe_autograd.autograd.parallel import parallel_apply
from moe_autograd.remote import RemoteExperts, RemoteOptimizer, connect
from moe_autograd.remote.forking import GATE
from tests.support.hosting import make_modules, sgd
from tests.support.servers import wait_until

GRPC = str(Path(grpc.__file__).parent)
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

    def __call__(self, frame, event: str, argument: object):
        is_lock = frame.f_code.co_name == "__enter__" and frame.f_code.co_filename == threading.__file__
        if event == "call":
            return self if is_lock and not frame.f_back.f_code.co_filename.startswith(GRPC) else None
        if event == "return" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            self.number -= 1
            if self.number == 0:
                self.has_raised = True
                raise KeyboardInterrupt
        return self


def train(experts: RemoteExperts) -> None:
    optimizer = RemoteOptimizer(experts)
    optimizer.zero_grad()
    outputs = parallel_apply(list(experts.values()), [(torch.ones(1, 4),)] * len(experts))
    sum(y.sum() for y in outputs).backward()
    optimizer.step()


@pytest.mark.parametrize(
    "call", [train, RemoteExperts.state_dict, RemoteExperts.info], ids=["training", "state_dict", "info"]
)
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
        other = threading.Thread(target=call, args=(experts,), daemon=True)
        other.start()
        other.join(PATIENCE_S)
        assert not other.is_alive(), f"it waits for ever after an interrupt in lock {number}"
        call(experts)
        wait_until(lambda: "(0 RPCs under way" in repr(GATE))  # else a fork would wait for it
