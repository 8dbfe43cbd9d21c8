"""The module calls of one map: the join that ties them, and their backwards.

The rules, and the words, are those of `module_calls`, which is about one of the calls.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection, Iterator, Sequence
from typing import Any, Self

import torch
from torch import Tensor
from torch.autograd.graph import Node

from moe_autograd._contexts import contextmanager
from moe_autograd.autograd.contents.compiled import meet
from moe_autograd.autograd.entry import Entrance, flatten, is_entry, retaining
from moe_autograd.autograd.grouping import around
from moe_autograd.autograd.hooks import nested_backwards
from moe_autograd.autograd.joining.accumulating import AtOnce, Wanted, ended, may_add_at_once
from moe_autograd.autograd.joining.batched import Batches
from moe_autograd.autograd.joining.boxed import Grads
from moe_autograd.autograd.joining.join import join
from moe_autograd.autograd.joining.joined import Joined, Parts, Tensors, which_are_wanted
from moe_autograd.autograd.modules.escaped import Escaping, refuse_escaped
from moe_autograd.autograd.modules.module_calls import ModuleCall, Planned
from moe_autograd.autograd.modules.module_forwards import ModuleForwards
from moe_autograd.autograd.modules.passed import want_by_name
from moe_autograd.autograd.modules.upper_cuts import calls_within
from moe_autograd.autograd.modules.used_results import looked_at
from moe_autograd.autograd.modules.uses import Known, lead_to_used, looks_of_this_backward
from moe_autograd.autograd.ordered_hooks import unpack_ahead
from moe_autograd.autograd.runs import Map, name_guilty
from moe_autograd.autograd.saved_tensors import is_checkpointed
from moe_autograd.autograd.sleeping_hooks import let_hooks_sleep, retained_grads_untouched
from moe_autograd.autograd.split_backward import is_in_first_part
from moe_autograd.autograd.this_backward import keeps_graph
from moe_autograd.autograd.turns import Turn, Turns, taken_turns, turns_of
from moe_autograd.autograd.uncompiled import is_backward_compiled


class JoinedModules(Joined):
    """The module calls of one map."""

    calls: Sequence[ModuleCall]
    entrance: Entrance
    reads_saved = False
    turns: Turns | None = None  # of calls that run forwards again

    def part(self, places: Sequence[int]) -> Self:
        """See `Joined`."""
        part = super().part(places)
        part.entrance = self.entrance
        return part

    def ask(self, nodes: Sequence[Node | None], reached: Sequence[int]) -> Sequence[Wanted]:
        """See `Joined`."""
        if is_in_first_part():
            wanted: list[Wanted] = [True] * self.input_parts.total
            want_by_name(self.calls, self.input_parts, nodes, wanted)
            return wanted
        self._note_histories(nodes, self.input_parts)
        wanted = [*which_are_wanted(nodes)]
        want_by_name(self.calls, self.input_parts, nodes, wanted)
        if may_add_at_once():
            self._add_at_once(nodes, wanted, reached)
        return wanted

    def _add_at_once(
        self, nodes: Sequence[Node | None], wanted: list[Wanted], reached: Sequence[int]
    ) -> None:
        """Let calls add the gradients of their leaves themselves, where they may (`accumulating`)."""
        at_once = AtOnce()
        for index in reached:
            call = self.calls[index]
            for i, leaf in enumerate(call.leaves, self.input_parts.start(index) + len(call.cuts)):
                if id(leaf) not in call.shared_leaves and nodes[i] is not None:
                    wanted[i] = at_once.adder(nodes[i]) or wanted[i]

    def _note_histories(self, nodes: Sequence[Node | None], parts: Parts) -> None:
        """Take note of where the gradients of the cuts go, for gradients of gradients."""
        if torch.is_grad_enabled():
            for call, own in zip(self.calls, parts.of_each(nodes), strict=True):
                call.histories = own

    def refuse_escaped(self, wanted: Sequence[Wanted]) -> None:
        """See `Joined`."""
        refuse_escaped(functools.partial(self._nodes_reached, wanted))

    def _nodes_reached(self, wanted: Sequence[Wanted]) -> set[Node | None]:
        reached = [any(own) for own in self.input_parts.of_each(wanted)]
        return set().union(*map(self._nodes_within, itertools.compress(self.calls, reached)))

    def _nodes_within(self, call: ModuleCall) -> set[Node | None]:
        """Return the nodes of a call's graph, and where what it takes enters that."""
        return call.nodes().union([edge.node for edge, _ in call.cuts if self.entrance.has(edge.node)])

    def backward(
        self, saved_of: dict[int, Sequence[Any]], grad_outputs: Grads, wanted: Sequence[Wanted]
    ) -> Grads:
        """See `Joined`; with `create_graph=True` the backward is a map of its own (Rule 6)."""
        with nested_backwards():
            # A call lets go of its inputs when it is done; held here until hooks have moved to them.
            inputs = [tensor for call in self.calls for _, tensor in call.cuts]
            reached = self.reached(grad_outputs)
            self._prepare(inputs, reached)
            escaping = Escaping(
                edge.node for call in self.calls for edge, _ in call.cuts if is_entry(edge.node)
            )
            own_turns = self._turns(reached[::-1])  # the last call begins first
            looks, turns = looked_at.set(looks_of_this_backward(self.calls)), taken_turns.set(own_turns)
            try:
                with retained_grads_untouched(inputs):
                    if torch.is_grad_enabled():
                        grads = self._backward_with_graph(reached, grad_outputs, wanted)
                    else:
                        with ended(wanted):
                            grads = super().backward(saved_of, grad_outputs, wanted)
            finally:
                taken_turns.reset(turns)
                looked_at.reset(looks)
            self.entrance.move_hooks()
            if not (keeps_graph() or is_backward_compiled()):
                escaping.refuse()
        return grads

    def _prepare(self, inputs: Sequence[Tensor], reached: Sequence[int]) -> None:
        """Do what is to be done on the thread, and in the backward, that the caller started."""
        let_hooks_sleep(inputs)  # they are not to be called for inputs without a gradient
        for call in self.calls:  # nor where the calls' own backwards end
            call.ends_with_hooks = let_hooks_sleep(call.tensors_at_ends())
        for i in reached:
            unpack_ahead(self.calls[i].boxes)

    def _turns(self, places: Sequence[int]) -> dict[int, Turn]:
        """Return the turns of calls, which begin in this order: no two add to the gradient of one tensor at a time."""
        taken = {i: retaining(self.calls[i].cuts) for i in places}
        for i, own in taken.items():
            if self.calls[i].walks_history:  # where nobody can say which tensors retain theirs
                own.add(0)
            if self.turns is not None:
                own.update(self.turns.taken[i])
        return {id(self.calls[i]): turn for i, turn in turns_of(taken, self.map.names).items()}

    def flow_to(self, index: int, used: int, known: Known) -> Tensor | None:
        """See `uses`; with `create_graph=True` it is a map of its own (Rule 6)."""
        call = self.calls[index]
        with nested_backwards():
            if not torch.is_grad_enabled():
                try:
                    return call.flow_to(used, known.grads, known.looked)
                except BaseException as error:
                    name_guilty(error, self.map, "backward", index)
                    raise
            call.share_graph()
            call.histories = call.first_histories  # the join notes them when it runs, which is later
            grads = [*known.grads.values()]
            batches = Batches(grads)
            planned = Planned(
                functools.partial(_second_order_flow, batches, call, used, [*known.grads], known.looked),
                flatten(tuple(batches.apart(grads)), {}),
                call.cuts_with_histories(self.map.names[index]),
                of=call,
            )
            with batches.beyond_transforms():
                (found,) = run_module_calls([planned], self._of_backward([index]), shares_graph=True)
            (flow,) = batches.together(found)
            return flow

    def _of_backward(self, places: Sequence[int]) -> Map:
        title = f"{self.map.title}, backward"
        return self.map.of_some(places)._replace(title=title, even_shares=False, kind=None)

    def _backward_with_graph(
        self, reached: Sequence[int], grad_outputs: Grads, wanted: Sequence[Wanted]
    ) -> Grads:
        for i in reached:
            self.calls[i].share_graph()
        batches = Batches(grad_outputs)
        grads_of = self.result_parts.of_each(batches.apart(grad_outputs))
        wanted_of = self.input_parts.of_each(wanted)
        planned = [
            Planned(
                around(functools.partial(_second_order, batches), wanted_of[i], self.calls[i]),
                flatten(tuple(grads_of[i]), {}),
                self.calls[i].cuts_with_histories(self.map.names[i]),
                of=self.calls[i],
            )
            for i in reached
        ]
        with batches.beyond_transforms():
            found = run_module_calls(planned, self._of_backward(reached), shares_graph=True)
        by_call = {i: batches.together(own) for i, own in zip(reached, found, strict=True)}
        return self.input_parts.flat(by_call, None)


def _second_order(
    batches: Batches, wanted: Sequence[Wanted], call: ModuleCall, *many: Tensor | None
) -> Tensors:
    try:
        with batches.within_transforms():
            grad_outputs = batches.together(many)
            return batches.apart(call.differentiate(grad_outputs, wanted, keep_graph=True, create_graph=True))
    except Exception as error:
        if call.leaves_out is None or not call.leaves_out(error):
            raise
        return [None] * len(wanted)


def _second_order_flow(
    batches: Batches,
    call: ModuleCall,
    used: int,
    places: Sequence[int],
    looked: Collection[int],
    *many: Tensor,
) -> Tensors:
    with batches.within_transforms():
        grads: Any = batches.together(many)
        return batches.apart(
            [call.flow_to(used, dict(zip(places, grads, strict=True)), looked, create_graph=True)]
        )


def run_module_calls(
    planned: Sequence[Planned],
    the_map: Map,
    *,
    shares_graph: bool = False,
    joined: type[JoinedModules] = JoinedModules,
    turns: Turns | None = None,
    recomputes: bool = False,
    compiled: Sequence[object] = (),
) -> list[Any]:
    """Make all calls, forwards and backwards concurrently; return what each module returned.

    Args:
        planned: the calls.
        the_map: whose they are.
        shares_graph: whether these are calls of a backward that makes a graph (Rule 6).
        joined: what runs their backwards.
        turns: of calls, for backwards that run forwards again.
        recomputes: whether each call runs again in its backward; else those do that have a checkpoint within.
        compiled: what they hold of compiled code.
    """
    forwards_map = the_map
    if compiled and the_map.max_concurrency != 1:
        forwards_map = the_map = the_map._replace(even_shares=True)  # rule 2 of `compiled`
        may_compile = meet(compiled, [one.flat[0] for one in planned])
        if may_compile:
            forwards_map = the_map._replace(max_concurrency=1)  # rule 1
    forwards = ModuleForwards(planned, forwards_map, shares_graph)
    calls = forwards.run()
    if turns is not None and not (recomputes or (turns.are_taken and any(map(_runs_again, calls)))):
        turns = None
    for call in calls:
        if call.changed:
            call.keep_histories()
            call.tie_changed()
    tied: Sequence[Sequence[Tensor]] = [()] * len(calls)
    if any(call.results for call in calls):
        all_calls = joined(calls, the_map if turns is None else forwards_map)
        all_calls.entrance, all_calls.turns = forwards.entrance, turns
        tied = _tie(all_calls)
    returned = [call.take_returned(results) for call, results in zip(calls, tied, strict=True)]
    forwards.renew_views()
    return returned


def _runs_again(call: ModuleCall) -> bool:
    """Whether a checkpoint in its graph, or in that of a map within, runs a forward again in the backward."""
    nodes: set[Any] = call.nodes()
    inner = [one for node in nodes for one in calls_within(node) or () if isinstance(one, ModuleCall)]
    return any(map(is_checkpointed, nodes)) or any(map(_runs_again, inner))


def _tie(calls: JoinedModules) -> Sequence[Sequence[Tensor]]:
    """Return the calls' results, tied to their join."""
    # A module may turn gradients on by itself; then its result has a history under no_grad, too.
    # Tying counts as one more in-place change; the inner graphs have saved tensors that know of the real one.
    dirty = tuple([tensor for call in calls.calls for tensor in call.dirty])
    with torch.enable_grad(), torch.autograd._unsafe_preserve_version_counter(dirty), _thawed(calls.calls):
        return lead_to_used(calls, join(calls))


@contextmanager
def _thawed(calls: Sequence[ModuleCall]) -> Iterator[None]:
    """Tie leaves that were frozen after a call used them, too: what they are in the backward counts, as in a loop."""
    frozen = [leaf for call in calls for leaf in call.leaves if not leaf.requires_grad]
    for leaf in frozen:
        leaf.requires_grad_()
    try:
        yield
    finally:
        for leaf in frozen:
            leaf.requires_grad_(False)
