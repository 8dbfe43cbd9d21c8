"""Gradients of another dtype than their tensor's.

A tensor says by `grad_dtype` what dtype its gradient has, or `None` if any will do; the engine sees to it on each edge
of a graph. A leaf may say so, and since torch 2.14 an autograd function of its results (`ctx.set_output_grad_dtype`),
which 2.15 lets others see; with 2.14 we see what becomes of a gradient on its way there. Where we put a node of our own
between a tensor and what it is for, that node has to say the same, or the gradient would be rounded on its way.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction, Function

from moe_autograd._streams import unseen
from moe_autograd.autograd.uncompiled import is_backward_compiled

GradDtypes: TypeAlias = Sequence[torch.dtype | None]  # one for each tensor

MAY_DECLARE = hasattr(Function, "set_output_grad_dtype")
_MAY_ASK_RESULTS = hasattr(Tensor, "_has_grad_dtype_override")  # else `grad_dtype` is for leaves alone
_OURS = __name__.partition(".")[0] + "."


def grad_dtype_of(tensor: Tensor) -> torch.dtype | None:
    """Return the dtype of a tensor's gradient; `None` if any will do. Only for one that requires a gradient."""
    if _MAY_ASK_RESULTS or tensor.is_leaf:
        return tensor.grad_dtype
    node: Any = tensor.grad_fn if MAY_DECLARE else None
    if not isinstance(node, BackwardCFunction):
        return tensor.dtype
    if type(node)._forward_cls.__module__.startswith(_OURS):  # type: ignore[attr-defined]
        declared: GradDtypes = node.__dict__.get("declared", ())
        return declared[tensor.output_nr] if declared else tensor.dtype
    return _tried(tensor) if _can_be_tried(tensor) else tensor.dtype


def differs(tensor: Tensor) -> bool:
    """Whether the gradient of a tensor has, or may have, another dtype than the tensor."""
    return tensor.requires_grad and grad_dtype_of(tensor) is not tensor.dtype


def may_have_gradient(result: object, marked: Sequence[Tensor]) -> bool:
    """Whether a function's result, of those that it marked as non-differentiable or of others, has one at all."""
    if not isinstance(result, Tensor) or not (result.is_floating_point() or result.is_complex()):
        return False
    return not any(result is one for one in marked)


def to_declare(tensors: Sequence[Tensor]) -> GradDtypes:
    """Return what a node has to declare whose results stand for these tensors; nothing if all is as usual."""
    if not MAY_DECLARE:
        return ()
    found = [(grad_dtype_of(tensor), tensor.dtype) if tensor.requires_grad else None for tensor in tensors]
    if all(one is None or one[0] is one[1] for one in found):
        return ()
    return [None if one is None else one[0] for one in found]


def declare(ctx: Any, grad_dtypes: GradDtypes) -> None:
    """Declare what `to_declare` has returned for the results of a function."""
    if grad_dtypes:
        ctx.set_output_grad_dtype(*grad_dtypes)
        ctx.declared = grad_dtypes


def as_declared(ctx: Any, grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
    """Return gradients in the dtypes that a forward declared, as the engine would hand them to its backward."""
    dtypes: GradDtypes | None = ctx.output_grad_dtypes
    if dtypes is None or not MAY_DECLARE:
        return grads
    pairs = zip(grads, dtypes, strict=True)
    return [grad if grad is None or dtype is None else grad.to(dtype) for grad, dtype in pairs]


def declared_grad_dtypes(ctx: Any, results: Sequence[Any]) -> GradDtypes:
    """Return what the forward declared of its results' gradients, one for each; nothing if it declared none.

    Raises:
        RuntimeError: in PyTorch's words, if that fits other results.
    """
    declared: GradDtypes | None = ctx.output_grad_dtypes
    if declared is None or not MAY_DECLARE:
        return ()
    if not isinstance(declared, tuple):
        raise RuntimeError(
            f"set_output_grad_dtype expects the declarations to be a tuple, but got: {type(declared).__name__}"
        )
    for dtype in declared:
        if dtype is not None and not isinstance(dtype, torch.dtype):
            raise RuntimeError(
                "set_output_grad_dtype expects each declaration to be a torch.dtype or None, but got "
                f"{type(dtype).__name__}"
            )
    if len(declared) != len(results):
        raise RuntimeError(
            "set_output_grad_dtype expected the number of declarations to match the number of outputs: the Function "
            f"returned {len(results)} values but {len(declared)} declarations were provided"
        )
    for i, (dtype, result) in enumerate(zip(declared, results, strict=True)):
        if dtype is not None and not may_have_gradient(result, ctx.non_differentiable):
            raise RuntimeError(
                f"set_output_grad_dtype: got a concrete dtype for output {i}, but that output is not a differentiable "
                "tensor (it is a non-tensor, was marked non-differentiable, or has a non-differentiable dtype). "
                f"Pass None for output {i} instead."
            )
    return declared


# ---- torch 2.14


class _Trial(Function):
    """Leads a gradient to a tensor in a backward that does not ask for it: neither node nor hooks of it are called."""

    @staticmethod
    def forward(ctx: Any, asked: Tensor, tensor: Tensor, grad: Tensor) -> Tensor:
        ctx.grad = grad
        return torch.empty(0, dtype=torch.float32, device="cpu")

    @staticmethod
    def backward(ctx: Any, _: Any) -> Any:
        return None, ctx.grad, None


def _can_be_tried(tensor: Tensor) -> bool:
    is_plain = type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.is_nested
    return is_plain and not torch._C._are_functorch_transforms_active() and not is_backward_compiled()


def _tried(tensor: Tensor) -> torch.dtype | None:
    wide, narrow = (
        (torch.complex128, torch.complex64) if tensor.is_complex() else (torch.float64, torch.float32)
    )
    found = _becomes(wide, tensor)
    return None if found is wide and _becomes(narrow, tensor) is narrow else found


def _becomes(dtype: torch.dtype, tensor: Tensor) -> torch.dtype:
    """Return what the engine makes of this dtype in a gradient for a tensor."""
    arrived: list[torch.dtype] = []
    with unseen(), torch.inference_mode(False), torch.enable_grad():
        grad = torch.zeros((), dtype=dtype, device=tensor.device).expand(tensor.shape)
        asked = tensor.view_as(tensor)  # the engine looks at no node behind this one
        begin = _Trial.apply(asked, tensor, grad)  # type: ignore[no-untyped-call]
        begin.grad_fn.register_hook(lambda grads, _: arrived.append(grads[1].dtype))
        torch.autograd.grad(begin, asked, begin, allow_unused=True)
    return arrived[0]
