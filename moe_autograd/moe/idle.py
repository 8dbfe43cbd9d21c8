"""Zero gradients for the parameters of experts that got no token.

As in a plain loop, an expert that is not called has no part in the graph, and its parameters keep ``grad =
None``. `torch.nn.parallel.DistributedDataParallel` waits for every parameter in every backward, and some
optimizers treat `None` and zero differently. Adding ``0 * parameter.sum()`` would do, but costs a pass
over every idle parameter and turns an infinite one into NaN everywhere; a node that returns zeros costs
nothing in the forward. One node for all would hold the zeros of the whole layer at once, beside the gradients that they
are added to.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from moe_autograd.autograd.uncompiled import left_alone

_MOST_AT_ONCE = 2**18  # elements whose zeros are made together: a megabyte in float32


def with_zero_grads(y: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """Return `y`, changed in place such that its backward also gives each of `parameters` zeros.

    Args:
        y: any shape; nobody but the caller holds it.
        parameters: those that do not require grad are left out, and lazy ones, which have no shape yet.
    """
    parameters = [one for one in parameters if one.requires_grad and not is_lazy(one)]
    if not parameters:
        return y
    ends = [_Zeros.apply(*few) for few in _grouped(parameters)]  # type: ignore[no-untyped-call]  # torch's own gap
    attached: Tensor = _Attached.apply(y, *ends)  # type: ignore[no-untyped-call]  # torch's own gap
    return attached


def _grouped(parameters: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Put together neighbours whose zeros take little memory: a node for each would take its time, too."""
    few: list[Tensor] = []
    num_elements = 0
    for parameter in parameters:
        num_elements += parameter.numel()
        if few and num_elements > _MOST_AT_ONCE:
            yield few
            few, num_elements = [], parameter.numel()
        few.append(parameter)
    yield few


class _Zeros(torch.autograd.Function):
    """A node that makes the zeros of a few parameters; those of the nodes before it have been taken by then.

    Each parameter gets memory of its own, not one zero seen as many: hooks, and callers of `torch.autograd.grad`, may
    change their gradients in place.
    """

    @staticmethod
    def forward(ctx: Any, *parameters: Tensor) -> Tensor:
        ctx.parameters = parameters  # not saved: only their shapes matter, so a later update is no error
        return torch.empty(0, device=parameters[0].device)

    @staticmethod
    @left_alone
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, ...]:
        return tuple(torch.zeros_like(parameter) for parameter in ctx.parameters)


class _Attached(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, *ends: Tensor) -> Tensor:
        ctx.num_ends = len(ends)
        ctx.mark_dirty(y)  # a view made here could not be changed in place by the layer's caller
        return y

    @staticmethod
    @left_alone
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        return grad_y, *[None] * ctx.num_ends
