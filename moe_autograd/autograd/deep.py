"""Graphs of thousands of nodes in a row, and how they end.

Torch frees nodes that Python has never seen in a loop; of those that it has seen, since 2.13, each frees the next one
from within itself. Some 34,000 of them fill a stack of 8 MB, and the process ends with a segmentation fault. Whoever
walks a graph, as a map does to find the leaves that its calls reached, has seen them all.

So every 1,000th node of a deep graph, counted from below, is a *stop*, and holds the nodes down to the next one::

        y ──▶ ... ──▶ stop ──▶ n1 ──▶ n2 ──▶ ... ──▶ stop ──▶ ...
                       └── [stop, ..., n2, n1]

The list outlives its stop, so that the descent ends there, and a thread lets go of it from above: what a node leads to
is then held by the list, and no node frees another. (Who frees the stop cannot do it: he comes to n1 when the list is
gone. Nor may he wait for a lock, as `threading.Thread.start` does.) Nodes that several stops lead to are in a list that
these share: a node is held by what leads to it anyway, and lives no longer than without.

Mutable state: `_left`, of which each list is taken by one thread; `_busy`, of which single entries are put and taken.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import os
import time
from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from torch.autograd.graph import Node

DEEP = 3_000  # nodes, which take 0.7 MB of stack
_STRETCH = 1_000
_BELOW = "moe_autograd: below"  # in a node's metadata, which go with it
_LOOK_S = 0.002

_Below: TypeAlias = Mapping[Node, Sequence[Any]]  # the nodes that each leads to

_left: deque[list[Node]] = deque()
_busy: set[int] = set()  # threads


class _Held:
    """Nodes, for when all stops that lead to them are gone; what leads to others comes last."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []

    def __del__(self) -> None:
        _left.append(self.nodes)
        if _thread.get_ident() in _busy:  # this thread comes to it
            return
        with contextlib.suppress(RuntimeError):  # no thread to give: the next one's takes these, too
            _thread.start_new_thread(_let_go, ())


def note_seen(nodes: Collection[Node]) -> None:
    """Say that somebody has walked a graph, and met these nodes."""
    if len(nodes) < DEEP:
        return
    below: _Below = {node: [one for one, _ in node.next_functions if one in nodes] for node in nodes}
    heights = _heights(below)
    if max(heights.values()) < DEEP:
        return
    stops: dict[int, list[Any]] = defaultdict(list)  # by height
    leading = _stops_that_lead_to(below, heights, stops)
    if all(_BELOW in stop.metadata for row in stops.values() for stop in row):
        return  # somebody has walked it before
    held: dict[tuple[int, int], _Held] = defaultdict(_Held)
    for node, height in heights.items():
        if bits := leading.get(node, 0):
            held[_next_stop(height), bits].nodes.append(node)
    of_stops: dict[Any, list[_Held]] = defaultdict(list)
    for (height, bits), own in held.items():
        for place, stop in enumerate(stops[height]):
            if bits >> place & 1:
                of_stops[stop].append(own)
    for stop, all_own in of_stops.items():
        stop.metadata.setdefault(_BELOW, all_own)


def _heights(below: _Below) -> dict[Node, int]:
    """Return how many nodes are one below the other, from each one on; nodes come after those that they lead to."""
    try:
        return _heights_in(sorted(below, key=lambda node: node._sequence_nr() if below[node] else -1), below)
    except KeyError:  # several threads have made them, each of which counts by itself
        return _heights_in(_after_those_below(below), below)


def _heights_in(order: Iterable[Node], below: _Below) -> dict[Node, int]:
    heights: dict[Node, int] = {}
    height_of = heights.__getitem__
    for node in order:
        heights[node] = 1 + max(map(height_of, below[node]), default=0)
    return heights


def _after_those_below(below: _Below) -> Iterator[Node]:
    """Yield nodes after those that they lead to."""
    is_done = dict.fromkeys(below, False)
    for start in below:
        to_visit = [start]
        while to_visit:
            node = to_visit[-1]
            ahead = [] if is_done[node] else [one for one in below[node] if not is_done[one]]
            if ahead:
                to_visit += ahead
                continue
            to_visit.pop()
            if not is_done[node]:
                is_done[node] = True
                yield node


def _next_stop(height: int) -> int:
    return height - height % _STRETCH + _STRETCH


def _stops_that_lead_to(
    below: _Below, heights: dict[Node, int], stops: dict[int, list[Any]]
) -> dict[Node, int]:
    """Return for each node a bit for each stop that leads to it, of those next above it.

    Args:
        below: what each node leads to.
        heights: of all nodes.
        stops: filled with the stops, by their heights.
    """
    leading: dict[Node, int] = defaultdict(int)
    for node in reversed(heights):
        height = heights[node]
        if height % _STRETCH == 0:
            bits, lowest = 1 << len(stops[height]), height - _STRETCH
            stops[height].append(node)
        else:
            bits, lowest = leading.get(node, 0), height - height % _STRETCH
        for one in below[node] if bits else ():
            if heights[one] >= lowest:
                leading[one] |= bits
    return leading


def _let_go() -> None:
    _busy.add(_thread.get_ident())
    while _left:
        try:
            nodes = _left.popleft()
        except IndexError:  # another thread took them
            break
        while nodes:
            nodes.pop()
    _busy.discard(_thread.get_ident())


def _end_before_exit() -> None:
    """Free what is left while there is an interpreter: a thread in the midst of it would abort the process."""
    _let_go()
    while _busy:
        time.sleep(_LOOK_S)


atexit.register(_end_before_exit)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_busy.clear)
