"""Tensors with history that have left a call otherwise than as its result: kept by a module, a closure, a hook.

They lead to the entries of the call's own graph (`entry`, `inlet`), and not to what its inputs were computed with. A
backward that goes there says so, as an entry has no backward. But one that is asked for some tensors by name does not
come to an entry, which leads to none of them: without a look, what flows there would be missing in a sum. And where a
call's backward has freed the graph already, it is this that PyTorch complains of.

Rule 1. A backward that is asked for tensors by name looks, once, which entries it leads to from where it begins: those
        of callers' tensors that lead to what it is asked for are a fault. A call may be made within another one: there
        the caller's tensor leads to an entry itself, and on from the tensor that enters there. And what has escaped
        may serve within a call of another map, where the outer graph does not lead by the entry (`_within_calls`).
Rule 2. Where it leads to some entry, and is asked for a tensor within a call that it comes to, or for its input as the
        call knows it, that is one as well: what comes to that tensor by way of the results would be missing.
Rule 3. A backward that is not asked for any looks where an entry is still there, though the calls that it leads to are
        done and nobody keeps their graphs.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Sequence, Set
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from moe_autograd.autograd.contents.per_sample import stand_in_for
from moe_autograd.autograd.entry import ESCAPED, is_entry
from moe_autograd.autograd.joining.joined import ACCUMULATE_GRAD
from moe_autograd.autograd.modules.inlet import inlet_at
from moe_autograd.autograd.modules.upper_cuts import calls_within
from moe_autograd.autograd.this_backward import (
    asked_for_by_name,
    extents_of_this_backward,
    kept_by_this_backward,
)
from moe_autograd.autograd.walks import Edge, walk


def refuse_escaped(nodes_of_calls: Callable[[], Collection[Node | None]]) -> None:
    """Raise if something would be missing in a backward that is asked for tensors by name (Rules 1 and 2).

    Only for a node that the engine runs.

    Args:
        nodes_of_calls: returns those of the calls that this node is about, and where what they take enters them.

    Raises:
        RuntimeError: something would.
    """
    if asked_for_by_name():
        within = kept_by_this_backward(refuse_escaped, _asked_within_calls)
        if within and not within.isdisjoint(nodes_of_calls()):
            raise RuntimeError(ESCAPED)


def _asked_within_calls() -> Set[Node]:
    """Return the nodes within calls that this backward is asked for, if it leads to entries; raise by Rule 1."""
    met = _entries_met()
    if not met:
        return frozenset()
    asked = _Asked([one for extent in extents_of_this_backward() for one in extent.ends])
    if asked.come_after(met):
        raise RuntimeError(ESCAPED)
    return {node for node in asked.nodes if _is_within(node)}


class _Asked:
    """What a backward is asked for by name. Of a leaf no node is looked up, as torch does that by a view of it."""

    def __init__(self, ends: Sequence[Tensor | GradientEdge]) -> None:
        self._edges = {*_edges(ends)}
        self._leaves = {id(one) for one in ends if isinstance(one, Tensor)}
        self._leaves.update(id(_leaf_at(node)) for node, _ in self._edges if _leaf_at(node) is not None)
        self.nodes = {node for node, _ in self._edges if node is not None}

    def come_after(self, entries: Set[Node]) -> bool:
        """Whether what enters calls there leads to one of these, or is one, also by way of calls around them."""
        seen = set[Node]()
        while entries:
            seen.update(entries)
            outside = [one for one in map(_outside, entries) if one is not None]
            behind = {*walk(_edges(outside))}
            if not self._leaves.isdisjoint(map(id, outside)) or any(map(self._has, behind)):
                return True
            entries = _entries_among(behind).difference(seen)
        return False

    def _has(self, edge: Edge) -> bool:
        return edge in self._edges or id(_leaf_at(edge[0])) in self._leaves


def _is_entry(node: Node | None) -> bool:
    return is_entry(node) or inlet_at(node) is not None


def _outside(entry: Any) -> Tensor | Edge | None:
    """Return the caller's tensor that enters there, or its edge; `None` if it is gone."""
    inlet = inlet_at(entry)
    return entry.hooks.tensor_if_alive() if inlet is None else inlet.before()


def _leaf_at(node: Node | None) -> Tensor | None:
    return node.variable if type(node) is ACCUMULATE_GRAD else None  # type: ignore[attr-defined]


def _is_within(node: Node) -> bool:
    """Whether it leads to an entry, or is one."""
    return any(_is_entry(one) for one, _ in walk([(node, 0)]))


def _edges(ends: Iterable[Tensor | GradientEdge | Edge]) -> list[Edge]:
    """Return the edges of tensors, but for leaves."""
    edges = [(one.grad_fn, one.output_nr) if isinstance(one, Tensor) else one[:2] for one in ends]
    return [edge for edge in edges if edge[0] is not None]


class Escaping:
    """The entries of some calls, of which none is there any longer when these are done, or something has escaped."""

    def __init__(self, entries: Iterable[Node]) -> None:
        self._entries = [weakref.ref(entry) for entry in {*entries}]

    def refuse(self) -> None:
        """Raise if this backward comes to one of them (Rule 3).

        Raises:
            RuntimeError: it does.
        """
        left = [entry for reference in self._entries if (entry := reference()) is not None]
        if left and not asked_for_by_name():
            met = kept_by_this_backward(Escaping, _entries_met)
            if any(entry in met for entry in left):
                raise RuntimeError(ESCAPED)


def _entries_met() -> set[Node]:
    met = set[Node]()
    for extent in extents_of_this_backward():
        nodes = walk(_edges(extent.begins), _edges(extent.ends) if extent.is_of_call else ())
        met |= _entries_among(nodes)
    return met


def _entries_among(edges: Iterable[Edge]) -> set[Node]:
    nodes = {node for node, _ in edges if node is not None}
    entries = {node for node in nodes if _is_entry(node)}
    return entries | _within_calls(nodes) if any(map(_is_anchor, nodes)) else entries


def _is_anchor(node: Node) -> bool:
    """Whether it is of a leaf without elements, such as calls lead to by way of another map's entry."""
    leaf = _leaf_at(node)
    return leaf is not None and stand_in_for(leaf).numel() == 0


def _within_calls(nodes: Iterable[Node | None]) -> set[Node]:
    """Return the entries in the graphs of calls, at any depth; those where what they take enters are not in them."""
    found = set[Node]()
    for node in nodes:
        for call in calls_within(node) or ():
            within: set[Node] = call.nodes() if hasattr(call, "nodes") else set()
            found |= {node for node in within if _is_entry(node)} | _within_calls(within)
    return found
