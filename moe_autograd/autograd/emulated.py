"""Run one call of an autograd function by itself: no graph before it, none behind it, no threads.

`Function.apply` does three things at once: it calls `forward`, keeps what the context was told, and ties the result
into the graph. A map that runs many calls on many threads needs the first two on each thread and the third only
once, for all calls together. So here `forward` is given a context that remembers instead of acting:

    native      apply ──▶ ctx (a graph node) ──▶ forward ──▶ results tied to the node
    emulated    EmulatedAutogradContext     ──▶ forward ──▶ results, and ctx says what there is to tie

The map reads what the context remembers and ties all calls to one node (`join`); `isolated` ties nothing.

What PyTorch checks when a graph node returns its gradients is checked here as well, in PyTorch's own words, since
a node that stands for many calls could no longer say which of them was wrong.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import Function, FunctionCtx

Options: TypeAlias = tuple[torch.Size, torch.dtype, torch.device, torch.layout]
# Of a result; itself without its history, if it is nested: nothing else tells how long its parts are.
ResultOptions: TypeAlias = Options | Tensor | None

_NO_SETUP_CONTEXT = Function.setup_context
BACKWARD_TWICE = (
    "Trying to backward through the graph a second time (or directly access saved tensors after they have already "
    "been freed). Saved intermediate values of the graph are freed when you call .backward() or autograd.grad(). "
    "Specify retain_graph=True if you need to backward through the graph a second time or if you need to access "
    "saved tensors after calling backward."
)
_ACCESSED_TWICE = (
    "saved_tensors can only be accessed once when clear_saved_tensors_on_access=True is set on the autograd.Function. "
    "Either access saved_tensors only once, or set clear_saved_tensors_on_access=False."
)
_CLEARED: Any = object()  # in place of what was saved


class EmulatedAutogradContext(FunctionCtx):
    """Stand in for the `ctx` that PyTorch gives to a function's `forward` and `backward`.

    It is a `FunctionCtx`: `save_for_backward`, `mark_dirty`, `mark_non_differentiable` and `set_materialize_grads`
    are PyTorch's own methods, which leave their arguments in attributes; free attributes are kept as they are, but for
    names that begin with `_emulated_`.

    Args:
        needs_input_grad: for each argument of the forward, whether it is a tensor that requires a gradient.

    Autograd: the context holds saved tensors itself only between `run_isolated_forward` and its end of life; in a
    map they belong to the outer node, and the context sees them while its backward runs.

    Threads: used by one thread at a time.
    """

    to_save: tuple[Any, ...] = ()  # tensors and `None`
    dirty_tensors: tuple[Tensor, ...] = ()
    non_differentiable: tuple[Tensor, ...] = ()
    materialize_grads: bool = True
    output_grad_dtypes: tuple[torch.dtype | None, ...] | None = None

    # What the library keeps here has a prefix, since other names belong to the function. What was saved has one entry
    # for each backward that runs, put and taken by one operation each: several threads may use a graph at once.
    _emulated_saved: Sequence[Sequence[Tensor | None]] = ((),)
    _emulated_clears = False  # whether what was saved goes as soon as somebody asks for it
    _emulated_argument_shapes: Sequence[torch.Size | None] = ()  # None: not a tensor
    _emulated_kept: tuple[Any, ...] = ()  # SavedTensor objects of an isolated call
    _emulated_result_options: Sequence[ResultOptions] = ()  # of an isolated call
    _emulated_arguments: Sequence[Any] = ()  # of an isolated call: what their gradients have to look like

    def __init__(self, needs_input_grad: tuple[bool, ...] = ()) -> None:
        self.needs_input_grad = needs_input_grad

    @property
    def saved_tensors(self) -> tuple[Tensor | None, ...]:
        """What `save_for_backward` was given.

        Raises:
            RuntimeError: in PyTorch's words, after the tensors were freed, or when one was changed in place.
        """
        if self._emulated_kept:
            return tuple(None if kept is None else kept.unpack() for kept in self._emulated_kept)
        try:
            saved = self._emulated_saved[-1]
        except IndexError:
            raise RuntimeError(BACKWARD_TWICE) from None
        tensors = tuple(saved)
        if self._emulated_clears and isinstance(saved, list):
            if tensors == (_CLEARED,):
                raise RuntimeError(_ACCESSED_TWICE)
            saved[:] = [_CLEARED]
        return tensors

    @property
    def saved_variables(self) -> tuple[Tensor | None, ...]:
        """What `saved_tensors` returns, by its name of old, of which PyTorch warns."""
        warnings.warn(
            "'saved_variables' is deprecated; use 'saved_tensors'", DeprecationWarning, stacklevel=2
        )
        return self.saved_tensors

    @property
    def _input_grad_buffers(self) -> tuple[None, ...]:
        """What `input_grad_buffers` returns: none to add to, as calls run side by side."""
        return (None,) * len(self.needs_input_grad)


def arguments_of(func: type[Function], args: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return what the forward of `func.apply(*args)` takes: with `setup_context`, defaults are arguments as well."""
    if func.setup_context is _NO_SETUP_CONTEXT:
        return args
    bound = inspect.signature(func.forward).bind(*args)  # not cached, which would keep what `func` holds
    bound.apply_defaults()
    return bound.args


def call_forward(
    func: type[Function], args: tuple[Any, ...], *, detach: bool = False
) -> tuple[EmulatedAutogradContext, Any]:
    """Run `func.forward` as `func.apply` would, in the current grad mode.

    Args:
        func: the function.
        args: what its forward takes (`arguments_of`).
        detach: give the forward detached tensors; the context still says what the caller's require.

    Returns:
        The context, and what the forward returned.
    """
    needs_input_grad, shapes = [], []
    for argument in args:
        is_tensor = isinstance(argument, Tensor)
        needs_input_grad.append(is_tensor and argument.requires_grad)
        shapes.append(argument.shape if is_tensor else None)
    ctx = EmulatedAutogradContext(tuple(needs_input_grad))
    ctx._emulated_argument_shapes = shapes
    if func.clear_saved_tensors_on_access:
        ctx._emulated_clears = True
    if detach:
        args = tuple(map(detached, args))
    if func.setup_context is _NO_SETUP_CONTEXT:
        return ctx, func.forward(ctx, *args)
    returned = func.forward(*args)
    func.setup_context(ctx, args, returned)
    return ctx, returned


def call_backward(
    func: type[Function], ctx: EmulatedAutogradContext, grad_outputs: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """Run `func.backward` (or `vjp`) in the current grad mode, and check what it returns.

    Args:
        func: the function.
        ctx: the context of its forward.
        grad_outputs: what the backward is to get; missing gradients are filled in already (`materialize`).

    Returns:
        One gradient or `None` for each argument of the forward. Shapes may still have to be summed to those of
        the arguments, as PyTorch does behind a node.
    """
    backward = _backward_of(func)
    is_boxed = func.boxed_grads_call
    returned = backward(ctx, list(grad_outputs)) if is_boxed else backward(ctx, *grad_outputs)
    return _checked(func, ctx, returned if isinstance(returned, tuple) else (returned,))


def options_of(results: Sequence[Any]) -> list[ResultOptions]:
    """Return what zeros in place of each result's gradient have to look like; `None` for what is no tensor."""
    options: list[ResultOptions] = []
    for result in results:
        if not isinstance(result, Tensor):
            options.append(None)
        elif result.is_nested:
            options.append(result.detach())
        else:
            options.append((result.shape, result.dtype, result.device, result.layout))
    return options


def materialize(
    grad_outputs: Sequence[Tensor | None], options: Sequence[ResultOptions]
) -> list[Tensor | None]:
    """Put zeros in the place of the gradients that are missing, for results that are tensors."""
    return [
        _zeros(wanted) if grad is None and wanted is not None else grad
        for grad, wanted in zip(grad_outputs, options, strict=True)
    ]


def _zeros(wanted: Options | Tensor) -> Tensor:
    if isinstance(wanted, Tensor):
        return torch.zeros_like(wanted)
    shape, dtype, device, layout = wanted
    return torch.zeros(shape, dtype=dtype, device=device, layout=layout)


def _backward_of(func: type[Function]) -> Any:
    backward, vjp = func.backward, func.vjp
    if vjp is Function.vjp:
        return backward
    if backward is not Function.backward:
        raise RuntimeError(
            "Implementing both 'backward' and 'vjp' for a custom Function is not allowed. "
            "You should only implement one of them."
        )
    return vjp


def _checked(
    func: type[Function], ctx: EmulatedAutogradContext, grads: tuple[Any, ...]
) -> tuple[Tensor | None, ...]:
    shapes = ctx._emulated_argument_shapes
    if len(grads) != len(shapes):
        grads = _trimmed(func, grads, len(shapes))
    for position, (grad, shape) in enumerate(zip(grads, shapes, strict=True)):
        if grad is None:
            continue
        if shape is None:
            raise RuntimeError(
                f"function {func.__name__}Backward returned a gradient different than None at position "
                f"{position + 1}, but the corresponding forward input was not a Variable"
            )
        if not isinstance(grad, Tensor):
            raise RuntimeError(f"expected Variable or None (got {type(grad).__name__})")
        if grad.shape != shape and ctx.needs_input_grad[position] and not is_expandable(shape, grad.shape):
            index = sum(s is not None for s in shapes[:position])
            raise RuntimeError(
                f"Function {func.__name__}Backward returned an invalid gradient at index {index} - "
                f"got {list(grad.shape)} but expected shape compatible with {list(shape)}"
            )
    if torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled():
        _refuse_nan(func, [grad for grad, shape in zip(grads, shapes, strict=True) if shape is not None])
    return grads


def _refuse_nan(func: type[Function], grads: Sequence[Tensor | None]) -> None:
    """Raise if one is not a number, as the engine does while anomalies are detected."""
    for index, grad in enumerate(grads):
        if grad is not None and grad.detach().isnan().any():
            raise RuntimeError(
                f"Function '{func.__name__}Backward' returned nan values in its {index}th output."
            )


def _trimmed(func: type[Function], grads: tuple[Any, ...], num_arguments: int) -> tuple[Any, ...]:
    """Allow more gradients than arguments if the rest are `None`, as PyTorch does."""
    if len(grads) < num_arguments or any(grad is not None for grad in grads[num_arguments:]):
        raise RuntimeError(
            f"function {func.__name__}Backward returned an incorrect number of gradients "
            f"(expected {num_arguments}, got {len(grads)})"
        )
    return grads[:num_arguments]


def is_expandable(shape: torch.Size, wider: torch.Size) -> bool:
    """Whether a tensor of `shape` broadcasts to `wider`."""
    pairs = zip(reversed(shape), reversed(wider), strict=False)
    return len(shape) <= len(wider) and all(own in (1, other) for own, other in pairs)


def check_is_function(caller: str, func: object) -> None:
    """Raise `TypeError` unless `func` is a subclass of `torch.autograd.Function`."""
    if not (isinstance(func, type) and issubclass(func, Function)):
        owner = getattr(func, "__self__", func)  # of `Square.apply` the class
        kind = owner if isinstance(owner, type) else type(owner)
        advice = "For modules and other callables use parallel_apply."
        raise TypeError(
            f"{caller}: expected a subclass of torch.autograd.Function, got {func!r}. "
            f"{f'Pass the class: {kind.__name__}.' if issubclass(kind, Function) else advice}"
        )


def detached(value: Any) -> Any:
    """Return a tensor without its history, and anything else as it is."""
    return value.detach() if isinstance(value, Tensor) else value
