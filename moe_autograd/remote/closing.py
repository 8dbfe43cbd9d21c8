"""Close connections: cancel what is under way, tell servers that no forward has a backward any more, and disconnect.

Where a server is to be told something, which may be far away, frozen or gone, or a call is still to end, the rest is
done on a thread of its own, within `_LAST_WORD_S`: who closes a connection, such as a loop's thread, goes on at once.

So it is with connections that nobody holds any more. The garbage collector comes upon them on any thread, at almost any
instruction, and collects nothing else before it is done with one. What closed a connection there would wait for grpc's
threads: on one of these for itself, and elsewhere for one that waits for a lock held just there, such as a channel's.

Hence the thread is begun by what takes no lock and waits for nothing: `threading.Thread.start` does both. A process
that ends waits for such threads, as long as they may take; who closes a connection after that does it all himself.

Mutable state: `_to_end`, each taken out by one thread, and `_ending`, of which single entries are put and taken.
"""

from __future__ import annotations

import _thread
import atexit
import os
import threading
import time
from collections import deque

from moe_autograd.remote.cancelling import Cancellation
from moe_autograd.remote.deadline import Deadline
from moe_autograd.remote.delivery import Delivery
from moe_autograd.remote.forking import GATE
from moe_autograd.remote.leaving import LeftForwards
from moe_autograd.remote.operations import Operation
from moe_autograd.wire.options import LONGEST_S

_LAST_WORD_S = 0.25  # that it takes at most until a connection is closed
_LOOK_S = 0.002

_to_end: deque[tuple[Delivery, LeftForwards]] = deque()
_ending: set[int] = set()  # threads
_has_waited = threading.Event()  # set when the process ends, and would wait for no other


def close(delivery: Delivery, left: LeftForwards) -> None:
    """Close a connection that its user has done with. In a forked child: nothing to do."""
    if not delivery.operations.is_here:
        return
    delivery.operations.close()
    left.note_all()
    if not (left or left.num_passes):
        delivery.close()
        return
    _to_end.append((delivery, left))
    if _has_waited.is_set() or not _begin_thread():
        _end_all()


def close_apart(delivery: Delivery, left: LeftForwards) -> None:
    """Have a connection closed soon that nobody holds any more. In a forked child: nothing to do.

    Where the system has no thread to give, that of the next one closes it as well.
    """
    if delivery.operations.is_here:
        _to_end.append((delivery, left))
        _begin_thread()


def _begin_thread() -> bool:
    """Begin a thread; return whether there was one."""
    try:
        _thread.start_new_thread(_end_all, ())
    except RuntimeError:
        return False
    return True


def _end_all() -> None:
    _ending.add(_thread.get_ident())
    while _to_end:
        try:
            delivery, left = _to_end.popleft()
        except IndexError:  # another thread took it
            break
        with GATE.passage(Operation(Deadline(LONGEST_S), Cancellation())):  # not beside a fork
            _end(delivery, left)
    _ending.discard(_thread.get_ident())


def _end(delivery: Delivery, left: LeftForwards) -> None:
    until_s = time.monotonic() + _LAST_WORD_S
    delivery.operations.close()
    while left.num_passes and time.monotonic() < until_s:
        time.sleep(_LOOK_S)
    left.note_all()
    left.tell()
    delivery.finding.servers.wait_until_told(until_s)
    delivery.close()


def _wait_at_exit() -> None:
    _has_waited.set()
    until_s = time.monotonic() + 2 * _LAST_WORD_S
    while (_to_end or _ending) and time.monotonic() < until_s:
        time.sleep(_LOOK_S)


def _begin_anew() -> None:
    """A forked child has none of these threads, and may not use the parent's connections."""
    _to_end.clear()
    _ending.clear()


atexit.register(_wait_at_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_anew)
