"""Cuts of a call that lead on to others of the ends of its graph: a tensor that it holds, computed from one it has.

        w ──────────────────────────▶ ┌────────────┐
        │                             │ call's own │ ──▶ result
        └──▶ [ history of y ] ──▶ y ─▶│   graph    │         y is an upper cut, w an end behind it
                                      └────────────┘

The engine cannot end at `y` when it is asked for `w` as well: it goes on through the history of `y`. So what flows to
`w` that way is computed once more, from the gradient of `y`, and taken off. The outer graph leads to both, and takes
the gradient of `y` on to `w` itself: whoever asks for it, or has a hook on it, sees all of it.

A history that does something when it is walked (trains an expert elsewhere, or one that is offloaded, or whatever a
function of the user's does) must not be walked twice for nothing. There `y` is no cut: the call's own backward goes
through it to the ends, and the outer graph does not. What `y` was computed from beside that, as a function's result,
does not count: the engine goes only where it comes to an end that it is asked for.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence, Set
from typing import Any

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, _engine_run_backward

from moe_autograd.autograd.borders import is_python
from moe_autograd.autograd.entry import is_entry
from moe_autograd.autograd.joining.joined import Joined, Tensors
from moe_autograd.autograd.sleeping_hooks import Ends, all_hooks_sleep
from moe_autograd.autograd.walks import Edge, leads, walk


def cuts_above(cuts: Collection[Edge], ends: set[Edge]) -> list[Edge]:
    """Return those cuts that lead on to others of the ends, by whichever output: the engine marks nodes.

    Who leads to others of them comes before these.
    """
    nodes = {node for node, _ in ends}
    upper = [(node, nr) for node, nr in ends.intersection(cuts) if node and leads(node.next_functions, nodes)]
    if len(upper) < 2:
        return list[Edge](upper)
    below: dict[Edge, set[Node | None]] = {
        edge: {node for node, _ in walk([edge]) if node is not edge[0]} for edge in upper
    }
    return sorted(upper, key=lambda edge: -sum(node in below[edge] for node, _ in upper))


def may_walk_again(upper: Collection[Edge], ends: Collection[Edge]) -> bool:
    """Whether what lies between upper cuts and the other ends only computes gradients."""
    return all(map(only_computes, between(upper, ends)))


def between(upper: Collection[Edge], ends: Collection[Edge]) -> set[Node]:
    """Return the nodes by which upper cuts lead on to the other ends, by whichever output: the engine marks nodes."""
    lower = set(ends).difference(upper)
    above: dict[Node | None, list[Node]] = {}
    for node in {node for node, _ in walk(upper, lower) if node}:
        for below, _ in node.next_functions:
            above.setdefault(below, []).append(node)
    found = set[Node]()
    to_visit: list[Node | None] = [node for node, _ in lower]
    while to_visit:
        new = [node for node in above.pop(to_visit.pop(), ()) if node not in found]
        found.update(new)
        to_visit += new
    return found


def beside(upper: Collection[Edge], ends: Collection[Edge], own: Set[Node | None]) -> Set[Node | None]:
    """Return the nodes that upper cuts were computed by, up to the other ends, and that are none of the call's `own`.

    A backward that makes a graph walks them twice, and takes one from the other: nothing flows on there.
    """
    return {node for node, _ in walk(upper, set(ends).difference(upper))} - own if upper else frozenset()


def only_computes(node: Node | None) -> bool:
    """Whether all that a node does is compute gradients."""
    if node is None or not is_python(node) or is_entry(node):
        return True
    known: Any = node
    if getattr(known._forward_cls, "only_computes", False):
        return True
    calls = calls_within(node)
    return calls is not None and all(
        hasattr(call, "nodes") and all(map(only_computes, call.nodes())) for call in calls
    )


def calls_within(node: Any) -> Sequence[Any] | None:
    """Return the calls of which a node is a part; `None` if it is none of a map's."""
    part = getattr(node, "part", node)  # of an arrival, or what leads on from it
    joined = getattr(part, "joined", None)
    return joined.calls if isinstance(joined, Joined) else None


def without_what_is_passed_on(
    upper: Sequence[Edge], ends: Sequence[GradientEdge], found: Tensors, hooks: Ends, *, create_graph: bool
) -> Tensors:
    """Take from each gradient what flows there through an upper cut.

    Args:
        upper: as `cuts_above` has it.
        ends: what gradients were asked for.
        found: these.
        hooks: that are to sleep.
        create_graph: whether gradients are differentiable.
    """
    direct = list(found)
    places: dict[Edge, int] = {end[:2]: place for place, end in enumerate(ends)}
    for edge in upper:
        start = places.get(edge)
        if start is None or direct[start] is None or len(ends) == 1:
            continue
        others = [place for place in range(len(ends)) if place != start]
        with all_hooks_sleep(hooks):
            passed_on = _engine_run_backward(
                (ends[start],),
                (direct[start],),
                True,  # the outer graph is to find it unfreed
                create_graph,
                tuple([ends[place] for place in others]),
                allow_unreachable=True,
                accumulate_grad=False,
            )
        for place, part in zip(others, passed_on, strict=True):
            total = direct[place]
            if part is not None and total is not None:
                direct[place] = _difference(total, part)
    return direct


def _difference(total: Tensor, part: Tensor) -> Tensor:
    if total.layout is not part.layout:
        total, part = total.to_dense(), part.to_dense()
    return total - part
