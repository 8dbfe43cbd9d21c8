"""Close connections that nobody holds any more.

The garbage collector comes upon them on any thread, at almost any instruction, and collects nothing else before it is
done with one. What closed a connection there would wait for grpc's threads: on one of these for itself, and elsewhere
for one that waits for a lock held just there, such as a channel's. Hence another thread closes it, begun
by what takes no lock and waits for nothing: `threading.Thread.start` does both.

Mutable state: `_abandoned`, each taken out by one thread.
"""

from __future__ import annotations

import _thread
import contextlib
from collections import deque

from moe_autograd.remote.cancelling import Cancellation
from moe_autograd.remote.deadline import Deadline
from moe_autograd.remote.delivery import Delivery
from moe_autograd.remote.forking import GATE
from moe_autograd.remote.operations import Operation
from moe_autograd.wire.options import LONGEST_S

_abandoned: deque[Delivery] = deque()


def close_apart(delivery: Delivery) -> None:
    """Have a connection closed soon; returns at once. In a forked child: nothing to do.

    Where the system has no thread to give, that of the next one closes it as well.
    """
    if delivery.operations.is_here:
        _abandoned.append(delivery)
        with contextlib.suppress(RuntimeError):
            _thread.start_new_thread(_close_all, ())


def _close_all() -> None:
    while _abandoned:
        try:
            delivery = _abandoned.popleft()
        except IndexError:  # another thread took it
            break
        with GATE.passage(Operation(Deadline(LONGEST_S), Cancellation())):  # not beside a fork
            delivery.close()
