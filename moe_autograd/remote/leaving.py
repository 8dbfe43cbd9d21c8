"""Forwards whose graph is gone: their servers need not keep them any longer.

A server keeps a forward until its backward comes, or for minutes. But some never have one: the second run under
`torch.utils.checkpoint`, a loss that was only looked at, a graph that was retained to its end::

    forward ── a node, which holds a `Node` ── ... ── the graph goes ──▶ left: (address, expert, call)
    forward ── it fails here, or another one of its pass does ─────────▶ left, as its server may have computed it
    forward ── another server answered it in the end ──────────────────▶ left, at each that was asked before
    next pass of the connection ─────────────────────────────────────▶ "forget these", which nobody waits for
                                     that is lost on its way ─────▶ once more, with the pass after it
    the connection is closed ────────────────────────────────────────▶ all are left, as no backward can come any more

Mutable state: `_left`, `_alive` and `_passes`, of which single entries are put and taken; a graph may go on any thread,
and anywhere.

Threads: any.
"""

from __future__ import annotations

import functools
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from moe_autograd._contexts import contextmanager

if TYPE_CHECKING:
    from moe_autograd.remote.jobs import Job
    from moe_autograd.remote.parts import Call

_MOST_KEPT_BACK = 256  # for servers that are lost; they let go of the others by themselves, in minutes

CallsAt = dict[str, list[tuple[str, int]]]  # experts and call ids, by the address of their server


class Node:
    """Held by a node of the graph alone."""

    __slots__ = ("__weakref__",)


class LeftForwards:
    """Those of one connection.

    Args:
        tell: sends to the server at an address which calls of which experts are over, and returns at once. What it is
            given third it calls, then or later, from any thread, where that did not arrive.
    """

    def __init__(self, tell: Callable[[str, list[tuple[str, int]], Callable[[], None]], None]) -> None:
        self._tell = tell
        self._left: deque[tuple[str, str, int]] = deque()
        self._alive: dict[int, Sequence[Call]] = {}  # those of nodes that are still there, by their `id`
        self._passes: set[object] = set()

    @contextmanager
    def passing(self) -> Iterator[None]:
        """Let it be known of a pass until its forwards have failed, or their node is there."""
        this = object()
        try:
            self._passes.add(this)
            yield
        finally:
            self._passes.discard(this)

    @property
    def num_passes(self) -> int:
        """How many passes may still leave something."""
        return len(self._passes)

    def node_of(self, calls: Sequence[Call]) -> Node:
        """Return what the node of these calls is to hold."""
        node = Node()
        self._alive[id(node)] = calls
        weakref.finalize(node, _note_gone, self._left, self._alive, id(node)).atexit = False
        return node

    def note_failed(self, jobs: Sequence[Job], *, is_whole: bool) -> None:
        """Note where forwards of a pass have failed, and so have no backward; nor has any of a pass that raises."""
        for job in jobs:
            head = job.request.head
            if head.keep_graph:
                is_lost = not is_whole or job.outcome.error is not None
                addresses = (
                    job.request.asked | {job.address} if is_lost else job.request.asked - {job.address}
                )
                self._left.extend((address, head.expert, head.call_id) for address in addresses if address)

    def note_all(self) -> None:
        """Note the forwards of all graphs, also of those that are still there: the connection is about to close."""
        for node in [*self._alive]:
            _note_gone(self._left, self._alive, node)

    def tell(self) -> None:
        """Let servers know of the graphs that have gone since the last time."""
        calls_at: CallsAt = {}
        while self._left:
            try:
                address, expert, call_id = self._left.popleft()
            except IndexError:  # another thread took it
                break
            calls_at.setdefault(address, []).append((expert, call_id))
        for address, calls in calls_at.items():
            self._tell(address, calls, functools.partial(self._keep_back, address, calls))

    def _keep_back(self, address: str, calls: Sequence[tuple[str, int]]) -> None:
        """Let them be told of once more, with the next pass."""
        room = max(0, _MOST_KEPT_BACK - len(self._left))
        self._left.extend([(address, *call) for call in calls[:room]])

    def __len__(self) -> int:
        return len(self._left)

    def __repr__(self) -> str:
        return f"LeftForwards({len(self)} to tell of)"


def _note_gone(left: deque[tuple[str, str, int]], alive: dict[int, Sequence[Call]], node: int) -> None:
    calls = alive.pop(node, ())
    left.extend((call.address, call.expert, call.call_id) for call in calls if call.is_kept)
