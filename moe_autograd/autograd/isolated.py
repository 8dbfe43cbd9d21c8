"""The two halves of one call of an autograd function, for those who move results and gradients themselves.

Neither makes a graph, or a thread (`emulated` has the context and how the function is called).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import Function
from torch.nn import Parameter

from moe_autograd.autograd.emulated import (
    EmulatedAutogradContext,
    arguments_of,
    call_backward,
    call_forward,
    check_is_function,
    detached,
    is_expandable,
    materialize,
    options_of,
)
from moe_autograd.autograd.grad_dtypes import as_declared, declared_grad_dtypes, grad_dtype_of
from moe_autograd.autograd.uncompiled import uncompiled
from moe_autograd.autograd.unrecorded import unrecorded

_COMPLEX_AND_REAL = (
    "Expected isFloatingType(grad.scalar_type()) || (input_is_complex == grad_is_complex) to be true, but got false.  "
    "(Could this error message be improved?  If so, please report an enhancement request to PyTorch.)"
)


@uncompiled
def run_isolated_forward(func: type[Function], *args: Any) -> tuple[EmulatedAutogradContext, Any]:
    """Run the forward of an autograd function without a graph.

    Why: `func.apply` ties its result into the graph of the calling thread. Whoever moves results and gradients
    himself (to another thread, another machine) wants the numbers and the context, and no graph.

    Args:
        func: a `torch.autograd.Function`, with or without `setup_context`.
        *args: what `func.apply` takes; tensors of any shape and dtype, and other objects.

    Returns:
        `(ctx, outputs)`: the context for `run_isolated_backward`, and what `func.apply` would return, detached. No
        gradient flows from `outputs`; the arguments' own graph is not touched.

    Raises:
        TypeError: `func` is not an autograd function.
        Exception: whatever the forward raises.

    Autograd: tensors given to `save_for_backward` live as long as the context; if one is changed in place before
    the backward, that raises as in PyTorch. A function that changes an argument in place changes its data.

    Threads: any. Each call has its own context.

    Example:
        >>> import torch
        >>> class Square(torch.autograd.Function):
        ...     @staticmethod
        ...     def forward(ctx, x):
        ...         ctx.save_for_backward(x)
        ...         return x * x
        ...     @staticmethod
        ...     def backward(ctx, grad):
        ...         return 2 * ctx.saved_tensors[0] * grad
        >>> ctx, y = run_isolated_forward(Square, torch.tensor([3.0], requires_grad=True))
        >>> y, run_isolated_backward(Square, ctx, torch.tensor([1.0]))
        (tensor([9.]), (tensor([6.]),))
    """
    check_is_function("run_isolated_forward", func)
    return unrecorded(partial(_forward, func, args))


def _forward(func: type[Function], args: tuple[Any, ...]) -> tuple[EmulatedAutogradContext, Any]:
    args = arguments_of(func, args)
    ctx, returned = call_forward(func, args, detach=True)
    ctx._emulated_arguments = tuple(map(_argument, args))
    results = returned if isinstance(returned, tuple) else (returned,)
    ctx._emulated_result_options = options_of(results)
    declared_grad_dtypes(ctx, results)
    ctx._emulated_kept = tuple(map(_kept, ctx.to_save))
    ctx.to_save = ctx.dirty_tensors = ctx.non_differentiable = ()
    outputs = tuple(map(detached, results))
    return ctx, outputs if isinstance(returned, tuple) else outputs[0]


@uncompiled
def run_isolated_backward(
    func: type[Function], ctx: EmulatedAutogradContext, *grad_outputs: Tensor | None
) -> tuple[Tensor | None, ...]:
    """Run the backward of a call that `run_isolated_forward` made.

    Args:
        func: the function that made `ctx`.
        ctx: the context of its forward.
        *grad_outputs: one gradient for each output of the forward, of its shape, dtype and device; `None` counts
            as zeros unless the function called `set_materialize_grads(False)`.

    Returns:
        One gradient or `None` for each argument of the forward, of the argument's shape and dtype (its `grad_dtype`,
        if it has one).

    Raises:
        TypeError: `ctx` is no context of `run_isolated_forward`, or a gradient no tensor.
        ValueError: not one gradient for each output, or one of another shape, or for an output that is no tensor.
        RuntimeError: in PyTorch's words, when the function returns too few or too many gradients, or one of a
            shape, dtype, device or layout that does not fit its argument; when a saved tensor was changed in place;
            under `torch.autograd.detect_anomaly`, when a gradient has a NaN.
        Exception: whatever the backward raises.

    Autograd: nothing is recorded: the gradients carry no graph. What the context has saved stays as long as it does, so
    the backward may run again.

    Threads: any, also another one than the forward's; one at a time for each context.
    """
    check_is_function("run_isolated_backward", func)
    _check_grad_outputs(func, ctx, grad_outputs)
    return unrecorded(partial(_backward, func, ctx, grad_outputs))


def _backward(
    func: type[Function], ctx: EmulatedAutogradContext, grad_outputs: tuple[Tensor | None, ...]
) -> tuple[Tensor | None, ...]:
    if ctx.materialize_grads:
        grad_outputs = tuple(materialize(grad_outputs, ctx._emulated_result_options))
    grads = call_backward(func, ctx, as_declared(ctx, grad_outputs))
    _check_grads(func, ctx, grads)
    return tuple(map(_fitted, grads, ctx._emulated_arguments))


class _Argument(NamedTuple):
    """What a gradient of an argument has to look like; `grad_dtype` is what it becomes, `None` if it stays."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    layout: torch.layout
    kind: type[Tensor]
    grad_dtype: torch.dtype | None


def _argument(value: object) -> _Argument | None:
    if not isinstance(value, Tensor):
        return None
    grad_dtype = grad_dtype_of(value) if value.requires_grad else value.dtype
    return _Argument(value.shape, value.dtype, value.device, value.layout, type(value), grad_dtype)


def _check_grads(func: type[Function], ctx: EmulatedAutogradContext, grads: Sequence[Tensor | None]) -> None:
    """Raise for a gradient that the engine would refuse; `call_backward` has looked at number and shapes."""
    arguments: Sequence[_Argument | None] = ctx._emulated_arguments
    for position, (grad, argument) in enumerate(zip(grads, arguments, strict=True)):
        if grad is None or argument is None or not ctx.needs_input_grad[position]:
            continue
        if not grad.is_floating_point() and grad.is_complex() != argument.dtype.is_complex:
            raise RuntimeError(_COMPLEX_AND_REAL)
        if fault := _fault_of(grad, argument):
            index = sum(one is not None for one in arguments[:position])
            raise RuntimeError(
                f"Function {func.__name__}Backward returned an invalid gradient at index {index} - {fault}"
            )


def _fault_of(grad: Tensor, argument: _Argument) -> str:
    """Return what the engine finds wrong with a gradient; nothing if it makes it fit."""
    if type(grad) is not Tensor or argument.kind not in (Tensor, Parameter):
        return ""  # others decide for themselves what goes together
    if not _may_be_laid_out(grad.layout, argument.layout):
        return f"expected layout {_layout_name(argument.layout)} but got {_layout_name(grad.layout)}"
    if grad.device != argument.device and grad.dim():
        return f"expected device {argument.device} but got {grad.device}"
    return ""


def _may_be_laid_out(layout: torch.layout, wanted: torch.layout) -> bool:
    is_sparse_wanted = wanted not in (torch.strided, torch._mkldnn)  # type: ignore[attr-defined]
    return layout in (wanted, torch.sparse_coo) or (layout is torch.strided and is_sparse_wanted)


def _layout_name(layout: torch.layout) -> str:
    """Return a layout's name in C++."""
    name = str(layout).removeprefix("torch.").title().replace("_", "")
    return "Sparse" if layout is torch.sparse_coo else name


def _fitted(grad: Tensor | None, argument: _Argument | None) -> Tensor | None:
    """Make a gradient like its argument, as the engine does on the way to it; `None` if nobody asked for it."""
    if grad is None or argument is None:
        return None
    if grad.requires_grad:
        grad = grad.detach()  # from a backward that turns recording on
    if grad.shape != argument.shape:
        if not is_expandable(argument.shape, grad.shape):
            return None  # the argument requires none, else `call_backward` had complained
        grad = grad.sum_to_size(argument.shape)
    if grad.dim() == 0:
        grad = grad.to(argument.device)
    return grad if argument.grad_dtype is None else grad.to(argument.grad_dtype)


def _check_grad_outputs(
    func: type[Function], ctx: EmulatedAutogradContext, grad_outputs: Sequence[object]
) -> None:
    """Raise unless there is one gradient or `None` for each output, of its shape, as the engine does."""
    caller = "run_isolated_backward"
    is_context = isinstance(ctx, EmulatedAutogradContext)
    if not is_context or "_emulated_result_options" not in vars(ctx):
        got = f"{type(ctx).__name__}{' made elsewhere' * is_context}"
        raise TypeError(
            f"{caller}: expected the context that run_isolated_forward returned, got {got}. "
            "Pass the function, its context, and a gradient for each output."
        )
    options = ctx._emulated_result_options
    if len(grad_outputs) != len(options):
        raise ValueError(
            f"{caller}: expected {len(options)} gradients, one for each output of {func.__name__}, got "
            f"{len(grad_outputs)}. Pass None for outputs without a gradient."
        )
    for place, (grad, wanted) in enumerate(zip(grad_outputs, options, strict=True)):
        if grad is None:
            continue
        if not isinstance(grad, Tensor):
            raise TypeError(
                f"{caller}: expected a tensor or None for output {place} of {func.__name__}, got "
                f"{type(grad).__name__}. Pass its gradient, or None if it has none."
            )
        shape = None if wanted is None else tuple(wanted.shape if isinstance(wanted, Tensor) else wanted[0])
        if tuple(grad.shape) != shape:
            raise ValueError(
                f"{caller}: expected {'None' if shape is None else f'a gradient of shape {shape}'} for output {place} "
                f"of {func.__name__}, got one of shape {tuple(grad.shape)}. Pass one of the output's shape, or None."
            )


def _kept(value: Any) -> Any:
    if value is None:
        return None
    if not isinstance(value, Tensor):
        raise TypeError(f"save_for_backward can only save variables, but got {type(value).__name__}")
    return torch._C._autograd._make_saved_tensor(value.detach(), False)
