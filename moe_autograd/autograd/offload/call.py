"""One call of an offloaded expert, as one node of the caller's graph.

The node keeps a graph of its own, from detached inputs to the results, one for each micro-batch::

       x ──┬─ detached ── expert, weights held ── y 0 ──┬── y      the caller's graph sees x, y and one node
           └─ detached ── expert, weights held ── y 1 ──┘

The weights are leaves of the inner graphs. The backward asks for their gradients there, and gathers them in the
expert's own part instead of `.grad`, which would have to stay in memory. The inputs are leaves, too, each with an
`inlet`: a backward from outside that comes to it says so.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import Function
from torch.autograd.graph import GradientEdge, Node
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map_only, tree_unflatten

from moe_autograd._interrupts import unwinding
from moe_autograd.autograd.anchors import stand_for_weights
from moe_autograd.autograd.contents.in_objects import notes_on, put_on
from moe_autograd.autograd.emulated import BACKWARD_TWICE
from moe_autograd.autograd.grad_dtypes import GradDtypes, declare, to_declare
from moe_autograd.autograd.modules.computed_from import uses_of
from moe_autograd.autograd.modules.escaped import refuse_escaped
from moe_autograd.autograd.modules.inlet import Inlet, let_in
from moe_autograd.autograd.modules.used_elsewhere import tie_uses
from moe_autograd.autograd.offload.checks import check_reached, check_returned, check_transforms
from moe_autograd.autograd.offload.drawing import Drawing
from moe_autograd.autograd.offload.held import HeldExpert
from moe_autograd.autograd.offload.microbatches import Microbatches, Rows, joined
from moe_autograd.autograd.offload.parts import Part
from moe_autograd.autograd.offload.saved import ByCaller, MovedActivations, saving
from moe_autograd.autograd.once import not_twice
from moe_autograd.autograd.ordered_hooks import unpack_ahead
from moe_autograd.autograd.recompute import Recompute
from moe_autograd.autograd.result_hooks import skip_missing_gradients
from moe_autograd.autograd.runs import shown
from moe_autograd.autograd.split_backward import is_wanted_later
from moe_autograd.autograd.this_backward import keeps_graph, refuse_other_engines
from moe_autograd.autograd.uncompiled import filled, is_backward_compiled, uncompiled
from moe_autograd.autograd.walks import gradient_edge, plain, walk

_TWICE = (
    "OffloadedExperts: expected a gradient of first order, got a derivative of the gradient. "
    "Use the plain modules where second derivatives are needed."
)


class _Piece(NamedTuple):
    """The inner graph of one micro-batch."""

    inputs: Sequence[GradientEdge | None]
    outputs: Sequence[GradientEdge | None]
    weights: dict[str, GradientEdge]
    moved: MovedActivations | None
    rows: Rows
    ahead: Sequence[weakref.ref[ByCaller]]  # what the caller's hooks are asked for before its backward


class OffloadedCall:
    """What a node knows of its call; it holds no tensor of the caller's.

    Args:
        held: the expert.
        num_microbatches: split the rows in so many, and let activations leave memory; `None` for neither.
        next_to_load: what the backward after this one will need.
        recompute: how to run the forward again in the backward; `None`: not at all.
        drawing: enter this for the backward, which may draw random numbers.
    """

    def __init__(
        self,
        held: HeldExpert,
        num_microbatches: int | None,
        next_to_load: Sequence[Part],
        recompute: Recompute | None,
        drawing: Drawing,
    ) -> None:
        self._held, self._num_microbatches, self._next_to_load = held, num_microbatches, next_to_load
        self._recompute, self._num_updates = recompute, held.num_updates
        self.drawing = drawing
        self._shapes: list[torch.Size] = []
        self.grad_dtypes: GradDtypes = ()  # of the results
        self._microbatches = Microbatches(0, 1)
        self._result: tuple[list[Any], TreeSpec] = ([], tree_flatten(None)[1])
        self._uses: dict[int, set[int]] = {}  # of the results: which of them were computed from which others
        self.is_trained = False  # once the forward is over: whether weights require gradients
        self._is_in_backward = torch._C._current_graph_task_id() != -1

    @unwinding
    def apply(self, args: Sequence[Any], kwargs: dict[str, Any], anchor: Tensor | None) -> Any:
        """Call the expert.

        Args:
            args: as for the expert; gradients flow to tensors, also to those in tuples, lists and dicts.
            kwargs: as for the expert.
            anchor: stands for the expert's weights, or for those that the call thaws; `None` if nobody trains it.

        Returns:
            What the expert returns.

        Raises:
            UnsupportedTransformError: within a `torch.func` transform and its like, or with forward-mode tangents.
        """
        leaves, spec = tree_flatten((tuple(args), kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        check_transforms(self._held.name, leaves)
        self._shapes = [tensor.shape for tensor in tensors]
        num_rows = next((shape[0] for shape in self._shapes if shape), 0)
        self._microbatches = Microbatches(num_rows, self._num_microbatches or 1)
        call = functools.partial(self._call, leaves, spec)
        try:
            with self.shown("forward"):
                if torch.is_grad_enabled() and (anchor is not None or any(t.requires_grad for t in tensors)):
                    # of its own, and no leaf: of leaves the engine does not tell who wants them
                    view = None if anchor is None else anchor.view_as(anchor)
                    tied = _Node.apply(self, call, view, *tensors)  # type: ignore[no-untyped-call]
                    if anchor is not None and self.is_trained:
                        stand_for_weights(anchor)
                    tie_uses(self._held.name, tied, self._uses)
                else:
                    self._result, tied = self._without_graph(call, tensors)
        finally:  # saved-tensor hooks may raise when the result is tied: it would hold the node, which holds this
            (result, result_spec), self._result = self._result, ([], spec)
        rest = iter(tied)
        return tree_unflatten([next(rest) if isinstance(one, Tensor) else one for one in result], result_spec)

    def shown(self, phase: str) -> contextlib.AbstractContextManager[None]:
        """Show the block to profilers and on timelines: in a layer, the map's one call is all the experts together."""
        return shown(self._held.name, phase, "OffloadedExperts")

    def _call(self, leaves: Sequence[Any], spec: TreeSpec, tensors: Sequence[Tensor]) -> Any:
        rest = iter(tensors)
        args, kwargs = tree_unflatten(
            [next(rest) if isinstance(one, Tensor) else one for one in leaves], spec
        )
        if self._recompute is None:
            return self._held.call(*args, **kwargs)
        return self._recompute(self._held.call, *args, **kwargs)

    def _without_graph(
        self, call: Callable[[Sequence[Tensor]], Any], tensors: Sequence[Tensor]
    ) -> tuple[tuple[list[Any], TreeSpec], list[Tensor]]:
        pieces = []
        for rows in self._microbatches.rows:
            with self._held.residency.hold([self._held.weights]):
                cut = _each_once(map(_apart, self._microbatches.cut(tensors, rows)), tensors)
                made = call(cut)
                if torch.is_grad_enabled():  # nobody asks for a gradient
                    leaves = [leaf for leaf in tree_flatten(made)[0] if isinstance(leaf, Tensor)]
                    own = [*cut, *self._held.parameters.values()]  # it may have made leaves of the inputs
                    check_reached(self._held.name, _edges(leaves), _edges(own))
                pieces.append(self._own(made))
        result = tree_flatten(joined(pieces))
        return result, [leaf for leaf in result[0] if isinstance(leaf, Tensor)]

    def forward(
        self, call: Callable[[Sequence[Tensor]], Any], tensors: Sequence[Tensor], inlets: Sequence[Inlet]
    ) -> tuple[list[Tensor], list[_Piece]]:
        """Call the expert on each micro-batch; return its tensors, and the inner graphs.

        Args:
            call: of the expert.
            tensors: among what it takes.
            inlets: where these enter.
        """
        results, pieces = [], []
        for rows in self._microbatches.rows:
            moved = None if self._num_microbatches is None else MovedActivations(self._held.residency)
            cut = self._microbatches.cut(tensors, rows)
            inputs = _each_once(map(let_in, cut, tensors, inlets), tensors)
            with self._held.residency.hold([self._held.weights]), torch.enable_grad():
                with saving(self._held, moved) as ahead:
                    result = call(inputs)
                outputs = [leaf for leaf in tree_flatten(result)[0] if isinstance(leaf, Tensor)]
                self.grad_dtypes = to_declare(outputs)
                edges = _edges(inputs)
                once = [edge if edge not in edges[:i] else None for i, edge in enumerate(edges)]
                piece = _Piece(once, _edges(outputs), self._held.weight_edges(), moved, rows, ahead)
                check_reached(self._held.name, piece.outputs, [*piece.inputs, *piece.weights.values()])
                pieces.append(piece)
                self.is_trained = self.is_trained or bool(piece.weights)
                self._note_uses(piece)
                results.append(self._own(result, inputs))
            del inputs, result, outputs
            if moved is not None:
                moved.seal()
        self._result = tree_flatten(joined(results))
        self._held.open_calls.add(self)
        return [leaf for leaf in self._result[0] if isinstance(leaf, Tensor)], pieces

    def _note_uses(self, piece: _Piece) -> None:
        if len(piece.outputs) > 1:
            for place, used in uses_of([edge and edge[:2] for edge in piece.outputs]).items():
                self._uses.setdefault(place, set()).update(used)

    def backward(
        self, pieces: list[_Piece], grads: Sequence[Tensor | None], for_weights: bool, keep_graph: bool
    ) -> list[Tensor | None]:
        """Run the inner backwards, the last micro-batch first; gather the weights' gradients.

        Args:
            pieces: emptied on the way, unless the graph is kept.
            grads: one for each tensor of the result, `None` where none flows.
            for_weights: whether the backward wants the weights' gradients.
            keep_graph: whether there may be another backward.

        Returns:
            The gradients of the call's tensors.
        """
        if for_weights and self._held.updates_on_backward and self._is_in_backward:
            raise RuntimeError(
                f"{self._held.name}: expected a forward outside of any backward with update='on_backward', got "
                "one that a backward ran, as checkpoint(use_reentrant=True) does: others may still need these weights. "
                "Pass use_reentrant=False, or update='on_step'."
            )
        if self._recompute is not None:  # else what is saved of the weights tells
            self._held.check_weights(self._num_updates)
        self._held.residency.prefetch(self._next_to_load)
        for piece in pieces:
            unpack_ahead(piece.ahead)
        found: list[Sequence[Tensor | None]] = []
        updates = for_weights and self._held.updates_on_backward
        is_last = updates and not keep_graph and len(self._held.open_calls) == 1
        for i in reversed(range(len(pieces))):
            piece = pieces[i] if keep_graph else pieces.pop()
            with self._in_memory_for_backward(piece, for_weights, is_last):
                found.insert(0, self._piece_backward(piece, grads, for_weights, keep_graph))
        if not keep_graph:
            self._held.open_calls.discard(self)
        if is_last and self._num_microbatches is not None:
            self._held.update_on_backward()
        return [
            self._microbatches.put_together(shape, [of_piece[i] for of_piece in found])
            for i, shape in enumerate(self._shapes)
        ]

    def _in_memory_for_backward(
        self, piece: _Piece, for_weights: bool, is_last: bool
    ) -> contextlib.AbstractContextManager[None]:
        if is_last and self._num_microbatches is None:
            return self._held.updating()
        parts = [self._held.weights, *([self._held.gradients] if for_weights else [])]
        if piece.moved is not None and piece.moved.part is not None:
            parts.append(piece.moved.part)
        return self._held.residency.hold(parts)

    def _piece_backward(
        self, piece: _Piece, grads: Sequence[Tensor | None], for_weights: bool, keep_graph: bool
    ) -> Sequence[Tensor | None]:
        roots = [
            (edge, self._microbatches.part_of(grad, piece.rows))
            for edge, grad in zip(piece.outputs, grads, strict=True)
            if edge is not None and grad is not None
        ]
        weights = self._held.trained(piece.weights) if for_weights else {}
        wanted = [*(edge for edge in piece.inputs if edge), *weights.values()]
        if not roots or not wanted:
            return [None] * len(piece.inputs)
        edges, root_grads = [edge for edge, _ in roots], [grad for _, grad in roots]
        with self._held.noticing_changes():  # a checkpoint inside runs the module again
            made = torch.autograd.grad(edges, wanted, root_grads, retain_graph=keep_graph, allow_unused=True)
        if weights:
            self._held.gather(dict(zip(weights, made[-len(weights) :], strict=True)))
        rest = iter(made)
        return [next(rest) if edge else None for edge in piece.inputs]

    def _own(self, result: Any, inputs: Sequence[Tensor] = ()) -> Any:
        """Detach what the expert returned.

        What shares memory with an input or another result becomes a view. Tensors that are cut apart cannot tell each
        other of a change in place; with views PyTorch refuses it.
        """
        leaves = tree_flatten(result)[0]
        check_returned(self._held.name, leaves, self._would_be_wrong)
        returned = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        num_uses = collections.Counter(_storage_of(tensor) for tensor in (*inputs, *returned))

        def own(tensor: Tensor) -> Tensor:
            detached = tensor.detach()
            if tensor.requires_grad and num_uses[_storage_of(tensor)] > 1:
                detached = detached.view_as(tensor)
            put_on(detached, notes_on(tensor))
            return detached

        return tree_map_only(Tensor, own, result)

    def _would_be_wrong(self, tensor: Tensor) -> bool:
        """Whether a tensor that is returned as it is would be: without a gradient, without memory, or a part."""
        return tensor.requires_grad or self._held.is_borrowed(tensor) or len(self._microbatches.rows) > 1


@skip_missing_gradients
class _Node(Function):
    @staticmethod
    def forward(
        ctx: Any, call: OffloadedCall, run: Any, anchor: Tensor | None, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*(t for t in (anchor, *tensors) if t is not None and t.requires_grad))
        own, num_before = weakref.ref(ctx), 0 if anchor is None else 1
        inlets = [Inlet(own, place) for place in range(num_before, num_before + len(tensors))]
        results, ctx.pieces = call.forward(run, tensors, inlets)
        declare(ctx, call.grad_dtypes)
        ctx.call, ctx.is_spent, ctx.has_anchor = call, False, anchor is not None
        has_gradient = [any(piece.outputs[i] for piece in ctx.pieces) for i in range(len(results))]
        ctx.mark_non_differentiable(
            *[result for result, has in zip(results, has_gradient, strict=True) if not has]
        )
        return tuple(results)

    @staticmethod
    @uncompiled
    @unwinding
    def backward(ctx: Any, *grads: Tensor | None) -> Sequence[Tensor | None]:
        refuse_other_engines("OffloadedExperts", ctx)
        if ctx.is_spent:
            raise RuntimeError(BACKWARD_TWICE)
        if not is_backward_compiled():
            refuse_escaped(functools.partial(_nodes_of, ctx.pieces))
        keep_graph = keeps_graph()
        ctx.is_spent = not keep_graph
        anchor = ctx.next_functions[0][0]
        for_weights = (ctx.has_anchor and ctx.call.is_trained) and (
            torch._C._will_engine_execute_node(anchor) or is_wanted_later(anchor)
        )
        with ctx.call.shown("backward"), ctx.call.drawing():
            found = ctx.call.backward(ctx.pieces, grads, for_weights, keep_graph)
        if torch.is_grad_enabled():  # create_graph=True
            found = not_twice(found, (*ctx.saved_tensors, *grads), _TWICE)
        if not is_backward_compiled():
            return (None, None, None, *found)
        # to be added up, where calls share the anchor
        nothing = torch.empty(0, device="cpu") if ctx.has_anchor else None
        return filled(ctx.next_functions, (None, None, nothing, *found))


def _nodes_of(pieces: Sequence[_Piece]) -> set[Node | None]:
    return {node for piece in pieces for node, _ in walk(plain([edge for edge in piece.outputs if edge]))}


def _storage_of(tensor: Tensor) -> object:
    """Return what is equal for tensors that share memory."""
    return tensor.untyped_storage()._cdata if tensor.layout is torch.strided else id(tensor)


def _apart(tensor: Tensor) -> Tensor:
    """Return another that shows a tensor of the caller's, as `let_in` does: the module may make it its buffer."""
    if tensor.requires_grad and tensor.is_leaf:  # its gradient is the caller's
        return tensor
    own = tensor.detach().requires_grad_(tensor.requires_grad)
    put_on(own, notes_on(tensor))
    return own


def _each_once(made: Iterable[Tensor], tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return what was made of each tensor; of one that is given twice, the same."""
    first = dict[int, Tensor]()
    return [first.setdefault(id(tensor), one) for tensor, one in zip(tensors, made, strict=True)]


def _edges(tensors: Sequence[Tensor]) -> list[GradientEdge | None]:
    return [gradient_edge(tensor) if tensor.requires_grad else None for tensor in tensors]
