"""Results of a call that it computed from each other, as the call sees them; `uses` has the nodes that lead to them.

A call may return what it met on its way: hidden states, features along with the classes::

        x' ──▶ [   ] ──▶ g ──▶ [   ] ──▶ h ──▶ [   ] ──▶ y        g and h are used: others were computed from them
                                                                  h is next above g, and y next above h

What flows from `y` to `h` flows within the call, whose backward takes it along: all that a plain backward wants. But a
hook on `h`, its `retain_grad` and `torch.autograd.grad(y, h)` are about the whole gradient, in the outer graph.

Rule 1. Where somebody looks at used results in a backward, or may do so, what flows to each is computed before the
        call's own backward: an engine pass begins at the results next above it, with their whole gradients, and ends
        there. The highest come first, so that these are whole.
Rule 2. The call's own backward then gets the whole gradient of each, and puts it in the place of what arrives there
        within (`Arrived`), before hooks of the call itself.
Rule 3. So what lies between is walked twice. That is left out where a walk does something (`only_computes`), or runs a
        forward again: results of such calls do not lead to each other, nor those of calls that change an input.
"""

from __future__ import annotations

import contextlib
import graphlib
import weakref
from collections.abc import Collection, Mapping, Sequence

from torch import Tensor
from torch.autograd.graph import Node, _engine_run_backward

from moe_autograd.autograd.emulated import BACKWARD_TWICE
from moe_autograd.autograd.module_results import CallResults
from moe_autograd.autograd.result_hooks import Arrived, begun_with
from moe_autograd.autograd.saved_tensors import is_checkpointed
from moe_autograd.autograd.sleeping_hooks import let_these_sleep, retained_grads_untouched, sleeping_hooks
from moe_autograd.autograd.this_backward import on_this_thread
from moe_autograd.autograd.upper_cuts import only_computes
from moe_autograd.autograd.walks import Edge, plain


def next_above(results: Sequence[Edge], ends: Collection[Edge]) -> dict[int, list[int]]:
    """Return the places of used results, the lowest first, each with those of the results next above it.

    Args:
        results: of a call.
        ends: of its graph.
    """
    bit_of = {edge: 1 << place for place, edge in enumerate(results)}
    if len(bit_of) < len(results):
        return {}
    below: dict[
        Node, int
    ] = {}  # for each node a bit for each result that it leads to, other than through another
    to_visit = [node for node, _ in results if node is not None]
    while to_visit:
        node = to_visit[-1]
        edges = (
            [] if node in below else [(n, nr) for n, nr in node.next_functions if n and (n, nr) not in ends]
        )
        ahead = [n for n, _ in edges if n not in below]
        if ahead:
            to_visit += ahead
            continue
        to_visit.pop()
        if node not in below:
            below[node] = 0
            for edge in edges:
                below[node] |= bit_of.get(edge) or below[edge[0]]
    if any(bits and (not only_computes(node) or is_checkpointed(node)) for node, bits in below.items()):
        return {}  # Rule 3
    uses = {
        place: [one for one in range(len(results)) if below[node] & 1 << one]
        for place, (node, _) in enumerate(results)
        if node is not None
    }
    above: dict[int, list[int]] = {}
    for place in graphlib.TopologicalSorter(uses).static_order():
        users = [one for one, used in uses.items() if place in used]
        if users:
            above[place] = users
    return above


class UsedResults(CallResults):
    """The part of a module's call that is about results which it computed from each other."""

    next_above: Mapping[int, Sequence[int]] = {}  # as the function has it
    is_whole = False  # whether the backward that comes gets the whole gradients of used results (Rule 2)
    first_histories: Sequence[
        Node | None
    ] = ()  # where the gradients of its cuts went when its results were tied
    _spent: set[int]  # the places of results whose graph is freed
    _arrived: Mapping[int, Arrived] = {}  # by the places of used results
    _met: Mapping[int, weakref.ref[Tensor]] = {}  # used results as the call knows them, likewise

    def find_used(self, ends: Collection[Edge]) -> None:
        """Find which results others were computed from; to be called when a walk has met a result again.

        Args:
            ends: of its graph.
        """
        if self.changed:
            return
        self.next_above = next_above(plain(self._edges), ends)
        self._met = {place: weakref.ref(self._inner[place]) for place in self.next_above}
        self._arrived = {place: Arrived(self._edges[place].output_nr) for place in self.next_above}
        for place, arrived in self._arrived.items():
            self._own_hooks[place] = arrived.put_first(self._inner[place])

    def is_looked_at(self) -> bool:
        """Whether there are hooks on used results, or these retain their gradients."""
        return self.is_seen_within() and any(place in self.next_above for place, _ in self._within)

    def flow_to(
        self, used: int, grads: Mapping[int, Tensor | None], *, create_graph: bool = False
    ) -> Tensor | None:
        """Return what flows to a used result within the call (Rule 1); `None` if nothing does.

        Args:
            used: its place.
            grads: the whole gradients of the results next above it, by their places.
            create_graph: whether it is differentiable.

        Raises:
            RuntimeError: an earlier backward has freed the graph.

        Threads: any.
        """
        begun = {place: grad for place, grad in grads.items() if grad is not None}
        if not begun:
            return None
        if not self._edges or not self._spent.isdisjoint(begun):
            raise RuntimeError(BACKWARD_TWICE)
        starts = [self._edges[place] for place in begun]
        arriving = [(within, begun.get(place)) for place, within in [*self._arrived.items(), *self._within]]
        met = [tensor for reference in self._met.values() if (tensor := reference()) is not None]
        with (
            sleeping_hooks([edge.node for edge in starts], let_these_sleep(self._own_hooks[used])),
            begun_with(arriving, others_sleep=True),
            retained_grads_untouched(met),
            on_this_thread(),
        ):
            (flow,) = _engine_run_backward(
                tuple(starts),
                tuple(begun.values()),
                True,  # its own backward is still to come
                create_graph,
                (self._edges[used],),
                allow_unreachable=True,
                accumulate_grad=False,
            )
        return flow

    def arrived_with(self, grads: Sequence[Tensor | None]) -> contextlib.AbstractContextManager[object]:
        """Run its backward, which begins with these gradients; those of used results are whole (Rule 2)."""
        return begun_with([(arrived, grads[place]) for place, arrived in self._arrived.items()])
