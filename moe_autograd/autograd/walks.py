"""Walks over a graph of autograd's nodes."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from typing import TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from moe_autograd.autograd.deep import note_seen

Edge: TypeAlias = tuple[Node | None, int]  # a node, and to which of its outputs the edge leads


def gradient_edge(tensor: Tensor) -> GradientEdge:
    """As torch's `get_gradient_edge`, which returns a view's if the tensor is of a class with `__torch_function__`."""
    with torch._C.DisableTorchFunctionSubclass():
        return get_gradient_edge(tensor)


def edge_of(tensor: Tensor) -> GradientEdge:
    """Return where the gradient of `tensor` goes; torch's own function also holds on to it."""
    node = tensor.grad_fn
    return gradient_edge(tensor) if node is None else GradientEdge(node, tensor.output_nr)


def plain(edges: Iterable[GradientEdge]) -> list[Edge]:
    """Return edges as nodes have them, in `next_functions`."""
    return [edge[:2] for edge in edges]


def walk(starts: Iterable[Edge], stop_at: Collection[Edge | Node | None] = ()) -> Iterator[Edge]:
    """Yield the edges that are met from `starts` on, up to those, edges or nodes, where it is to stop."""
    seen: set[Node] = set()
    to_visit = list(starts)
    try:
        while to_visit:
            edge = to_visit.pop()
            node = edge[0]
            if node is None or edge in stop_at or node in stop_at:
                continue
            yield edge
            if node not in seen:
                seen.add(node)
                to_visit += node.next_functions
    finally:
        note_seen(seen)


def leads(
    starts: Iterable[Edge], ends: Collection[Edge | Node | None], stop_at: Collection[Edge | Node | None] = ()
) -> bool:
    """Whether one of `starts` leads to one of `ends`, edges or nodes, other than through where it is to stop."""
    return any(edge in ends or edge[0] in ends for edge in walk(starts, stop_at))
