"""A fork waits until no RPC is under way, since grpc forks well only then.

grpc has preparations of its own for a fork, and skips them while a thread is in it; with an RPC under way one always
is. Then the child has queues and locks of threads that it does not have. Of 500 forks on a busy machine, beside 8
threads that called, 10 to 20 children were aborted by grpc, some before a line of theirs ran, and 2 to 4 calls of the
parent got no answer before their deadline. Hence::

    fork                                   RPCs
    close the gate                         what would begin waits, no longer than its operation does
    cancel the streams under way    ───▶   they end
    wait until all RPCs have ended, and a little longer
    fork
    open the gate                   ───▶   what was cancelled begins again: a server knows changes by their numbers

A stream is cancelled once: the second time forks wait for it, else a long one would never end beside many forks.

What a server has sent behind the end of an RPC is taken by threads of grpc's own, one of which may just hold a lock
that the child then waits for, for ever, before a line of its own runs: on a busy machine one child in 600 did. Of some
10,000 that were forked 5 ms after the end of the last RPC one has hung, perhaps for a lock of torch's that each node of
a backward takes; `_SETTLE_S` is a few slices of a scheduler.

A fork does not wait longer than `_PATIENCE_S`: an update can be long, and a busy machine took 2 s to end short calls.
Nor for an RPC of its own thread, such as one that a signal's handler forks in: that waits for the handler.
A child that was forked all the same is told so when it begins an RPC: whether it would get an answer, nobody knows.

Mutable state: the gate's, changed by single operations that the interpreter makes atomic. There is no lock: an RPC that
a finalizer makes, wherever garbage is collected on the thread that has one, would wait for itself. So whoever begins an
RPC says so first and then looks for forks, and a fork does the reverse: one of the two sees the other. A child begins
with a gate of its own.

Threads: any.
"""

from __future__ import annotations

import math
import os
import queue
import threading
import time
import weakref
from typing import Any

from moe_autograd._interrupts import uninterrupted
from moe_autograd._waiting import get
from moe_autograd.errors import DeadlineExceededError, RemoteError, ServerUnavailableError, StragglerError
from moe_autograd.remote.operations import Operation

_PATIENCE_S = 10.0
_SETTLE_S = 0.02
_LOOK_S = 0.001


class KeptWaitingError(Exception):
    """An RPC has not begun, since a thread forks.

    Args:
        operation: that it would have been a part of; None: it does not wait.
    """

    def __init__(self, operation: Operation | None) -> None:
        super().__init__()
        self._cancellation = None if operation is None else operation.cancellation

    def at(self, place: str) -> RemoteError:
        """Return our error for it; `place` says whose RPC it was."""
        while_forking = f"{place}: expected to wait until another thread has forked"
        if self._cancellation is None or not self._cancellation.is_cancelled:
            return DeadlineExceededError(f"{while_forking}, got no end of that in time. Nothing was sent.")
        if self._cancellation.reason:
            return StragglerError(f"{place}: {self._cancellation.reason}")
        return ServerUnavailableError(
            f"{while_forking}, got cancelled: the connection was closed, or a task. Nothing was sent."
        )


class Passage:
    """One RPC under way, made in a `with` block.

    Args:
        gate: that it goes through.
        operation: that it is a part of; None: it does not wait for a fork.
        may_interrupt: whether a fork may cancel it.

    Attributes:
        is_interrupted: whether one has, so that what has not come is to be asked for again.
        operation: see above.
        thread: that is in the block; None: only grpc has not done with it yet.
    """

    def __init__(self, gate: Gate, operation: Operation | None, *, may_interrupt: bool) -> None:
        self.is_interrupted = False
        self.operation = operation
        self.thread: int | None = None
        self._gate = gate
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._may_interrupt = may_interrupt
        self._call: Any = None
        self._has_thread = False

    def __enter__(self) -> Passage:
        self.thread = threading.get_ident()
        self._gate.let_in(self)
        return self

    def __exit__(self, *_: object) -> None:
        with uninterrupted():  # else Ctrl-C may leave grpc's lock of this call locked, and its channel waits
            if self._has_thread and self._call.add_callback(self._end):
                self.thread = None
            else:
                self._end()

    def _end(self) -> None:
        self._gate.let_out(self)

    def ring(self) -> None:
        """Have it look again whether it may begin."""
        self._bell.put(None)

    def hears(self, timeout_s: float) -> bool:
        """Wait until it is rung; return whether that was in time."""
        try:
            get(self._bell, timeout_s)
        except queue.Empty:
            return False
        return True

    def carry(self, call: Any, *, has_thread: bool) -> None:
        """Have a call of grpc cancelled when the process is about to fork; at once if it is.

        Args:
            call: what grpc returned when it began.
            has_thread: whether grpc serves it by a thread of its own.
        """
        self._call, self._has_thread = call, has_thread
        if self.is_interrupted:
            call.cancel()

    def interrupt(self) -> None:
        """Cancel it, if that may be."""
        self.is_interrupted = self._may_interrupt
        if self.is_interrupted and self._call is not None:
            self._call.cancel()


class _Fork(threading.local):
    """What the last fork of a thread has seen."""

    num_left = 0  # RPCs that were under way when it had last looked


class Gate:
    """What RPCs pass, and forks close."""

    def __init__(self) -> None:
        self._num_torn = 0  # RPCs of the parent that were under way when this process was forked from it
        self._fork = _Fork()
        self._begin_anew()

    def _begin_anew(self) -> None:
        # By `id`; weak, as Ctrl-C may come before one is taken out.
        self._under_way: weakref.WeakValueDictionary[int, Passage] = weakref.WeakValueDictionary()
        self._waiting: weakref.WeakValueDictionary[int, Passage] = weakref.WeakValueDictionary()
        self._forking: list[int] = []  # the threads that fork
        self._ended_s = -math.inf  # when the last RPC did

    def passage(self, operation: Operation | None = None, *, may_interrupt: bool = False) -> Passage:
        """Return one to make an RPC in.

        Args:
            operation: that it is a part of: it waits as long as that for a fork; None: not at all.
            may_interrupt: whether a fork may cancel it; otherwise forks wait for it.
        """
        return Passage(self, operation, may_interrupt=may_interrupt)

    def let_in(self, passage: Passage) -> None:
        """Let an RPC begin; waits while a thread forks.

        Raises:
            KeptWaitingError: that was so until the operation's deadline, or until it was cancelled.
            RuntimeError: grpc does not work in this process, or this thread forks itself.
        """
        if self._num_torn:
            raise RuntimeError(
                f"process {os.getpid()}: expected to be forked between RPCs, got forked with {self._num_torn} under "
                f"way, on the thread that forked or, for {_PATIENCE_S} s, on others. grpc does not work in it: fork "
                "later, or spawn."
            )
        if not self._try_let_in(passage):
            self._wait(passage)

    def _try_let_in(self, passage: Passage) -> bool:
        if self._forking:
            return False
        self._under_way[id(passage)] = passage
        if not self._forking:
            return True
        # A fork has begun, and may have interrupted what has not begun.
        self._under_way.pop(id(passage), None)
        return False

    def _wait(self, passage: Passage) -> None:
        operation = passage.operation
        if operation is None:
            raise KeptWaitingError(None)
        if threading.get_ident() in self._forking:
            raise RuntimeError(
                "fork: expected no call until it is over, got one on the thread that forks, of a finalizer or a "
                "handler of `os.register_at_fork`. It would wait for itself: nothing was sent."
            )
        operation.cancellation.add(passage.ring)
        try:
            self._waiting[id(passage)] = passage
            while not self._try_let_in(passage):
                if operation.cancellation.is_cancelled or not passage.hears(operation.deadline.remaining_s):
                    raise KeptWaitingError(operation)
        finally:
            self._waiting.pop(id(passage), None)
            operation.cancellation.remove(passage.ring)

    def let_out(self, passage: Passage) -> None:
        """Note that an RPC has ended."""
        self._ended_s = time.monotonic()
        self._under_way.pop(id(passage), None)

    # ---- forks

    def close(self) -> None:
        """Prepare a fork."""
        until_s = time.monotonic() + _PATIENCE_S
        self._forking.append(threading.get_ident())
        with uninterrupted():  # as in `Passage.__exit__`
            for passage in _alive(self._under_way):
                passage.interrupt()
        while self._is_to_wait() and time.monotonic() < until_s:
            time.sleep(_LOOK_S)
        time.sleep(max(0.0, self._ended_s + _SETTLE_S - time.monotonic()))

    def _is_to_wait(self) -> bool:
        """Look what is under way; return whether any of it can end before the fork."""
        left = _alive(self._under_way)
        self._fork.num_left = len(left)
        return any(passage.thread != threading.get_ident() for passage in left)

    def open(self) -> None:
        """Go on after a fork."""
        if threading.get_ident() in self._forking:  # else Ctrl-C has come just as it was to be closed
            self._forking.remove(threading.get_ident())
        for passage in _alive(self._waiting):
            passage.ring()

    def become_childs(self) -> None:
        """Go on in a forked child, which has none of the threads that passed."""
        self._num_torn += self._fork.num_left
        self._begin_anew()

    def __repr__(self) -> str:
        return f"Gate({len(self._under_way)} RPCs under way, {len(self._forking)} forks)"


def _alive(passages: weakref.WeakValueDictionary[int, Passage]) -> list[Passage]:
    """Return those that there are, though others come and go."""
    return [passage for known in passages.valuerefs() if (passage := known()) is not None]


GATE = Gate()

if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=GATE.close, after_in_parent=GATE.open, after_in_child=GATE.become_childs)
