"""Results of a call through which the graph of its backward goes (`module_calls`, Rule 6).

What a call has saved for its gradients may be a result of its own: that of its last `tanh`, or a hidden state::

        x ──▶ [ call ] ──▶ y ──▶ loss            grad, the gradient of the loss, is computed with y
                 ▲         ▲
                 └─────────┴── [ call of the backward ] ──▶ grad

What flows from `grad` to `x` within the call flows through `y` in part. Who asks for the derivative of `grad` by `x`
does not mind. Who asks for that by `y` is to have this part: so the second call's join leads to `y` as well, and hands
on there what flows to it. That costs a walk from `y` on, to take off what flows further (`upper_cuts`), and is not done
unasked.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node

from moe_autograd.autograd.joining.accumulating import Wanted
from moe_autograd.autograd.joining.joined import Parts
from moe_autograd.autograd.modules.module_results import CallResults
from moe_autograd.autograd.result_hooks import Within
from moe_autograd.autograd.this_backward import asked_for_by_name
from moe_autograd.autograd.uncompiled import is_backward_compiled
from moe_autograd.autograd.walks import Edge


class Passed(NamedTuple):
    """A result of a call, through which the graph of that call's backward goes, or of a backward of that.

    Args:
        first: the call.
        place: of the result among its results.
        edge: where it is within.
        output_nr: which output of an outer node the result is.
    """

    first: CallResults
    place: int
    edge: GradientEdge
    output_nr: int

    def is_looked_at(self) -> bool:
        """Whether it has hooks, or retains its gradient: these are to see what flows there within from now on."""
        return self.first.look_within() and bool(self.first.seeing(self.place))


class Passing(Protocol):
    """A call, perhaps of a backward."""

    @property
    def passed(self) -> Sequence[Passed]:
        """Return the results that its graph goes through."""

    def places_passed(self) -> range:
        """Return their places among the inputs of the call."""


def results_of(first: CallResults, passed: Sequence[Passed]) -> dict[Edge, tuple[Passed, Tensor]]:
    """Return what users have of results that the graph of a backward may go through.

    Args:
        first: the call whose backward it is.
        passed: what that goes through itself.

    Returns:
        By where they are within.
    """
    return {
        edge[:2]: (Passed(one, place, edge, result.output_nr), result)
        for one in dict.fromkeys([first, *[each.first for each in passed]])
        for place, edge, result in one.results_at_hand()
    }


def want_by_name(
    calls: Sequence[Passing], parts: Parts, nodes: Sequence[Node | None], wanted: list[Wanted]
) -> None:
    """Want what flows to results that calls pass only where one of them is asked for by name.

    Then also what flows to those at which somebody looks: from one that is asked for it may flow on to these. And all
    where the backward is compiled, in which nobody knows who asks, and no gradient may be missing.

    Args:
        calls: of one map.
        parts: which inputs are whose.
        nodes: where the gradients of all inputs go.
        wanted: one for each, as the engine wants them; those of passed results are set.
    """
    if not any(call.passed for call in calls):
        return
    by_name = None if is_backward_compiled() else asked_for_by_name()
    for i, call in enumerate(calls):
        looked = [one.is_looked_at() for one in call.passed]
        places = [parts.start(i) + place for place in call.places_passed()]
        for place, one in zip(places, call.passed, strict=True):
            wanted[place] = by_name is None or (id(nodes[place]), one.output_nr) in by_name
        is_asked = any(wanted[place] for place in places)
        for place, is_looked in zip(places, looked, strict=True):
            wanted[place] = wanted[place] or (is_asked and is_looked)


def seen_outside(passed: Iterable[Passed]) -> list[tuple[Within, None]]:
    """Return what is to see nothing within, for `begun_with`: what sees these results outside sees all of it."""
    return [(within, None) for one in passed for within in one.first.seeing(one.place)]
