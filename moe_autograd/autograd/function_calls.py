"""A call of an autograd function, as a join sees it.

The forward runs on whatever thread, without gradients, on the caller's own tensors (as `Function.apply` runs it);
the join then ties the results, saves what the function saved and marks what it marked. The backward is the
function's own, on whatever thread, in the grad mode of the outer backward: with `create_graph=True` its operators
are recorded there and lead to the caller's tensors, since saved tensors come out of the join with their history.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.function import Function
from torch.autograd.graph import Node

from moe_autograd._ambient import refuse_tangents
from moe_autograd.autograd.emulated import arguments_of, call_backward, call_forward, materialize, options_of
from moe_autograd.autograd.grad_dtypes import GradDtypes, declared_grad_dtypes
from moe_autograd.autograd.joining.accumulating import (
    AtOnce,
    Wanted,
    add_where_possible,
    ended,
    is_worth_adding,
    may_add_at_once,
)
from moe_autograd.autograd.joining.boxed import Grads
from moe_autograd.autograd.joining.joined import ACCUMULATE_GRAD, Joined, Tensors, which_are_wanted
from moe_autograd.autograd.result_hooks import Arrived, See
from moe_autograd.autograd.split_backward import is_in_first_part

_SEVERAL_WITH_A_VIEW = (
    "If your Function modifies inplace an input that is a view of another Tensor, your Function cannot return more "
    "than one Tensor. This is not supported by the current autograd engine. You should either make sure the input is "
    "not a view (using .clone() for example) or make your Function only return one Tensor (potentially splitting it "
    "into two Functions: one doing the inplace that returns a single Tensor and a second one that does the other "
    "operations). You can ask on the forum https://discuss.pytorch.org/ if you need help to do this change."
)

_APPLY = vars(Function)["apply"]


def applies_as_usual(func: type[Function]) -> bool:
    """Whether a function's `apply` is PyTorch's, and does nothing of its own around the forward."""
    return next(vars(kind)["apply"] for kind in func.__mro__ if "apply" in vars(kind)) is _APPLY


class FunctionCall:
    """One call of `func`; see `joined.Call`. Constructing it runs the forward, in the current grad mode.

    Args:
        func: the function.
        args: what `func.apply` takes.
        is_recorded: whether the caller's grad mode is on.
    """

    __slots__ = (
        "_changed_view",
        "_ctx",
        "_num_results",
        "_options",
        "_returned",
        "_saved_now",
        "_tensor_arguments",
        "_tensor_results",
        "changed",
        "func",
        "grad_dtypes",
        "inputs",
        "results",
    )

    _saved_now: list[Sequence[Tensor | None]]  # what the context sees; one for each backward that runs

    def __init__(self, func: type[Function], args: tuple[Any, ...], *, is_recorded: bool) -> None:
        self.func = func
        args = arguments_of(func, args)
        ctx, returned = call_forward(func, args)
        self._ctx, self._returned = ctx, returned
        self._tensor_arguments: list[int] | None = None  # where they are, if not everywhere
        self.inputs = args
        if None in ctx._emulated_argument_shapes:
            self._tensor_arguments = [i for i, a in enumerate(args) if isinstance(a, Tensor)]
            self.inputs = tuple([args[i] for i in self._tensor_arguments])
        self.grad_dtypes: GradDtypes = ()
        if ctx.output_grad_dtypes is not None:
            self._take_grad_dtypes(returned if isinstance(returned, tuple) else (returned,))
        self._changed_view: Tensor | None = None
        self.changed: tuple[Tensor, ...] = ()  # in place, and gradients flow through it
        if ctx.dirty_tensors and is_recorded and True in ctx.needs_input_grad:
            self.changed = tuple([one for one in ctx.dirty_tensors if isinstance(one, Tensor)])
            returned = self._set_view_aside(returned)
        if isinstance(returned, Tensor):
            self._num_results = 1
            self.results: tuple[Tensor, ...] = (returned,)
        else:
            self._take_several(returned if isinstance(returned, tuple) else (returned,))
        if True not in ctx.needs_input_grad:  # it has no backward (the join's Rule 4), and so saves nothing
            ctx.to_save, ctx.non_differentiable = (), self.results
        if ctx.non_differentiable:
            self._part_from_inputs()
        if forward_ad._current_level >= 0:
            refuse_tangents(self.results)

    def _take_several(self, returned: tuple[Any, ...]) -> None:
        # With one result no gradient is ever missing: without its only one a backward does not run.
        self._options = options_of(returned)
        self._num_results = len(returned)
        self._tensor_results = [i for i, r in enumerate(returned) if isinstance(r, Tensor)]
        self.results = tuple([returned[i] for i in self._tensor_results])

    def _part_from_inputs(self) -> None:
        """Let no input come out as a result that is marked: others may take it, and gradients flow through theirs."""
        ctx, results = self._ctx, list(self.results)
        taken = {id(tensor) for tensor in self.inputs} - {id(tensor) for tensor in ctx.dirty_tensors}
        marked = taken.intersection(map(id, ctx.non_differentiable))
        places = [i for i, result in enumerate(results) if id(result) in marked]
        for i in places:
            results[i] = _parted(results[i])
        others = [tensor for tensor in ctx.non_differentiable if id(tensor) not in marked]
        ctx.non_differentiable = (*others, *[results[i] for i in places])
        self.results = tuple(results)

    def _take_grad_dtypes(self, returned: tuple[Any, ...]) -> None:
        declared = declared_grad_dtypes(self._ctx, returned)
        if declared and True in self._ctx.needs_input_grad:
            pairs = zip(declared, returned, strict=True)
            self.grad_dtypes = [dtype for dtype, result in pairs if isinstance(result, Tensor)]

    def _set_view_aside(self, returned: Any) -> Any:
        """Let the join tie a copy of a view that was changed in place and is the call's only result.

        PyTorch can give a changed view a new history only behind a node with one result and the view as its first
        input, which a join is not. So the join ties the copy, and `take_returned` copies it into the view, which gives
        the view a history that leads there.

        Raises:
            RuntimeError: in PyTorch's words, if it is not the only result.
        """
        ctx, results = self._ctx, returned if isinstance(returned, tuple) else (returned,)
        dirty = {id(tensor) for tensor in ctx.dirty_tensors} - {
            id(tensor) for tensor in ctx.non_differentiable
        }
        views = [result for result in results if id(result) in dirty and result._is_view()]
        if not views:
            return returned
        if len(results) > 1:
            raise RuntimeError(_SEVERAL_WITH_A_VIEW)
        view = self._changed_view = views[0]
        copy = view.clone()
        ctx.to_save = tuple([copy if tensor is view else tensor for tensor in ctx.to_save])
        ctx.dirty_tensors = tuple([tensor for tensor in ctx.dirty_tensors if tensor is not view])
        return (copy,) if isinstance(returned, tuple) else copy

    @property
    def to_save(self) -> tuple[Tensor | None, ...]:
        """What the function gave to `save_for_backward`."""
        return self._ctx.to_save

    @property
    def dirty(self) -> tuple[Tensor, ...]:
        """What the function changed in place."""
        return self._ctx.dirty_tensors

    @property
    def non_differentiable(self) -> tuple[Tensor, ...]:
        """What the function marked; all results of a call that takes nothing which requires a gradient."""
        return self._ctx.non_differentiable

    def forget_results(self) -> None:
        """See `joined.Call`; free attributes of the context are the function's own business, as in PyTorch."""
        ctx = self._ctx
        ctx.to_save = ctx.dirty_tensors = ctx.non_differentiable = ()
        ctx._emulated_saved = self._saved_now = []
        self.inputs = self.results = self.changed = ()

    def forget_returned(self) -> None:
        """Drop what the forward returned: where tying has failed midway, as a pack hook raised, it leads to the node.

        The second run of a `torch.utils.checkpoint` ends so. The node holds the call, and nobody would free the two.
        """
        self._returned = self._changed_view = None

    def take_returned(self, tied: Sequence[Tensor]) -> Any:
        """Return what `func.apply` returns: what the forward returned, its tensors replaced by the tied ones."""
        returned, self._returned = self._returned, None
        if self._changed_view is not None:
            view, self._changed_view = self._changed_view, None
            view.copy_(tied[0])
            return (view,) if isinstance(returned, tuple) else view
        if not isinstance(returned, tuple):
            return tied[0] if tied else returned  # one tensor, or something that is none
        values = list(returned)
        for position, tensor in zip(self._tensor_results, tied, strict=True):
            values[position] = tensor
        return tuple(values)

    def backward(
        self, saved: Tensors, grad_outputs: Tensors, wanted: Sequence[Wanted], keep_graph: bool
    ) -> Tensors:
        """See `joined.Call`."""
        ctx = self._ctx
        if self._num_results != 1:
            grad_outputs = self._with_others(grad_outputs)
            if ctx.materialize_grads:
                grad_outputs = materialize(grad_outputs, self._options)
        self._saved_now.append(saved)
        try:
            grads: Tensors = call_backward(self.func, ctx, grad_outputs)
        finally:
            self._saved_now.pop()
        if self._tensor_arguments is not None:
            grads = [grads[i] for i in self._tensor_arguments]
        return add_where_possible(grads, wanted) if wanted else grads

    def see_within(self, place: int, see: See) -> None:
        """See `joined.Call`: all that comes to a result comes from outside."""

    def note_arrived(self, place: int, arrived: Arrived) -> None:
        """See `joined.Call`: no result was computed from another."""

    def _with_others(self, grad_outputs: Tensors) -> list[Tensor | None]:
        """Put `None` for the results that are no tensors, as PyTorch does."""
        by_position = dict(zip(self._tensor_results, grad_outputs, strict=True))
        return [by_position.get(i) for i in range(self._num_results)]


class JoinedFunctions(Joined):
    """The calls of a map of functions: those that are not needed do not run, as nodes of their own would not."""

    def ask(self, nodes: Sequence[Node | None], reached: Sequence[int]) -> Sequence[Wanted]:
        """See `Joined`."""
        if is_in_first_part():
            return []
        wanted = _wanted(nodes)
        # The calls of a map are mostly alike: the first one tells whether it is worth looking at all of them.
        is_worth_a_look = any(map(_is_added_to, nodes[: self.input_parts.counts[0]]))
        if is_worth_a_look and self.is_whole and may_add_at_once():
            return self._add_at_once(nodes, wanted)
        return wanted

    def _add_at_once(self, nodes: Sequence[Node | None], wanted: Sequence[Wanted]) -> Sequence[Wanted]:
        """Let calls add the gradients of leaves themselves, where they may (`accumulating`)."""
        at_once, times = AtOnce(), collections.Counter(nodes)
        return [
            (times[node] == 1 and _is_added_to(node) and at_once.adder(node)) or is_wanted
            for node, is_wanted in zip(nodes, wanted or [True] * len(nodes), strict=True)
        ]

    def backward(
        self, saved_of: dict[int, Sequence[Any]], grad_outputs: Grads, wanted: Sequence[Wanted]
    ) -> Grads:
        """See `Joined`; a call that is not needed gets no gradient, and so does not run (the join's Rule 3)."""
        if not wanted:
            return super().backward(saved_of, grad_outputs, wanted)
        for i in self.reached(grad_outputs):
            if not any(self.input_parts.of(wanted, i)):
                start, count = self.result_parts.start(i), self.result_parts.counts[i]
                grad_outputs[start : start + count] = [None] * count
        with ended(wanted):
            return super().backward(saved_of, grad_outputs, wanted)


def _parted(tensor: Tensor) -> Tensor:
    """Return another tensor of the same memory, as PyTorch does with an input that comes out as a result."""
    return tensor.detach() if tensor.requires_grad else tensor.view_as(tensor)


def _wanted(nodes: Sequence[Node | None]) -> Sequence[bool]:
    """Return for each of `nodes` whether this backward uses the gradients that flow there; nothing if all are used."""
    with contextlib.suppress(RuntimeError):  # see `which_are_wanted`
        if all(map(torch._C._will_engine_execute_node, filter(None, nodes))):  # in one go: mostly all are
            return []
    return which_are_wanted(nodes)


def _is_added_to(node: Node | None) -> bool:
    return type(node) is ACCUMULATE_GRAD and is_worth_adding(cast(Any, node).variable)
