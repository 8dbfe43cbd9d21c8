"""Results of a call that it computed from each other, as the call sees them; `uses` has the nodes that lead to them.

A call may return what it met on its way: hidden states, features along with the classes (drawn in `computed_from`).
What flows from `y` to `h` flows within the call, whose backward takes it along: all that a plain backward wants. But a
hook on `h`, its `retain_grad` and `torch.autograd.grad(y, h)` are about the whole gradient, in the outer graph.

Rule 1. Where somebody looks at a used result in a backward, what flows there is computed before the call's own
        backward: an engine pass begins at the results above it, and ends there. The highest come first, so that those
        between, at which somebody looks as well, are whole.
Rule 2. The call's own backward then gets the whole gradient of each, and puts it in the place of what arrives there
        within (`Arrived`), before hooks of the call itself.
Rule 3. So what lies between is walked twice. That is left out where a walk does something: where a function of the
        user's is between (`only_computes`), or what was saved is fetched or computed again; and where the call waits
        for gradients of several results. Such results do not lead to each other, nor those of calls that change an
        input.
"""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextvars import ContextVar
from types import MappingProxyType

from torch import Tensor
from torch.autograd.graph import GradientEdge, Node, _engine_run_backward

from moe_autograd.autograd.emulated import BACKWARD_TWICE
from moe_autograd.autograd.joining.joined import Joined
from moe_autograd.autograd.modules.computed_from import HAVE_USES, leads_of, next_above, results_below, turned
from moe_autograd.autograd.modules.module_results import CallResults
from moe_autograd.autograd.modules.upper_cuts import calls_within, only_computes
from moe_autograd.autograd.result_hooks import Arrived, begun_with, joined_by
from moe_autograd.autograd.saved_tensors import is_packed
from moe_autograd.autograd.sleeping_hooks import let_these_sleep, retained_grads_untouched, sleeping_hooks
from moe_autograd.autograd.this_backward import on_this_thread
from moe_autograd.autograd.walks import plain
from moe_autograd.autograd.wrapped_hooks import of_several

# In the backward of a map: for each call, by its `id`, the places of used results at which somebody looks. Torch keeps
# the context of a thread's last backward, so nothing here leads to the calls.
looked_at: ContextVar[Mapping[int, Collection[int]]] = ContextVar("looked_at", default=MappingProxyType({}))


def _goes_twice(node: Node) -> bool:
    """Whether a node, with those of a map within, may be walked twice (Rule 3)."""
    if not only_computes(node) or is_packed(node):
        return False
    joined = joined_by(node)
    if joined is not None and not isinstance(joined, Joined):  # it leads to used results of a map within
        call: UsedResults = joined.call_of(0)[0]
        return call.may_be_walked_twice()
    return all(_goes_twice(one) for call in calls_within(node) or () for one in call.nodes() if one)


class UsedResults(CallResults):
    """The part of a module's call that is about results which it computed from each other."""

    next_above: Mapping[int, Sequence[int]] = {}  # as the function has it
    # of a call that changes an input, whose results do not lead to each other: those with used ones next below them
    unled: Mapping[int, Sequence[int]] = {}
    leads: Sequence[tuple[Sequence[int], Sequence[int]]] = ()  # as `leads_of` has it
    # where outer graphs end that lead to used results, by their places: `id`s of nodes, each with an output; uses lead
    # to these nodes, so as long as one of them asks, nothing else has such an `id`
    outer_edges: Mapping[int, tuple[int, int]] = {}
    # where the gradients of its cuts went when its results were tied
    first_histories: Sequence[Node | None] = ()
    _spent: set[int]  # the places of results whose graph is freed
    _ends: list[GradientEdge]  # of its graph
    _met: Mapping[int, weakref.ref[Tensor]] = {}  # used results as the call knows them, by their places
    _arrived: Mapping[int, Arrived] = {}  # of those at which somebody has looked so far, likewise
    _arriving: threading.Lock  # guards these
    # of a call around the map, each with a place
    _arrived_further_out: Sequence[tuple[int, Arrived]] = ()
    _may_be_walked_twice: bool | None = None  # Rule 3, once somebody has looked

    def find_used(self) -> None:
        """Find which results others were computed from; to be called when a walk has met a result again."""
        above = next_above(plain(self._edges), {*plain(self._ends)})
        if self.changed:
            self.unled = turned(above)
        else:
            self.next_above = above
            self.leads = leads_of(above)
            self._met = {place: weakref.ref(self._inner[place]) for place in self.next_above}
            self._arriving = threading.Lock()

    def asked_for(self, by_name: Collection[tuple[int, int]]) -> set[int]:
        """Return the places of used results that are among what a backward is asked for, as `outer_edges` has it."""
        return {place for place, edge in self.outer_edges.items() if edge in by_name}

    def look_at(self, by_name: Collection[tuple[int, int]]) -> Collection[int]:
        """Return the places of used results at which somebody looks in this backward, and prepare for it.

        Args:
            by_name: where this backward is to end, as `outer_edges` has it.
        """
        looked = {place for place, arrived in self._arrived_further_out if arrived.is_expected()}
        looked |= self.asked_for(by_name)
        if self.look_within():
            looked.update(place for place, _ in self._within if place in self.next_above)
        if not looked:
            return ()
        if not self._edges:
            return looked  # and be told that the graph is freed
        if not self.may_be_walked_twice():
            return ()
        with self._arriving:
            for place in looked - self._arrived.keys():
                arrived = Arrived(self._edges[place].output_nr)
                node, own = self._edges[place].node, self._own_hooks.get(place)
                hooks = arrived.put_first(node, own, self._met[place]())
                if hooks is not None:
                    self._own_hooks[place] = hooks
                self._arrived = {**self._arrived, place: arrived}
        return looked

    def may_be_walked_twice(self) -> bool:
        """Whether what lies above used results may be walked once more for them (Rule 3)."""
        if self._may_be_walked_twice is None:
            waits = any(map(of_several, self._all_own_hooks()))
            self._may_be_walked_twice = not waits and all(map(_goes_twice, self._nodes_between()))
        return self._may_be_walked_twice

    def _all_own_hooks(self) -> Iterator[object]:
        return (hook for own in self._own_hooks.values() for hook in own.values())

    def _nodes_between(self) -> list[Node]:
        """Return the nodes that lead to results, or compute some from others themselves."""
        bit_of = {edge: 1 << place for place, edge in enumerate(plain(self._edges))}
        below = results_below(bit_of, {*plain(self._ends)})
        return [node for node, bits in below.items() if bits or node in HAVE_USES]

    def note_arrived(self, place: int, arrived: Arrived) -> None:
        """Note that a result is one of the call around the map, which others were computed from there."""
        if place in self.next_above:
            self._arrived_further_out = [*self._arrived_further_out, (place, arrived)]

    def _begins_of(
        self, used: int, grads: Mapping[int, Tensor], looked: Collection[int]
    ) -> dict[int, Tensor]:
        """Return the gradients of the results above a used one, up to the next ones at which somebody looks.

        Those of a map within lead to each other one by one (`uses`), and further within in more ways: there from all.
        """
        found: dict[int, Tensor] = {}
        seen: set[int] = set()
        to_visit = [*self.next_above[used]]
        while to_visit:
            place = to_visit.pop()
            if place not in seen:
                seen.add(place)
                if place in grads:
                    found[place] = grads[place]
                if place not in looked or joined_by(self._edges[place].node) is not None:
                    to_visit += self.next_above.get(place, ())
        return found

    def flow_to(
        self, used: int, grads: Mapping[int, Tensor], looked: Collection[int], *, create_graph: bool = False
    ) -> Tensor | None:
        """Return what flows to a used result within the call (Rule 1); `None` if nothing does.

        Args:
            used: its place.
            grads: those of the results above it that are known, by their places.
            looked: the places of those that are whole.
            create_graph: whether it is differentiable.

        Raises:
            RuntimeError: an earlier backward has freed the graph.

        Threads: any.
        """
        begins = self._begins_of(used, grads, looked)
        if not begins:
            return None
        if not self._edges or not self._spent.isdisjoint(begins):
            raise RuntimeError(BACKWARD_TWICE)
        starts = [self._edges[place] for place in begins]
        arriving = [(self._arrived[place], grad) for place, grad in begins.items() if place in looked]
        asleep = [(within, None) for _, within in self._within]
        met = [tensor for reference in self._met.values() if (tensor := reference()) is not None]
        with (
            sleeping_hooks([edge.node for edge in starts], let_these_sleep(self._own_hooks.get(used))),
            begun_with([*arriving, *asleep], others_sleep=True),
            retained_grads_untouched(met),
            on_this_thread(),
        ):
            (flow,) = _engine_run_backward(
                tuple(starts),
                tuple(begins.values()),
                True,  # its own backward is still to come
                create_graph,
                (self._edges[used],),
                allow_unreachable=True,
                accumulate_grad=False,
            )
        return flow

    def looked_at(self) -> Collection[int]:
        """Return the places of used results whose gradients are whole in the backward that runs."""
        return looked_at.get().get(id(self), ()) if self.next_above else ()

    def arrived_with(
        self, grads: Sequence[Tensor | None], looked: Collection[int]
    ) -> contextlib.AbstractContextManager[object]:
        """Run its backward, which begins with these gradients; some of them are whole (Rule 2)."""
        return begun_with([(one, grads[i] if i in looked else None) for i, one in self._arrived.items()])
