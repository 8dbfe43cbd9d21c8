"""Nodes that a call's own backward walks and the engine walks as well: the engine is to come last, as it frees them.

A call that holds a tensor computed from another of its cuts walks what lies between the two (`module_calls`, Rule 3).
The engine runs, of the nodes that are ready, the one with the highest number; so in a graph that one thread has made it
comes there after the call's join. But each thread numbers its nodes by itself. Where another one makes the graph of a
backward, as on a GPU, the numbers of that graph may all be lower, and the engine would not wait for it.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch.autograd.graph import Node

from moe_autograd.autograd.this_backward import kept_by_this_backward

_NUMBERS = object()


def let_engine_come_last(nodes: Iterable[Node]) -> None:
    """Give nodes the lowest numbers there are, in the order that they had; only for a node that the engine runs."""
    numbers: dict[Node, int] = kept_by_this_backward(_NUMBERS, dict)
    for node in nodes:
        numbers.setdefault(node, node._sequence_nr())
    in_order = sorted(numbers.items(), key=lambda item: item[1])
    for rank, (node, _) in enumerate(in_order):
        node._set_sequence_nr(rank)  # type: ignore[attr-defined]
