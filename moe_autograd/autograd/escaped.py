"""Tensors with history that have left a call otherwise than as its result: kept by a module, a closure, a hook.

They lead to the entries of the call's own graph (`entry`), and not to what its inputs were computed with. A backward
that goes there says so, as an entry has no backward. But one that is asked for some tensors by name does not come to
an entry, which leads to none of them: without a look, what flows there would be missing in a sum. And where a call's
backward has freed the graph already, it is this that PyTorch complains of.

Rule 1. A backward that is asked for tensors by name looks, once, which entries it leads to from where it begins: those
        of callers' tensors that lead to what it is asked for are a fault.
Rule 2. Where it leads to some entry, and is asked for a tensor within a call that it comes to, or for its input as the
        call knows it, that is one as well: what comes to that tensor by way of the results would be missing.
Rule 3. A backward that is not asked for any looks where an entry is still there, though the calls that it leads to are
        done and nobody keeps their graphs.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from moe_autograd.autograd.entry import ESCAPED, is_entry
from moe_autograd.autograd.joined import ACCUMULATE_GRAD
from moe_autograd.autograd.this_backward import (
    asked_for_by_name,
    extents_of_this_backward,
    kept_by_this_backward,
)
from moe_autograd.autograd.walks import Edge, walk


def asked_within_calls() -> Collection[Node]:
    """Return the nodes within calls that this backward is asked for by name; only for a node that the engine runs.

    Raises:
        RuntimeError: what has escaped would be missing (Rule 1).
    """
    if not asked_for_by_name():
        return ()
    return kept_by_this_backward(asked_within_calls, _asked_within_calls)


def _asked_within_calls() -> Collection[Node]:
    asked = _Asked([one for extent in extents_of_this_backward() for one in extent.ends])
    met = _entries_met()
    if not met:
        return ()
    hooks: list[Any] = [entry.hooks for entry in met]  # type: ignore[attr-defined]
    if any(asked.comes_after(tensor) for own in hooks if (tensor := own.tensor_if_alive()) is not None):
        raise RuntimeError(ESCAPED)
    return {node for node in asked.nodes if _is_within(node)}


class _Asked:
    """What a backward is asked for by name. Of a leaf no node is looked up, as torch does that by a view of it."""

    def __init__(self, ends: Sequence[Tensor | GradientEdge]) -> None:
        self._edges = {*_edges(ends)}
        self._leaves = {id(one) for one in ends if isinstance(one, Tensor)}
        self._leaves.update(id(_leaf_at(node)) for node, _ in self._edges if _leaf_at(node) is not None)
        self.nodes = {node for node, _ in self._edges if node is not None}

    def comes_after(self, tensor: Tensor) -> bool:
        """Whether a tensor leads to one of these, or is one."""
        behind = walk(_edges([tensor]))
        return id(tensor) in self._leaves or any(
            edge in self._edges or id(_leaf_at(edge[0])) in self._leaves for edge in behind
        )


def _leaf_at(node: Node | None) -> Tensor | None:
    return node.variable if type(node) is ACCUMULATE_GRAD else None  # type: ignore[attr-defined]


def _is_within(node: Node) -> bool:
    """Whether it leads to an entry, or is one."""
    return any(is_entry(one) for one, _ in walk([(node, 0)]))


def _edges(ends: Iterable[Tensor | GradientEdge]) -> list[Edge]:
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
        met.update(node for node, _ in nodes if node is not None and is_entry(node))
    return met
