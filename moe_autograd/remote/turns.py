"""Updates and backwards of the same experts take turns, so that a step is of whole backwards, and knows of how many.

::

    thread 1    backward of a, b ─────────┐
    thread 2       backward of b ─────┐   │
    thread 3          step of a, b    ╰───┴─ step ─┐
    thread 4             backward of a             └─ backward

Backwards go side by side, an update of their experts goes alone. First come, first served: who waits is not overtaken
by those that would keep it waiting.

Mutable state: who is under way, and who waits, in order, under `_lock`. Each waits at a queue of its own, since Ctrl-C
can leave an event locked.

Threads: any.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

from moe_autograd._interrupts import uninterrupted, unwindable
from moe_autograd._waiting import get
from moe_autograd.errors import DeadlineExceededError, RemoteError, ServerUnavailableError
from moe_autograd.remote.operations import Operation


@dataclass(eq=False)
class _Turn:
    names: Collection[str]
    is_alone: bool
    bell: queue.SimpleQueue[None] = field(default_factory=queue.SimpleQueue)

    def excludes(self, other: _Turn) -> bool:
        return (self.is_alone or other.is_alone) and not set(self.names).isdisjoint(other.names)

    def ring(self) -> None:
        self.bell.put(None)


class Turns:
    """Of one connection."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._under_way: list[_Turn] = []
        self._waiting: list[_Turn] = []

    def __repr__(self) -> str:
        return f"Turns({len(self._under_way)} under way, {len(self._waiting)} waiting)"

    @unwindable
    def turn(self, rpc: str, names: Collection[str], operation: Operation) -> Iterator[RemoteError | None]:
        """Wait until an RPC for these experts may go, and keep those that it excludes waiting meanwhile.

        Returns:
            Yields why it may not go: a DeadlineExceededError if others were under way until the operation's deadline.

        Raises:
            ServerUnavailableError: the operation was cancelled before. A `zero_grad` that had its turn meanwhile does
                not know of what would go now.
        """
        if not names:
            yield None
            return
        own = _Turn(names, is_alone=rpc != "Backward")
        with uninterrupted() as section:  # or Ctrl-C would leave a turn that nobody ends
            try:
                has_begun = self._try_begin(own)
                with section.opened():
                    hindrance = None if has_begun else self._wait(own, rpc, operation)
                    if operation.cancellation.is_cancelled:
                        raise ServerUnavailableError(
                            f"{_place(own, rpc, operation)}: expected to be waited for, got cancelled: the connection "
                            "was closed, or a task. Nothing was changed."
                        )
                    yield hindrance
            finally:
                self._end(own)

    def _try_begin(self, own: _Turn) -> bool:
        with self._lock:
            others = [*self._under_way, *self._waiting]
            has_to_wait = any(own.excludes(other) for other in others)
            (self._waiting if has_to_wait else self._under_way).append(own)
        return not has_to_wait

    def _wait(self, own: _Turn, rpc: str, operation: Operation) -> RemoteError | None:
        operation.cancellation.add(own.ring)
        try:
            get(own.bell, operation.deadline.remaining_s)
        except queue.Empty:
            what = "backward or update" if own.is_alone else "update"
            return DeadlineExceededError(
                f"{_place(own, rpc, operation)}: expected another thread's {what} to end, got one that is under way. "
                "Nothing was changed."
            )
        finally:
            operation.cancellation.remove(own.ring)
        return None

    def _end(self, own: _Turn) -> None:
        with self._lock:
            for turns in (self._under_way, self._waiting):
                if own in turns:
                    turns.remove(own)
            still_waiting: list[_Turn] = []
            for turn in self._waiting:
                if any(turn.excludes(other) for other in [*self._under_way, *still_waiting]):
                    still_waiting.append(turn)
                else:
                    self._under_way.append(turn)
                    turn.ring()
            self._waiting = still_waiting


def _place(own: _Turn, rpc: str, operation: Operation) -> str:
    names = ", ".join(map(repr, own.names))
    return operation.place(f"experts {names}", rpc)
