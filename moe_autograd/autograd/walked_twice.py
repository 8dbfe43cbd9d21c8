"""Nodes that a call's own backward walks and the engine walks as well: the engine is to come last, as it frees them.

A call that holds a tensor computed from another of its cuts walks what lies between the two (`module_calls`, Rule 3).
The engine runs, of the nodes that are ready, the one with the highest number; so in a graph that one thread has made it
comes there after the call's join. But each thread numbers its nodes by itself. Where another one makes the graph of a
backward, as on a GPU, the numbers of that graph may all be lower, and the engine would not wait for it.
"""

from __future__ import annotations

import threading
from collections.abc import Collection

import torch
from torch._C._autograd import _get_sequence_nr
from torch.autograd.graph import Node

from moe_autograd._random import running
from moe_autograd.autograd.joined import ACCUMULATE_GRAD
from moe_autograd.autograd.result_hooks import joined_by
from moe_autograd.autograd.this_backward import kept_by_this_backward
from moe_autograd.autograd.walks import Edge, walk

_KEY = object()
_here = threading.local()  # `num_nodes`: how many nodes this thread had made when it was here last


class _PutLast:
    """The nodes that a backward has put last so far, and the numbers that they had.

    Attributes:
        room: how many numbers there are below those of all nodes that this backward makes.
    """

    def __init__(self) -> None:
        self.numbers: dict[Node, int] = {}
        self.room = getattr(_here, "num_nodes", 0)


def let_engine_come_last(passed: Collection[Edge], ends: Collection[Edge]) -> None:
    """Give nodes that another thread has made the lowest numbers there are, in the order that they had.

    Only for a node that the engine runs; within a call, and where compiled autograd runs it, it does nothing. In the
    first such backward of a thread, which numbers from nought, all get the same: then it is not sure to help.

    Args:
        passed: where a call goes on, though the outer graph begins there.
        ends: where it ends.
    """
    is_within_a_call = running.seeds is not None  # whose thread's numbers say nothing
    if is_within_a_call or torch._C._current_graph_task_id() == -1:
        return
    found: dict[Node, int] = {}
    _note(passed, ends, found)
    if max(found.values(), default=0) < _get_sequence_nr():
        return
    last = kept_by_this_backward(_KEY, _PutLast)
    _here.num_nodes = _get_sequence_nr()
    for node, number in found.items():
        last.numbers.setdefault(node, number)
    in_order = sorted(last.numbers.items(), key=lambda item: item[1])
    for rank, (node, _) in enumerate(in_order, 1):  # 0 is a departure's that waits (`join`, Rule 7)
        node._set_sequence_nr(rank if len(in_order) < last.room else 0)  # type: ignore[attr-defined]


def _note(passed: Collection[Edge], ends: Collection[Edge], found: dict[Node, int]) -> None:
    for node, _ in walk(passed, ends):
        if node is None or node in found or type(node) is ACCUMULATE_GRAD:
            continue
        found[node] = node._sequence_nr()
        for call in getattr(joined_by(node), "calls", ()):
            if getattr(call, "passed", None):
                _note(call.passed, call.ends(), found)
