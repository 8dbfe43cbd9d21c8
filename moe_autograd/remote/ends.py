"""The ends of streams, for which nobody waits.

A stream has brought all that it should before it ends: a server says its end 0.2 to 1.5 ms after the last message,
which is much beside a small call. So streams are left, and ended later: when the next one has begun, when their channel
closes, or before the interpreter takes itself apart, since grpc would fail to end them then, and print that.

Mutable state: the streams that were left; each is put and taken by operations that the interpreter makes atomic.

Threads: any.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import weakref
from collections import deque
from typing import Any

import grpc

from moe_autograd.remote.interrupts import interrupts_held_back
from moe_autograd.wire.status import CLOSED_HERE


class LeftStreams:
    """Those of one channel."""

    def __init__(self) -> None:
        self._streams: deque[Any] = deque()
        _alive.add(self)

    def add(self, stream: Any) -> None:
        """Leave a stream."""
        self._streams.append(stream)

    def end_all_but(self, num_kept: int) -> None:
        """End streams, the oldest first."""
        while len(self) > num_kept:
            with contextlib.suppress(IndexError):  # another thread took it
                end(self._streams.popleft())

    def __len__(self) -> int:
        return len(self._streams)

    def __repr__(self) -> str:
        return f"LeftStreams({len(self)})"


def end(stream: Any) -> None:
    """End a stream: cancelled, if it has not ended; to be called by the thread that reads it.

    Where no thread of grpc reads its events, it keeps 25 KB for ever of each call whose events are not all read, as
    those of one that was cancelled are not. Not where a signal's handler has raised while one was read: then nobody
    knows which have been. (What Ctrl-C raises is held back.)
    """
    stream.cancel()
    if hasattr(stream, "_consume_next_event"):
        while stream._state.due:
            stream._consume_next_event()


class NotBegunError(grpc.RpcError):
    """What its operation was cancelled before: it fails as an RPC does that is cancelled under way."""

    def code(self) -> grpc.StatusCode:
        """Return the code of an RPC that is cancelled."""
        return grpc.StatusCode.CANCELLED

    def details(self) -> str:
        """Return what grpc says of one."""
        return CLOSED_HERE[0]

    def trailing_metadata(self) -> tuple[()]:
        """Return what no server has sent."""
        return ()


_alive: weakref.WeakSet[LeftStreams] = weakref.WeakSet()


def _end_all() -> None:
    with interrupts_held_back():
        for left in tuple(_alive):
            left.end_all_but(0)


atexit.register(_end_all)
if hasattr(os, "register_at_fork"):
    # A child has its parent's streams, and not what serves them.
    os.register_at_fork(after_in_child=_alive.clear)
