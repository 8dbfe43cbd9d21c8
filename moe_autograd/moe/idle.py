"""Zero gradients for the parameters of experts that got no token.

As in a plain loop, an expert that is not called has no part in the graph, and its parameters keep ``grad =
None``. `torch.nn.parallel.DistributedDataParallel` waits for every parameter in every backward, and some
optimizers treat `None` and zero differently. Adding ``0 * parameter.sum()`` would do, but costs a pass
over every idle parameter and turns an infinite one into NaN everywhere; a node that returns zeros costs
nothing in the forward.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def with_zero_grads(y: Tensor, parameters: Sequence[Tensor]) -> Tensor:
    """Return `y`, changed in place such that its backward also gives each of `parameters` zeros.

    Args:
        y: any shape; nobody but the caller holds it.
        parameters: those that do not require grad are left out.
    """
    parameters = [parameter for parameter in parameters if parameter.requires_grad]
    if not parameters:
        return y
    attached: Tensor = _ZeroGrads.apply(y, *parameters)  # type: ignore[no-untyped-call]  # torch's own gap
    return attached


class _ZeroGrads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, y: Tensor, *parameters: Tensor) -> Tensor:
        ctx.parameters = parameters  # not saved: only their shapes matter, so a later update is no error
        ctx.mark_dirty(y)  # a view made here could not be changed in place by the layer's caller
        return y

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor, ...]:
        return grad_y, *(torch.zeros_like(parameter) for parameter in ctx.parameters)
