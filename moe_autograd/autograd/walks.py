"""Walks over a graph of autograd's nodes."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TypeAlias

from torch.autograd.graph import Node

Edge: TypeAlias = tuple[Node | None, int]  # a node, and to which of its outputs the edge leads


def between(starts: Sequence[Edge], stop_at: Collection[Edge]) -> set[Node]:
    """Return the nodes from `starts` to where it is to stop."""
    seen: set[Node] = set()
    to_visit = list(starts)
    while to_visit:
        edge = to_visit.pop()
        node = edge[0]
        if edge not in stop_at and node is not None and node not in seen:
            seen.add(node)
            to_visit += node.next_functions
    return seen


def leads(
    edges: Sequence[Edge], ends: Collection[Edge | Node | None], stop_at: Collection[Edge] = ()
) -> bool:
    """Whether one of `edges` leads to one of `ends`, edges or nodes, other than through where it is to stop."""
    seen: set[Node] = set()
    to_visit = list(edges)
    while to_visit:
        edge = to_visit.pop()
        node = edge[0]
        if edge in stop_at:
            continue
        if edge in ends or node in ends:
            return True
        if node is not None and node not in seen:
            seen.add(node)
            to_visit += node.next_functions
    return False
