"""What a module call returned, on its way through a join and back into the structure that the module gave it.

Rules 7 to 9 of `module_calls`: which results are tied, how those that share memory are, how inputs that the call
changed get their history, and what is refused, as it would leave by another way.
"""

from __future__ import annotations

import collections
import functools
import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch._C._autograd import _get_sequence_nr
from torch.autograd import forward_ad
from torch.autograd.graph import GradientEdge, Node
from torch.utils._pytree import TreeSpec, tree_unflatten

from moe_autograd._ambient import refuse_tangents
from moe_autograd.autograd.borders import is_python
from moe_autograd.autograd.contents.in_objects import InObjects, holder_in, notes_on, put_on, taken_apart
from moe_autograd.autograd.contents.leaves import LookedThrough
from moe_autograd.autograd.contents.reaching import Cut, has_history
from moe_autograd.autograd.entry import is_entry, not_taken_apart, refuse_strided_nested
from moe_autograd.autograd.grad_dtypes import GradDtypes, to_declare
from moe_autograd.autograd.joining.joined import ACCUMULATE_GRAD
from moe_autograd.autograd.modules.changes import base_of, look_at_history
from moe_autograd.autograd.result_hooks import RetainWithin, See, Within, begun_with, joined_by
from moe_autograd.autograd.walks import edge_of, gradient_edge, leads, plain, walk
from moe_autograd.autograd.wrapped_hooks import waited_for


def refuse_lost(values: Iterable[Any], known: Collection[int]) -> None:
    """Rule 9: raise if one of `values`, which copied containers hold after a call, has no `id` that is known."""
    for value in values:
        if isinstance(value, Tensor) and value.requires_grad and id(value) not in known:
            raise RuntimeError(
                "parallel_apply: expected tensors with history to leave a call as its result, got one of shape "
                f"{tuple(value.shape)} put into a list or dict among its inputs. That is a copy, since a tensor in it "
                "requires a gradient. Return it."
            )


def changed_of(newer: Sequence[tuple[Tensor, Tensor]]) -> list[tuple[Tensor, Tensor]]:
    """Return which inputs of another version, each with its alias, have another history; not if under `no_grad`.

    Raises:
        RuntimeError: one has another shape.
    """
    for tensor, alias in newer:
        _refuse_other_shape(tensor, alias)
    return [(tensor, alias) for tensor, alias in newer if not is_entry(alias.grad_fn)]


def _refuse_other_shape(tensor: Tensor, alias: Tensor) -> None:
    """Raise if a call has given an input another shape, by `input.unsqueeze_` and its like: the caller's has its own.

    Raises:
        RuntimeError: it has.
    """
    is_plain = type(alias) is Tensor and alias.layout is torch.strided
    if is_plain and (alias.shape != tensor.shape or alias.stride() != tensor.stride()):
        raise RuntimeError(
            "parallel_apply: expected calls to leave the shape and strides of their inputs as they are, got an input "
            f"of shape {tuple(tensor.shape)} and strides {tensor.stride()} turned in place into one of "
            f"{tuple(alias.shape)} and {alias.stride()}. Make a view, as by `unsqueeze` instead of `unsqueeze_`."
        )


def _is_plain_view(value: Tensor, base: Tensor) -> bool:
    """Whether `value` shows memory of `base` as it is, and has the gradient of a view of it."""
    if value.dtype is not base.dtype or (value.is_conj(), value.is_neg()) != (base.is_conj(), base.is_neg()):
        return False
    node, end = value.grad_fn, base.grad_fn
    while node is not None and node is not end:
        below = node.next_functions
        if is_python(node) or len(below) != 1:
            return False
        node = below[0][0]
    return node is not None


def _number_of(tensor: Tensor) -> int:
    """Return the number that the thread which computed a tensor gave to its node."""
    node: Any = tensor.grad_fn
    return cast(int, node._sequence_nr())


class _View(NamedTuple):
    """A result that is a view of an input which the call has changed."""

    of: Tensor
    size: torch.Size
    stride: tuple[int, ...]
    offset: int
    places: list[int]
    notes: dict[str, Any]


class CallResults:
    """The part of a call that is about its results; see `joined.Call`."""

    inputs: tuple[Tensor, ...] = ()
    cuts: list[Cut]  # where its graph ends besides leaves
    grad_dtypes: GradDtypes = ()
    dirty: tuple[Tensor, ...] = ()
    changed: Sequence[Tensor] = ()  # inputs that it changed in place, and autograd knows of it
    _changed_views: Sequence[Tensor | None] = ()  # those of `changed` that are views, each in its place
    _in_objects: InObjects | None = None  # of its results
    _begun = 0  # the number of the first node that its forward may have made
    _inner: Sequence[Tensor] = ()  # its results in its own graph, until all calls have been made
    _edges: list[GradientEdge]  # where the gradients of its results go within it
    _within: Sequence[tuple[int, Within]] = ()  # for results with hooks, by their places
    _own_hooks: dict[int, Any]  # that it put on its results, by their places
    _notes: dict[int, dict[str, Any]]  # likewise (`in_objects`)
    _has_waiting_hooks: bool  # whether one of these is of `register_multi_grad_hook`
    _tied: Sequence[weakref.ref[Tensor]] = ()  # its results
    # those of a map within, as the call knows them, by their places; kept as long as somebody has these results
    _of_maps: dict[int, Tensor]
    _retained: Sequence[int] = ()  # the places of those that it lets retain their gradients
    # the places of those that retain their gradients, as far as is known
    _retaining: frozenset[int] = frozenset()

    def _take_results(
        self,
        returned: Any,
        given: Sequence[Tensor],
        outer_of: dict[int, Tensor],
        changed: Sequence[tuple[Tensor, Tensor]],
    ) -> None:
        """Find the results that the join is to tie (Rule 8).

        Args:
            returned: by the module.
            given: to it, as it knows them.
            outer_of: what comes back as itself, by the `id` of the tensor that the module knows it as.
            changed: inputs that the call has changed in place, each with its alias.
        """
        values = self._flatten(returned)
        if forward_ad._current_level >= 0:
            refuse_tangents(value for value in taken_apart(returned)[0] if isinstance(value, Tensor))
        self._views: dict[int, _View] = {}  # by the inner tensor's id
        self._places: dict[int, list[int]] = {}  # of each result, by the inner tensor's id
        inner: list[Tensor] = []
        is_cut = not torch.is_inference_mode_enabled()  # else there is nothing to tie again
        if is_cut and (objects := [value for value in values if holder_in(value) is not None]):
            self._in_objects = InObjects(objects, lambda tensors: self._own(tensors, values))
            values += self._in_objects.tensors
        for i, value in enumerate(values):
            if not is_cut or not isinstance(value, Tensor) or not value.requires_grad:
                continue
            if id(value) in outer_of or value.grad_fn is None:
                values[i] = outer_of.get(id(value), value)
                continue
            if changed and (view := self._view_of_changed(value, changed)) is not None:
                view.places.append(i)
                values[i] = None
                continue
            if id(value) not in self._places:
                refuse_strided_nested(value)
                inner.append(value)
            self._places.setdefault(id(value), []).append(i)
            values[i] = None
        self._values = values
        self._edges = [edge_of(value) for value in inner]
        self._inner = inner
        self._own_hooks = {i: hooks for i, value in enumerate(inner) if (hooks := value._backward_hooks)}
        self._notes = {i: notes for i, value in enumerate(inner) if (notes := notes_on(value))}
        self._of_maps = {i: value for i, value in enumerate(inner) if joined_by(value.grad_fn) is not None}
        self._retained = [i for i, value in enumerate(inner) if value.retains_grad]
        self._has_waiting_hooks = any(waited_for(h) for own in self._own_hooks.values() for h in own.values())
        self._detach(inner, given, outer_of)

    def _own(self, tensors: list[Tensor], values: Sequence[object]) -> list[Tensor]:
        """Return those of some tensors that the call took or computed; `values` are its other results.

        Objects may also hold what was computed before, which stays as it is: tied again in each step, it would have a
        longer history each time. What threads of the call's own have computed tells by where it comes from. And calls
        that share an object may find each other's results in it, which lead to inputs of others.
        """
        now = _get_sequence_nr()  # each thread counts by itself: a few of before may pass for new ones
        new = {id(tensor) for tensor in tensors if self._begun <= _number_of(tensor) < now}
        ends: set[Node | None] = {edge.node for edge, _ in self.cuts}
        if len(new) < len(tensors):
            others = [value for value in values if isinstance(value, Tensor) and has_history(value)]
            own = [*others, *[tensor for tensor in tensors if id(tensor) in new]]
            met = {node for node, _ in walk(plain(map(edge_of, own)), ends)}
            met = ends.union(node for node in met if type(node) is not ACCUMULATE_GRAD)
            tensors = [t for t in tensors if id(t) in new or leads(plain([edge_of(t)]), met)]

        def strays(some: Sequence[Tensor]) -> bool:
            return any(is_entry(node) for node, _ in walk(plain(map(edge_of, some)), ends))

        return [tensor for tensor in tensors if not strays([tensor])] if strays(tensors) else tensors

    def _flatten(self, returned: Any) -> list[Any]:
        """Take the results out of the structure in which `take_returned` returns others; mostly there is none."""
        self._spec: TreeSpec | None = None
        self._is_list = type(returned) is list and all(type(value) is Tensor for value in returned)
        if self._is_list or isinstance(returned, Tensor):
            return list(returned) if self._is_list else [returned]
        known: LookedThrough = {}
        values, self._spec = taken_apart(returned, not_taken_apart(known))
        known.clear()
        return values

    def _view_of_changed(self, value: Tensor, changed: Sequence[tuple[Tensor, Tensor]]) -> _View | None:
        """Return what is known of a result that is a view of a changed input; of others nothing (Rule 7).

        Raises:
            RuntimeError: it is one that a function of the user's made, or shows the memory as something else.
        """
        if not value._is_view():
            return None
        for tensor, alias in changed:
            if base_of(value) is not base_of(alias):
                continue
            if not _is_plain_view(value, alias):
                raise RuntimeError(
                    "parallel_apply: expected results with memory of their own where a call changes its input in "
                    f"place, got one of shape {tuple(value.shape)} and {value.dtype} that shares memory with the input "
                    "otherwise than by PyTorch's own views of its dtype. Return a clone."
                )
            new = _View(
                tensor, value.size(), value.stride(), int(value.storage_offset()), [], notes_on(value)
            )
            return self._views.setdefault(id(value), new)
        return None

    def _detach(self, inner: list[Tensor], given: Sequence[Tensor], outer_of: dict[int, Tensor]) -> None:
        self.grad_dtypes = to_declare(inner)
        if len(inner) == 1 and not inner[0]._is_view() and not any(inner[0] is value for value in given):
            self.results: tuple[Tensor, ...] = (inner[0].detach(),)
            self.to_save: tuple[Tensor | None, ...] = ()
            return
        owners = [base_of(value) for value in inner]
        num_owned = collections.Counter(map(id, owners))
        outer = {id(base_of(tensor)) for tensor in (*outer_of.values(), *given)}.union(outer_of)
        results, shared = [], []
        for value, owner in zip(inner, owners, strict=True):
            result = value.detach()
            if owner.grad_fn is None or id(owner) in outer or num_owned[id(owner)] > 1:
                result = result.expand_as(result)  # `view_as` would give other strides to what has one row
                shared.append(result)
            results.append(result)
        self.results = tuple(results)
        self.to_save = tuple(shared)

    def refuse_changed_results(self, name: str) -> None:
        """Raise if another call has changed a result of this one, as if it were made after both.

        Raises:
            RuntimeError: it names this call.
        """
        inner, self._inner = self._inner, ()
        for value, edge in zip(inner, self._edges, strict=False):
            if value.grad_fn is not edge.node:
                raise RuntimeError(
                    f"parallel_apply: expected nobody to change what a call has returned, got a tensor of shape "
                    f"{tuple(value.shape)} changed in place that {name} returned. Return a clone, or make the calls "
                    "in a plain loop."
                )

    def _take_changed(self, changed: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Take note of inputs that were changed in place, each with its alias (Rule 7)."""
        self.changed = [tensor for tensor, _ in changed]
        self._edges += [edge_of(alias) for _, alias in changed]
        self._changed_views = [tensor if tensor._is_view() else None for tensor in self.changed]
        self.dirty = tuple([tensor for tensor in self.changed if not tensor._is_view()])

    def tie_changed(self) -> None:
        """Let the join tie inputs that it changed, as they are when all calls have been made (Rule 7)."""
        self.results += tuple([t.detach().clone() if t._is_view() else t for t in self.changed])
        if self.grad_dtypes:
            self.grad_dtypes = [*self.grad_dtypes, *[tensor.dtype for tensor in self.changed]]

    def forget_results(self) -> None:
        """See `joined.Call`."""
        self.results = self.dirty = self.inputs = self.to_save = self.changed = ()

    def take_returned(self, tied: Sequence[Tensor]) -> Any:
        """Return what the module returned, with the tied tensors in their places."""
        values, self._values = self._values, []
        self._tied = [weakref.ref(tensor) for tensor in tied]
        for place in self._of_maps:
            self._tied[place] = weakref.ref(tied[place], functools.partial(self._of_maps.pop, place))
        for place in self._retained:
            tied[place].retain_grad()
        for place, notes in self._notes.items():
            put_on(tied[place], notes)
        self._notes = {}
        for places, tensor in zip(self._places.values(), tied, strict=False):
            for place in places:
                values[place] = tensor
        if self._changed_views:
            self._give_history_to_views(tied[len(self._places) :])
        if self._views:
            self._make_views(values)
        in_objects, self._in_objects = self._in_objects, None
        if in_objects is not None:
            values = in_objects.exchange(values)
        if self._is_list:
            return values
        return values[0] if self._spec is None else tree_unflatten(values, self._spec)

    def see_within(self, place: int, see: See) -> None:
        """Let something see what comes to a result within the call (`result_hooks`)."""
        if place < len(self._edges):  # else its graph is gone
            node, output_nr = self._edges[place][:2]
            within = see(output_nr)
            within.register(node, self._own_hooks.get(place))
            self._within = [*self._within, (place, within)]
            if (joined := joined_by(node)) is not None:  # it is a result of a map within
                call, own = joined.call_of(output_nr)
                call.see_within(own, see)

    def results_at_hand(self) -> Iterator[tuple[int, GradientEdge, Tensor]]:
        """Yield those results that somebody has, with the history that they were given.

        Yields:
            Its place, where its gradient goes within the call, and the result; of one whose graph is gone nothing, nor
            of a call that changes an input, as its results do not lead to each other (`used_results`).
        """
        if len(self._edges) > len(self._places):
            return
        for place, (one, edge) in enumerate(zip(self._tied, self._edges, strict=False)):
            if (result := one()) is not None and self._is_as_tied(place, result):
                yield place, edge, result

    def _is_as_tied(self, place: int, result: Tensor) -> bool:
        joined = joined_by(result.grad_fn)
        return joined is not None and joined.call_of(result.output_nr) == (self, place)

    def look_within(self) -> bool:
        """Let `.grad`s of its results see what comes to these within it; return whether these, or hooks, are to."""
        for place, reference in enumerate(self._tied):
            result = reference()
            if result is not None and result.retains_grad and place not in self._retaining:
                self._retaining = self._retaining | {place}
                self.see_within(place, functools.partial(RetainWithin, reference))
        return bool(self._within)

    def _starts(self, grad_outputs: Sequence[Tensor | None]) -> list[tuple[GradientEdge, Tensor]]:
        """Return where its backward begins, each with the gradient there.

        Where that is one place, the engine says that it will not run, and a hook of `register_multi_grad_hook` on the
        result, which asks, waits for ever. Then there is another, which leads nowhere.
        """
        starts = [(e, g) for e, g in zip(self._edges, grad_outputs, strict=True) if g is not None]
        if len(starts) == 1 and self._has_waiting_hooks:
            nowhere = torch.empty(0, device="cpu", requires_grad=True)
            starts.append((gradient_edge(nowhere), nowhere.detach()))
        return starts

    def seeing(self, place: int) -> list[Within]:
        """Return what sees what comes to a result within the call."""
        return [within for own, within in self._within if own == place]

    def begun_with(self, seeds: Sequence[Tensor | None]) -> AbstractContextManager[object]:
        """Run its backward, which begins with these gradients of its results."""
        return begun_with([(within, seeds[place]) for place, within in self._within])

    def _make_views(self, values: list[Any]) -> None:
        """Put views of the inputs that are tied now into their places."""
        views, self._views = self._views, {}
        with torch.enable_grad():
            for view in views.values():
                result = view.of.as_strided(view.size, view.stride, view.offset)
                put_on(result, view.notes)
                for place in view.places:
                    values[place] = result

    def _give_history_to_views(self, changed: Sequence[Tensor]) -> None:
        """Rule 7, for inputs that are views: a copy of each was tied, and is copied into it."""
        views, self._changed_views = self._changed_views, ()
        for view, copy in zip(views, changed, strict=True):
            if view is None:
                continue
            # The inner graph has saved tensors that know of the real change: this one is not to count.
            with torch.autograd._unsafe_preserve_version_counter(view), torch.enable_grad():
                view.copy_(copy)
            look_at_history(view)  # its memory has its version again: the next one would pass for this
