"""A call of a module (or any callable), as a join sees it.

What torch does: a forward under autograd links its operators to the graph of its inputs, and the engine later walks
that graph on one thread. In the way: to run a call's backward on a thread of its own, its graph has to be cut out
of the whole. The trick is to cut at four kinds of places, and to tie the cuts to the join:

        x ───── entry ─▶ x'  ──┐                          x     the caller's tensor
                               ▼                          x'    its alias in the call's own graph
        p ───────────────▶ [ call's own graph ] ─▶ y'     p     a leaf, mostly a parameter
        h ───────────────▶      (inner)           │       h     a tensor with history, reached through a closure
                                                  ▼
        x, h, p ─────────▶      [ join ] ────────▶ y      (outer)

Rule 1. Inputs are cut at the *entry*: a node that gives a tensor which requires a gradient a new name with the same
        storage and version counter. Inner graphs end there; an in-place change is noticed on both sides.
Rule 2. Leaves need no cut: the inner graph ends at them by itself. Which ones a call reached is found by walking
        its graph after the forward, so a closure's parameters count as much as a module's own.
Rule 3. Tensors with history that a callable holds, or an object among its arguments that is no pytree, are looked up
        (`closures`) before the walk, which stops at them.
        Cuts that the walk does not meet (an input that the call did not use, for one) are dropped. If the join led to
        them, the engine would run what is behind them, which it does not natively, and would free graphs there that
        somebody still needs. Of cuts that lead on to others of the ends: `upper_cuts`.
        A tensor that the look does not find is walked through, down to its leaves; if two calls meet behind it,
        neither frees what they share. (Two limits: a hook on it sees the gradient in parts, one a call; and if it
        serves outside the map as well, the backward complains that its graph is freed.)
Rule 4. The inner backward is `torch.autograd.grad`, which captures gradients and accumulates none. The outer engine
        accumulates: `.grad`, hooks and DDP see each parameter once. A tensor hook on a leaf would run at the
        capture as well, so such hooks are made to sleep while an inner backward runs.
        (Where a leaf has a `.grad` to add to, and nobody can tell, the call adds it at once: `accumulating`.)
Rule 5. The inner backward is asked for what this backward wants, leaf by leaf. `torch.autograd.grad(loss, x)` then
        computes no weight gradients, as in plain PyTorch; and experts whose weights are elsewhere (offloaded, remote),
        behind a leaf that stands for them, gather none that nobody has asked for.
Rule 6. With `create_graph=True` the inner backward is itself a call whose graph ends at the same cuts, and gets a
        join of its own: gradients of any order are exact, each computed concurrently. Its graph runs on into the
        first one, which the outer engine may still have to walk for itself; so it leaves that graph unfreed.
        It may go through results of the first one, which that has saved itself, and leads to these as well (`passed`).
Rule 7. An input that the call changed in place becomes a result of the join, and has its history from there on. Nobody
        else may take it (`changes`). What the call returns as a view of it becomes a view of the input that is tied.
Rule 8. An input, a leaf or a tensor of a closure that the call returns as it is comes back as itself. A result that
        shares memory with one of them, or with another result, is tied as a view, so that PyTorch refuses to change
        it in place, and is saved, so that it notices when the other is changed: two tensors that are cut apart can no
        longer tell each other.
Rule 9. Objects that a call returns, and that `torch.utils._pytree` does not know, are looked into, and hold the tied
        results instead of their own (`in_objects`). So is what users have put on tensors; tied results have it, too.
        A tensor with history that leaves by another way (a module keeps it, a list in a closure) leads to the entry,
        not to the outer graph. Its backward says so. One that is put into a container which the call takes, and which
        is a copy, as there are aliases in it, is refused.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Collection, Sequence, Set
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from torch import Tensor
from torch._C._autograd import _get_sequence_nr
from torch.autograd.graph import GradientEdge, Node, _engine_run_backward
from torch.utils._pytree import tree_unflatten

from moe_autograd._streams import accelerator_in_use
from moe_autograd.autograd.contents.leaves import leaves_of
from moe_autograd.autograd.contents.per_sample import PLAIN, may_have_gradients, stand_in_for
from moe_autograd.autograd.contents.reaching import Cut
from moe_autograd.autograd.deep import note_seen
from moe_autograd.autograd.emulated import BACKWARD_TWICE
from moe_autograd.autograd.entry import Flat, is_alias_of, past
from moe_autograd.autograd.joining.accumulating import Wanted, add_where_possible
from moe_autograd.autograd.joining.joined import ACCUMULATE_GRAD, Tensors, has_missing
from moe_autograd.autograd.modules.changes import renewed
from moe_autograd.autograd.modules.computed_from import HAVE_USES
from moe_autograd.autograd.modules.module_results import changed_of, refuse_lost
from moe_autograd.autograd.modules.passed import Passed, results_of, seen_outside
from moe_autograd.autograd.modules.upper_cuts import (
    beside,
    cuts_above,
    may_walk_again,
    without_what_is_passed_on,
)
from moe_autograd.autograd.modules.used_results import UsedResults
from moe_autograd.autograd.ordered_hooks import Box
from moe_autograd.autograd.result_hooks import begun_with
from moe_autograd.autograd.runs import is_under_mode_of_torch
from moe_autograd.autograd.sleeping_hooks import Ends, sleeping_hooks
from moe_autograd.autograd.split_backward import PendingWeightGradients, split_backward
from moe_autograd.autograd.this_backward import on_this_thread
from moe_autograd.autograd.turns import taken_turns
from moe_autograd.autograd.walks import Edge, edge_of, leads, plain, walk

_NO_TURN = _NOBODY = contextlib.nullcontext()


class Planned(NamedTuple):
    """A call that is to be made.

    Args:
        module: any callable.
        flat: its arguments, flattened.
        cuts: where its graph ends besides inputs and leaves (Rule 3), each with the outer tensor that stands there.
        of: the call whose backward it is, if it is one (Rule 6).
    """

    module: Callable[..., Any]
    flat: Flat
    cuts: Sequence[Cut]
    of: ModuleCall | None = None


class ModuleCall(UsedResults):
    """One call of a module; see `joined.Call`. Constructing it runs the forward, in the current grad mode.

    Args:
        planned: the call.
        aliases: of the tensors that all calls take, by their `id`.
        shares_graph: whether its graph runs on into another call's, which may be needed again (Rule 6).
    """

    non_differentiable: tuple[Tensor, ...] = ()
    ends_with_hooks: Ends = frozenset()  # hooks that are to sleep in its backward
    boxes: Sequence[weakref.ref[Box]] = ()  # what it saved, where the caller has saved-tensor hooks
    shared_leaves: frozenset[int] = frozenset()  # the `id`s of leaves that several calls of the map reach
    may_defer = False  # whether the gradients of its leaves may come later than its backward returns
    # where the gradients of its cuts go, in a backward that makes a graph
    histories: Sequence[Node | None] = ()
    pasts: Sequence[Tensor] = ()  # in the places of inputs that it changed
    _pending: PendingWeightGradients | None = None  # of its leaves
    _meets_results = False  # whether its results lead to others of them
    _beside: Set[Node | None] = frozenset()  # nodes of histories that nothing flows through (`upper_cuts`)
    walks_history = False  # whether its backward goes beyond a cut (`upper_cuts`)
    passed: Sequence[Passed] = ()  # results of the call whose backward it is, which are its last inputs

    def __init__(self, planned: Planned, aliases: dict[int, Tensor], shares_graph: bool) -> None:
        module, (values, spec), cuts, self._first = planned
        self._shares_graph = shares_graph
        self.leaves_out: Callable[[Exception], bool] | None = getattr(module, "leaves_out", None)
        self._spent = set()
        self.leaves: list[Tensor] = []
        entered = {key: (value, aliases[key]) for value in values if (key := id(value)) in aliases}.values()
        versions = [tensor._version for tensor, _ in entered]
        # Edges are looked up before the forward: an in-place change gives an alias a new history.
        self.cuts = [*[(edge_of(alias), tensor) for tensor, alias in entered], *cuts]
        self._has_history = bool(cuts)
        self._upper: Sequence[Edge] = ()  # cuts that lead on to others of its ends (Rule 3)
        inner = [aliases.get(id(value), value) for value in values]
        given_to_it = (inner, {}) if spec is None else tree_unflatten(inner, spec)

        self._begun = _get_sequence_nr()
        returned = module(*given_to_it[0], **given_to_it[1])

        # A call of a backward (Rule 6) ends at the histories of then, whatever these tensors have become since.
        if not shares_graph:
            self.cuts += renewed(cuts)
        outer_of = {id(alias): tensor for tensor, alias in entered}
        outer_of |= {id(tensor): tensor for _, tensor in cuts}
        changed = changed_of(
            [both for both, v in zip(entered, versions, strict=True) if both[0]._version != v]
        )
        given = [value for value in inner if isinstance(value, Tensor)]
        self._take_results(returned, given, outer_of, changed)
        if spec is not None:
            known = {*map(id, inner), *outer_of, *self._places}
            refuse_lost(leaves_of(given_to_it, dict.fromkeys(known, (None, []))), known)
        if changed:
            self._take_changed(changed)

    def find_leaves(self, owners: dict[Node, ModuleCall]) -> None:
        """Walk the inner graph for the leaves that the call reached (Rules 2 and 3).

        Args:
            owners: the nodes found so far by all calls, each with the first call that found it. Calls that meet
                at a node share what lies behind it, and neither may free it.
        """
        first, self._first = self._first, None
        of_first = {} if first is None else results_of(first, first.passed)
        if first is not None:
            self._beside = first._beside | beside(first._upper, plain(first._ends), first.nodes())
        met, leaf_nodes, passed = self._walk(owners, of_first)
        while self._has_history:
            ends = met | {(node, 0) for node in leaf_nodes}
            upper = cuts_above(plain([edge for edge, _ in self.cuts]), ends)
            if not upper:
                break
            self._shares_graph = self.walks_history = True  # the outer graph must find it unfreed
            if may_walk_again(upper, ends):
                self._upper = upper
                break
            self.cuts = [cut for cut in self.cuts if cut[0][:2] not in upper]
            met, leaf_nodes, passed = self._walk(owners, of_first)
        leaves = [node.variable for node in leaf_nodes]  # type: ignore[attr-defined]
        self.leaves = [leaf if type(leaf) in PLAIN else stand_in_for(leaf) for leaf in leaves]
        if len(met) < len(self.cuts):
            changed = {id(tensor) for tensor in self.dirty}
            self.cuts = [cut for cut in self.cuts if cut[0][:2] in met or id(cut[1]) in changed]
        self._ends = [*[edge for edge, _ in self.cuts], *[GradientEdge(node, 0) for node in leaf_nodes]]
        if self._meets_results:
            self.find_used()
        found = [of_first[edge] for edge in of_first if edge in passed]
        self.passed = [one for one, _ in found]
        self.inputs: tuple[Tensor, ...] = (
            *[tensor for _, tensor in self.cuts],
            *self.leaves,
            *[result for _, result in found],
        )

    def _walk(
        self, owners: dict[Node, ModuleCall], looks_for: Collection[Edge]
    ) -> tuple[set[Edge], list[Node], set[Edge]]:
        """Return the cuts and the leaves where the inner graph ends, and what it goes through that is looked for."""
        stop_at = {edge[:2] for edge, _ in self.cuts}
        met, passed = set[Edge](), set[Edge]()
        leaf_nodes, seen = list[Node](), set[Node]()
        to_visit = plain(self._edges)
        results: Collection[Edge] = {*to_visit} if len(to_visit) > 1 else ()
        num_met = -len(to_visit)  # of results, each of which is met first as such
        is_special = {*results, *looks_for, *stop_at}.__contains__  # seldom
        while to_visit:
            edge = to_visit.pop()
            node = edge[0]
            if is_special(edge):
                num_met += edge in results
                if edge in looks_for:
                    passed.add(edge)
                if edge in stop_at:
                    met.add(edge)
                    continue
            if node is None or node in seen or node in self._beside:
                continue
            seen.add(node)
            if type(node) is ACCUMULATE_GRAD:
                # One that was frozen counts (`_thawed`), if it was not made whole numbers (quantized) as well.
                leaf = node.variable  # type: ignore[attr-defined]
                if (type(leaf) in PLAIN and leaf.requires_grad) or may_have_gradients(leaf):
                    leaf_nodes.append(node)
                continue
            if (owner := owners.setdefault(node, self)) is not self:
                owner._shares_graph = self._shares_graph = True
            to_visit += node.next_functions
        note_seen(seen)
        self._meets_results = num_met > 0 or (
            bool(results and HAVE_USES) and any(map(HAVE_USES.__contains__, seen))
        )
        return met, leaf_nodes, passed

    def nodes(self) -> set[Node | None]:
        """Return the nodes of its inner graph."""
        return {node for node, _ in walk(plain(self._edges), {*plain(self._ends), *self._beside})}

    def _spend(self, grad_outputs: Tensors) -> None:
        """Let go of what a backward has freed, unless another one may still walk the graph of some result."""
        self._spent |= self._freed_by(grad_outputs)
        if len(self._spent) == len(grad_outputs):
            self._edges, self._ends, self.cuts, self.leaves, self.passed = [], [], [], [], ()
            self._upper, self._beside = (), frozenset()
            self._of_maps.clear()

    def _freed_by(self, grad_outputs: Tensors) -> set[int]:
        """Return the places of the results whose graphs a backward has walked, or met."""
        if not self._edges or not has_missing(grad_outputs):
            return {*range(len(grad_outputs))}
        stop_at = {*plain(self._ends)}
        starts = plain(self._edges)
        begun = [start for start, grad in zip(starts, grad_outputs, strict=True) if grad is not None]
        walked = {node for node, _ in walk(begun, stop_at)}
        return {i for i, one in enumerate(starts) if one in stop_at or leads([one], walked, stop_at)}

    def leads_to(self, tensor: Tensor) -> bool:
        """Whether its graph, which ends at the cuts, goes through the history that an outer tensor has now."""
        return leads(plain(self._edges), {edge_of(tensor)[:2]}, {*plain(self._ends)})

    def backward(
        self, saved: Tensors, grad_outputs: Tensors, wanted: Sequence[Wanted], keep_graph: bool
    ) -> Tensors:
        """See `joined.Call`."""
        try:
            of_leaves = wanted[len(self.cuts) :]
            if not keep_graph and of_leaves and all(of_leaves) and self._can_defer():
                return self._differentiate_inputs(grad_outputs, wanted)
            return self.differentiate(grad_outputs, wanted, keep_graph=keep_graph or self._shares_graph)
        except Exception as error:
            if self.leaves_out is None or not self.leaves_out(error):
                raise
            return [None] * len(wanted)
        finally:
            if not keep_graph and any(wanted):  # nothing wanted: natively it would not run, and free nothing
                self._spend(grad_outputs)

    def _can_defer(self) -> bool:
        """Whether its backward can be in two parts (`deferred`, Rule 4)."""
        if not self.may_defer or self._spent or self.leaves_out or self._has_waiting_hooks:
            return False
        if id(self) in taken_turns.get() or self.looked_at():
            return False
        if is_under_mode_of_torch() or accelerator_in_use() is not None:
            return False
        return not (self._shares_graph or self._has_history or self.boxes or self.look_within())

    def _differentiate_inputs(self, grad_outputs: Tensors, wanted: Sequence[Wanted]) -> Tensors:
        """Walk the inner graph to the inputs alone; what is left for the leaves is pending."""
        starts = self._starts(grad_outputs)
        num_cuts = len(self.cuts)
        ends = [i for i in range(num_cuts) if wanted[i]]
        nodes = [edge.node for edge, _ in starts]
        with sleeping_hooks(nodes, self.ends_with_hooks, self.tensors_at_ends), on_this_thread():
            found, self._pending = split_backward(
                [edge for edge, _ in starts],
                [grad for _, grad in starts],
                [self._ends[i] for i in ends],
                self._ends[num_cuts:],
            )
        grads: list[Tensor | None] = [None] * len(wanted)
        for i, grad in zip(ends, found, strict=True):
            grads[i] = grad
        return grads

    def tensors_at_ends(self) -> list[Tensor]:
        """Return the caller's tensors that its inner graph ends at; at others it ends at an alias."""
        return [*self.leaves, *[tensor for edge, tensor in self.cuts if not is_alias_of(edge.node, tensor)]]

    def keep_histories(self) -> None:
        """Keep the histories of inputs that it changed in place; they are about to lead to the join (a cycle)."""
        pasts = {id(tensor): past(tensor) for tensor in self.changed if tensor.requires_grad}
        self.cuts = [(edge, pasts.get(id(tensor), tensor)) for edge, tensor in self.cuts]
        self.pasts = [*pasts.values()]

    def share_graph(self) -> None:
        """Let no backward free its graph, as the one that a backward makes now runs on into it.

        Which of the two is walked first goes by the numbers of nodes, which each thread counts by itself: on a GPU
        another thread makes the second one.
        """
        self._shares_graph = True

    def cuts_with_histories(self, name: str) -> list[Cut]:
        """Return where its graph ends, each with a tensor whose history is that of the forward (Rule 6).

        Raises:
            RuntimeError: somebody has changed an input in place since, and nobody kept the history it had.
        """
        histories, self.histories = self.histories, ()
        for (_, tensor), node in zip(self.cuts, histories, strict=False):
            is_other = node is not None and tensor.grad_fn is not None and tensor.grad_fn is not node
            if is_other and not any(tensor is one for one in self.pasts):
                raise RuntimeError(
                    "parallel_apply: expected inputs as they were in the forward, for a backward with "
                    f"create_graph=True, got a tensor of shape {tuple(tensor.shape)} that was changed in place since "
                    f"({name}). Give the call a clone of it."
                )
        return self.cuts

    def take_pending(self) -> PendingWeightGradients | None:
        """Return what is left of its backward, if anything."""
        pending, self._pending = self._pending, None
        return pending

    def differentiate(
        self, grad_outputs: Tensors, wanted: Sequence[Wanted], *, keep_graph: bool, create_graph: bool = False
    ) -> Tensors:
        """Walk the inner graph backwards (Rule 4)."""
        with taken_turns.get().get(id(self), _NO_TURN):
            ends = [i for i, is_wanted in enumerate(wanted) if is_wanted]
            grads: list[Tensor | None] = [None] * len(wanted)
            if not ends:
                return grads
            if any(grad_outputs[place] is not None for place in self._spent):
                raise RuntimeError(BACKWARD_TWICE)
            starts = self._starts(grad_outputs)
            nodes = [edge.node for edge, _ in starts]
            seen = self.begun_with(grad_outputs) if self.look_within() else _NOBODY
            arrived = self.arrived_with(grad_outputs, self.looked_at()) if self._arrived else _NOBODY
            all_ends = [*self._ends, *[one.edge for one in self.passed]]
            asked = [all_ends[i] for i in ends]
            upper = self._upper
            passed: AbstractContextManager[object] = _NOBODY
            wanted_of_passed = [wanted[place] for place in self.places_passed()]
            if any(wanted_of_passed):
                upper = cuts_above(plain(asked), {*plain(asked)})
                seen_there = seen_outside(itertools.compress(self.passed, wanted_of_passed))
                passed = begun_with(seen_there, others_sleep=True)
            sleeping = sleeping_hooks(nodes, self.ends_with_hooks, self.tensors_at_ends)
            with sleeping, on_this_thread(), seen, arrived, passed:
                # As `torch.autograd.grad`, which would look again at shapes that the join has looked at.
                found: Tensors = _engine_run_backward(
                    tuple([edge for edge, _ in starts]),
                    tuple([grad for _, grad in starts]),
                    keep_graph,
                    create_graph,
                    tuple(asked),
                    allow_unreachable=True,
                    accumulate_grad=False,
                )
                if upper:
                    found = without_what_is_passed_on(
                        upper, asked, found, self.ends_with_hooks, create_graph=create_graph
                    )
            for i, grad in zip(ends, add_where_possible(found, [wanted[i] for i in ends]), strict=True):
                grads[i] = grad
            return grads

    def places_passed(self) -> range:
        """Return which of its inputs are results that its graph goes through, in the order of `passed`."""
        before = len(self.cuts) + len(self.leaves)
        return range(before, before + len(self.passed))
