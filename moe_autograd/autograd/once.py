"""Gradients that were computed without a graph: to differentiate one raises, where it would pass for a constant."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor
from torch.autograd.function import Function

from moe_autograd.autograd.joining.batched import Batches


def not_twice(
    grads: Iterable[Tensor | None], sources: Iterable[Tensor | None], complaint: str
) -> list[Tensor | None]:
    """Return the same gradients; whoever differentiates one by any of its sources gets a `RuntimeError`.

    Those of many backwards at once, too (`batched`).

    Args:
        grads: of a backward with `create_graph=True`.
        sources: what they were computed from.
        complaint: what the error says.
    """
    grads, sources = [*grads], [*sources]
    batches = Batches([*grads, *sources])
    apart, sources = batches.apart(grads), batches.apart(sources)
    apply: Any = _NotTwice.apply
    with batches.beyond_transforms():
        tied = [None if grad is None else apply(complaint, grad, *sources) for grad in apart]
    return batches.together(tied)


class _NotTwice(Function):
    @staticmethod
    def forward(ctx: Any, complaint: str, grad: Tensor, *sources: Tensor | None) -> Tensor:
        ctx.complaint = complaint
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise RuntimeError(ctx.complaint)
