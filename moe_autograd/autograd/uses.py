"""Nodes that lead from results of a call to those that they were computed from; `used_results` says what for.

        [ join ] ◀── g ◀── use of g ◀── h ◀── use of h ◀── y          what users get: g, h and y
            ▲                │  ▲                │
            └────────────────┘  └────────────────┘                    a use hands on what it gets from above

Each use stands for one used result. It hands on the gradients of the results next above it, and to the used one what
flows there from these within the call: but in a backward in which nobody looks, nothing. Then the join's gradients are
those that come from outside, and the call's own backward adds up the rest.

Whether somebody looks is the same for all uses of a call in one backward: the first one to run finds out. Of a backward
that is asked for tensors by name nobody can tell which these are; so somebody looks. But not in the inner backwards of
calls around the map, which ask for where the call ends.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import Function
from torch.autograd.graph import Node

from moe_autograd.autograd.boxed import Grads
from moe_autograd.autograd.join import backward_by
from moe_autograd.autograd.joined import ACCUMULATE_GRAD, Tensors
from moe_autograd.autograd.result_hooks import See, skip_missing_gradients
from moe_autograd.autograd.this_backward import kept_by_this_backward
from moe_autograd.autograd.uncompiled import is_backward_compiled
from moe_autograd.autograd.used_results import UsedResults


class Flows(Protocol):
    """The calls of a map, for their uses."""

    @property
    def calls(self) -> Sequence[UsedResults]:
        """All of them."""

    def flow_to(self, index: int, used: int, grads: dict[int, Tensor | None]) -> Tensor | None:
        """Return what flows to a used result within its call.

        Args:
            index: of the call.
            used: the place of the result among the call's.
            grads: of the results next above it, by their places.
        """


class _UseOf:
    """One used result.

    Args:
        flows: the calls of the map.
        index: of its call.
        used: its place among the results of the call.
    """

    def __init__(self, flows: Flows, index: int, used: int) -> None:
        self._flows, self._index, self._used = flows, index, used
        self._call = flows.calls[index]
        self._above = self._call.next_above[used]

    def see_within(self, place: int, see: See) -> None:
        """See `Joined`."""
        self._call.see_within(self._above[place], see)

    def flow(self, node: Node, grads: Grads) -> Tensor | None:
        """Return what this backward is to hand on to the used result."""
        if not any(grad is not None for grad in grads) or not is_whole(self._call, node):
            return None
        return self._flows.flow_to(self._index, self._used, dict(zip(self._above, grads, strict=True)))


@skip_missing_gradients
class _Use(Function):
    only_computes = True  # see `upper_cuts`

    @staticmethod
    def forward(ctx: Any, joined: _UseOf, used: Tensor, *above: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.joined, ctx.shape, ctx.options = joined, used.shape, {"dtype": used.dtype, "device": used.device}
        return tuple([_as_it_is(result) for result in above])

    @backward_by
    def backward(ctx: Any, grads: Grads) -> Tensors:
        flow = ctx.joined.flow(ctx, grads)
        if flow is None and is_backward_compiled():  # which adds it to what comes from outside
            flow = torch.zeros(ctx.shape, **ctx.options)
        return None, flow, *grads


USE_NODE: type = _Use._backward_cls


def _as_it_is(result: Tensor) -> Tensor:
    """Return a result for another node; one that is tied as a view stays one."""
    alias = result.detach()
    return alias.expand_as(alias) if result._is_view() else alias


def lead_to_used(flows: Flows, tied: Sequence[Sequence[Tensor]]) -> Sequence[Sequence[Tensor]]:
    """Return the results of all calls, where those that were computed from others lead to these."""
    if not any(call.next_above for call in flows.calls):
        return tied
    leading = [list(own) for own in tied]
    for index, (call, own) in enumerate(zip(flows.calls, leading, strict=True)):
        call.first_histories = [tensor.grad_fn for _, tensor in call.cuts] if call.next_above else ()
        for used, above in call.next_above.items():
            lead = _Use.apply(  # type: ignore[no-untyped-call]
                _UseOf(flows, index, used), own[used], *[own[place] for place in above]
            )
            for place, result in zip(above, lead, strict=True):
                own[place] = result
    return leading


def is_whole(call: UsedResults, node: Node | None = None) -> bool:
    """Whether the gradients of used results are whole in this backward when they come to their join.

    Args:
        call: whose results these are.
        node: the use that asks; the join, which comes after all uses, asks with none.
    """
    if is_backward_compiled():
        return False

    def find_out() -> bool:
        return node is not None and (call.is_looked_at() or _may_be_asked_for(node))

    return kept_by_this_backward((is_whole, call), find_out)


# ---- backwards that are asked for tensors by name


class _Asking(threading.local):
    def __init__(self) -> None:
        self.for_ends: set[int] = set()  # the engine's numbers of inner backwards on this thread


_asking = _Asking()


@contextlib.contextmanager
def asking_for_ends(starts: Sequence[Node]) -> Iterator[None]:
    """Run an inner backward that begins at `starts`, and asks for nothing but where its graph ends."""
    noted: list[int] = []

    def note(_: object) -> None:
        noted.append(torch._C._current_graph_task_id())
        _asking.for_ends.add(noted[-1])

    handles = [node.register_prehook(note) for node in starts]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        _asking.for_ends.difference_update(noted)


def _may_be_asked_for(node: Node) -> bool:
    """Whether the backward that runs `node` is asked for some tensors alone, of which a used result may be one."""
    if torch._C._current_graph_task_id() in _asking.for_ends:
        return False
    return kept_by_this_backward(_may_be_asked_for, lambda: _is_by_name(node))


def _is_by_name(node: Node) -> bool:
    leaf = _leaf_behind(node)
    try:
        return leaf is None or not torch._C._will_engine_execute_node(leaf)
    except (
        RuntimeError
    ):  # it is a leaf that `torch.autograd.grad` was asked for: the engine says so by raising
        return True


def _leaf_behind(node: Node) -> Node | None:
    """Return the node of some leaf, the nearest by the last of all ways; `None` if there is none."""
    seen: set[Node] = set()
    to_visit = [node]
    while to_visit:
        node = to_visit.pop()
        if type(node) is ACCUMULATE_GRAD:
            return node
        if node not in seen:
            seen.add(node)
            to_visit += [below for below, _ in node.next_functions if below is not None]
    return None
