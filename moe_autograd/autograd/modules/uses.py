"""Nodes that lead from results of a call to those that they were computed from; `used_results` says what for.

        [ join ] ◀── g ◀── use of g ◀── h ◀── use of h ◀── y          what users get: g, h and y
            ▲                │  ▲                │
            └────────────────┘  └────────────────┘                    a use hands on what it gets from above

Each use stands for one used result, or several with the same above them. It hands on the gradients that it gets from
there. To a used one it hands what flows there from these within the call, but only where somebody looks in this
backward: where the result has a hook or retains its gradient, or is asked for by name. Else the join's gradients are
those that come from outside, and the call's own backward adds up the rest.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import Function

from moe_autograd.autograd.grad_dtypes import declare, to_declare
from moe_autograd.autograd.joining.boxed import Grads
from moe_autograd.autograd.joining.join import backward_by
from moe_autograd.autograd.joining.joined import Tensors, has_any
from moe_autograd.autograd.modules.computed_from import note_uses
from moe_autograd.autograd.modules.used_results import UsedResults
from moe_autograd.autograd.result_hooks import see_within
from moe_autograd.autograd.this_backward import asked_for_by_name, kept_by_this_backward
from moe_autograd.autograd.uncompiled import is_backward_compiled


class Flows(Protocol):
    """The calls of a map, for their uses."""

    @property
    def calls(self) -> Sequence[UsedResults]:
        """All of them."""

    def flow_to(self, index: int, used: int, known: Known) -> Tensor | None:
        """Return what flows to a used result within its call.

        Args:
            index: of the call.
            used: the place of the result among the call's.
            known: of the call's results.
        """


class Known:
    """What is known of one call's results in one backward.

    Args:
        call: whose results these are.

    Attributes:
        looked: the places of used results at which somebody looks.
        missed: the places of those that are asked for by name, but what flows there within the call stays unknown.
        grads: of results above these, by their places.
    """

    def __init__(self, call: UsedResults) -> None:
        by_name = asked_for_by_name()
        self.looked = call.look_at(by_name)
        self.missed = call.asked_for(by_name).difference(self.looked)
        self.grads: dict[int, Tensor] = {}


class _UseOf:
    """Some used results of one call.

    Args:
        flows: the calls of the map.
        index: of their call.
        used: their places among the results of the call.
        above: the places of those that lead to them.
    """

    def __init__(self, flows: Flows, index: int, used: Sequence[int], above: Sequence[int]) -> None:
        self._flows, self._index, self.used, self._above = flows, index, used, above

    def call_of(self, place: int) -> tuple[UsedResults, int]:
        """See `Joined`."""
        return self._flows.calls[self._index], self._above[place]

    def flow(self, grads: Grads) -> Sequence[Tensor | None]:
        """Return what this backward is to hand on to the used results.

        Raises:
            RuntimeError: it is asked for one by name, and that flow cannot be told from the rest.
        """
        call = self._flows.calls[self._index]
        known = kept_by_this_backward((Known, call), lambda: Known(call))
        if not known.missed.isdisjoint(self.used) and has_any(grads):
            raise RuntimeError(
                "parallel_apply: expected a result that is asked for by name to lead to others by torch's operators "
                "alone, got one from which the call computed others by an autograd function, under saved-tensor hooks "
                "or elsewhere. Differentiate within the call, or call retain_grad on the result."
            )
        if not known.looked:
            return (None,) * len(self.used)
        pairs = zip(self._above, grads, strict=True)
        known.grads.update((place, grad) for place, grad in pairs if grad is not None)
        return [
            self._flows.flow_to(self._index, place, known) if place in known.looked else None
            for place in self.used
        ]


@see_within
class _Use(Function):
    only_computes = True  # see `upper_cuts`

    @staticmethod
    def forward(ctx: Any, joined: _UseOf, *results: Tensor) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.joined = joined
        above = results[len(joined.used) :]
        declare(ctx, to_declare(above))
        return tuple([_as_it_is(result) for result in above])

    @backward_by
    def backward(ctx: Any, grads: Grads) -> Tensors:
        use: _UseOf = ctx.joined
        if is_backward_compiled():  # which adds what it gets to what comes from outside
            return None, *[_zeros_at(*edge) for edge in ctx.next_functions[: len(use.used)]], *grads
        return None, *use.flow(grads), *grads


def _zeros_at(node: Any, output_nr: int) -> Tensor:
    like = node._input_metadata[output_nr]
    return torch.zeros(like.shape, dtype=like.dtype, device=like.device)


# `Function.apply` looks for transforms first, which are refused; that takes as long as all the rest
_apply: Any = super(Function, _Use).apply


def _as_it_is(result: Tensor) -> Tensor:
    """Return a result for another node; one that is tied as a view stays one."""
    alias = result.detach()
    return alias.expand_as(alias) if result._is_view() else alias


def lead_to_used(flows: Flows, tied: Sequence[Sequence[Tensor]]) -> Sequence[Sequence[Tensor]]:
    """Return the results of all calls, where those that were computed from others lead to these."""
    for call, own in zip(flows.calls, tied, strict=True):
        note_uses(own, call.unled)
    if not any(call.next_above for call in flows.calls):
        return tied
    leading = [list(own) for own in tied]
    for index, (call, own) in enumerate(zip(flows.calls, leading, strict=True)):
        if not call.next_above:
            continue
        call.first_histories = [tensor.grad_fn for _, tensor in call.cuts]
        for used, above in call.leads:
            use = _UseOf(flows, index, used, above)
            led = _apply(use, *[own[place] for place in (*used, *above)])
            for place, result in zip(above, led, strict=True):
                own[place] = result
        call.outer_edges = {used: (id(own[used].grad_fn), own[used].output_nr) for used in call.next_above}
    return leading


def looks_of_this_backward(calls: Sequence[UsedResults]) -> Mapping[int, Collection[int]]:
    """Return the places of used results whose gradients are whole, by the `id` of their call; asked after all uses."""
    if is_backward_compiled():
        return {}
    looks: dict[int, Collection[int]] = {}
    for call in calls:
        if call.next_above:
            known: Known | None = kept_by_this_backward((Known, call), lambda: None)
            if known is not None and known.looked:
                known.grads.clear()
                looks[id(call)] = known.looked
    return looks
