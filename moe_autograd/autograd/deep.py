"""Graphs of thousands of nodes in a row, and how they end.

Torch frees nodes that Python has never seen in a loop; of those that it has seen, since 2.13, each frees the next one
from within itself. Some 34,000 of them fill a stack of 8 MB, and the process ends with a segmentation fault. Whoever
walks a graph, as a map does to find the leaves that its calls reached, has seen them all.

So every 2,000th node of a deep graph, counted from below, is given the nodes down to the next such one::

        y ──▶ ... ──▶ s ──▶ n1 ──▶ n2 ──▶ ... ──▶ s' ──▶ ...
                      └── [s', ..., n2, n1]                    s is being freed: these are held still

The list outlives its node, which ends the descent there, and a thread lets go of it from above: what a node leads to is
then held by the list, and no node frees another. (Who frees `s` cannot do it: he comes to n1 when the list is gone. Nor
may he wait for a lock, as `threading.Thread.start` does.)

Mutable state: `_left`, of which each list is taken by one thread; `_busy`, of which single entries are put and taken.
"""

from __future__ import annotations

import _thread
import atexit
import contextlib
import operator
import os
import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch.autograd.graph import Node

DEEP = 8_000  # nodes, which take 2 MB of stack
_STRETCH = 2_000
_BELOW = "moe_autograd: below"  # in a node's metadata, which go with it
_LOOK_S = 0.002

_left: deque[list[Node]] = deque()
_busy: set[int] = set()  # threads


def note_seen(nodes: Collection[Node]) -> None:
    """Say that somebody has walked a graph, and met these nodes."""
    if len(nodes) < DEEP:
        return
    below: dict[Node, list[Node]] = {}
    heights: dict[Node, int] = {}
    # A node is made after those it leads to, but for the leaves, which lead nowhere.
    for node in sorted(nodes, key=operator.methodcaller("_sequence_nr")):
        below[node] = [one for one, _ in node.next_functions if one in heights]
        heights[node] = 1 + max(map(heights.__getitem__, below[node]), default=0)
    for node, height in heights.items():
        if height % _STRETCH == 0:
            metadata: Any = node.metadata
            if _BELOW not in metadata:
                metadata[_BELOW] = _Below(_stretch(node, below, heights))


def _stretch(top: Node, below: Mapping[Node, Sequence[Node]], heights: Mapping[Node, int]) -> list[Node]:
    """Return the nodes below one, down to the next that are given theirs; the highest last."""
    lowest, found, to_visit = heights[top] - _STRETCH, set[Node](), [top]
    while to_visit:
        for node in below[to_visit.pop()]:
            if heights[node] >= lowest and node not in found:
                found.add(node)
                to_visit.append(node)
    return sorted(found, key=heights.__getitem__)


class _Below:
    """Nodes, for when the one above them is gone."""

    def __init__(self, nodes: list[Node]) -> None:
        self._nodes = nodes

    def __del__(self) -> None:
        _left.append(self._nodes)
        if _thread.get_ident() in _busy:  # this thread comes to it
            return
        with contextlib.suppress(RuntimeError):  # no thread to give: the next one's takes these, too
            _thread.start_new_thread(_let_go, ())


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
