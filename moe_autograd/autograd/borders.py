"""Where a graph falls in two: which of its nodes lead to the inputs, and where weights branch off.

The engine's own questions ("is anything wanted below this edge?"), asked before it runs. `split_backward`
explains the words: inner nodes, borders.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TypeAlias

from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node

from moe_autograd.autograd.deep import note_seen

Edges: TypeAlias = Sequence[GradientEdge | None]  # None where no gradient is required
Borders: TypeAlias = Sequence[tuple[int, GradientEdge]]  # each with its place among its node's edges


def is_python(node: object) -> bool:
    """Tell whether a node is the context of a `torch.autograd.Function` written in Python."""
    return isinstance(node, BackwardCFunction)


def is_of_compiled_code(node: object) -> bool:
    """Tell whether a node is the backward of what `torch.compile` has made."""
    return is_python(node) and hasattr(getattr(node, "_forward_cls", None), "_aot_id")


class Graph:
    """Who is inner, where the borders are: one walk over the graph, before anything runs."""

    def __init__(self, outputs: Edges, inputs: Edges, weights: Edges) -> None:
        self.outputs, self.inputs, self.weights = outputs, inputs, weights
        self.edges = _reachable_edges([edge.node for edge in outputs if edge])
        input_nodes = {edge.node for edge in inputs if edge} & self.edges.keys()
        weight_nodes = {edge.node for edge in weights if edge} & self.edges.keys()
        self.inner = self._leading_to(input_nodes)
        self.known = self.inner | input_nodes  # the nodes whose gradients the first part learns
        self.to_weights = self._leading_to(weight_nodes)
        self.wanted = (self.to_weights | weight_nodes) - self.known
        self.behind = (input_nodes & self.to_weights) - self.inner  # inputs with weights behind them

    def _leading_to(self, targets: set[Node]) -> set[Node]:
        found: set[Node] = set()
        for node, edges in self.edges.items():
            if any(edge.node in found or edge.node in targets for edge in edges if edge):
                found.add(node)
        return found

    def borders(self, node: Node) -> Borders:
        """Return the borders below an inner node, each with its place among the node's edges."""
        return [(i, edge) for i, edge in enumerate(self.edges[node]) if edge and edge.node in self.wanted]

    def edges_to_behind(self) -> Edges:
        """Return every edge over which the first part sends something to an input with weights behind it."""
        sent = itertools.chain(self.outputs, *(self.edges[node] for node in self.inner))
        return list({edge[:2]: edge for edge in sent if edge and edge.node in self.behind}.values())


def _reachable_edges(roots: Sequence[Node]) -> dict[Node, Edges]:
    """Return the edges of every node that the roots lead to; a node comes after all it leads to."""
    edges: dict[Node, Edges] = {}
    stack = [(root, False) for root in roots]
    while stack:
        node, is_complete = stack.pop()
        if node in edges:
            continue
        edges_below: Edges = [GradientEdge(below, nr) if below else None for below, nr in node.next_functions]
        if is_complete:
            edges[node] = edges_below
        else:
            stack.append((node, True))
            stack.extend((edge.node, False) for edge in edges_below if edge and edge.node not in edges)
    note_seen(edges)
    return edges
