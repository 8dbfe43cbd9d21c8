"""Functions over other kinds of numbers and layouts, and functions that run autograd inside.

Legend: `make` is `Leaves`; all tensors are float64 unless said otherwise.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from tests.support.catalogue import entry
from tests.support.functions_context import SavesInput


@entry(lambda make: (make(3, dtype=torch.complex128), make(3, dtype=torch.complex128)))
@entry(
    lambda make: (make(3, dtype=torch.complex64), make(3, dtype=torch.complex64)),
    name="complex64",
    checked=False,
    checked_twice=False,
)
@entry(
    lambda make: (make(3, dtype=torch.float16), make(3, dtype=torch.float16)),
    name="half",
    checked=False,
    checked_twice=False,
)
@entry(
    lambda make: (make(3, dtype=torch.bfloat16), make(3, dtype=torch.bfloat16)),
    name="bfloat16",
    checked=False,
    checked_twice=False,
)
@entry(
    lambda make: (make(3, dtype=torch.float32), make(3, dtype=torch.bfloat16)),
    name="mixed",
    checked=False,
    checked_twice=False,
)
class Multiplies(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, y = ctx.saved_tensors
        return grad * y.conj(), grad * x.conj()


@entry(lambda make: (make(3, dtype=torch.complex128),))
class TakesTheRealPart(Function):
    """A view with another dtype; its gradient is real and becomes complex."""

    @staticmethod
    def forward(ctx: Any, z: Tensor) -> Tensor:
        return z.real.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return torch.complex(grad, torch.zeros_like(grad))


@entry(lambda make: (make(6, 2), torch.tensor([1, 4, 1])), checked=False, checked_twice=False)
class GivesASparseGradient(Function):
    @staticmethod
    def forward(ctx: Any, table: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.shape = table.shape
        return table[rows]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (rows,) = ctx.saved_tensors
        sparse = torch.sparse_coo_tensor(rows[None], grad, ctx.shape, check_invariants=True)
        return sparse, None


@entry(lambda make: (make(3, 3).to_sparse(), make(3, 2)), checked=False, checked_twice=False)
class TakesASparseTensor(Function):
    @staticmethod
    def forward(ctx: Any, sparse: Tensor, x: Tensor) -> Tensor:
        ctx.save_for_backward(sparse, x)
        return torch.sparse.mm(sparse, x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        sparse, x = ctx.saved_tensors
        return (grad @ x.t()).to_sparse(), sparse.t() @ grad


@entry(lambda make: (make(3),), checked_twice=False)
class RunsABackwardInItsForward(Function):
    """Its result is the derivative of x**4, computed by autograd."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        assert not torch.is_grad_enabled()
        with torch.enable_grad():
            inner = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad((inner**4).sum(), inner)
        ctx.save_for_backward(x)
        return slope

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * 12 * x.detach() ** 2


@entry(lambda make: (make(3),), checked_twice=False)
class RunsABackwardInItsBackward(Function):
    """Checkpointing by hand, with `.backward()` on a graph of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**4

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        inner = x.detach().requires_grad_()
        with torch.enable_grad():
            (inner**4).backward(grad.detach())
        assert inner.grad is not None
        return inner.grad


@entry(lambda make: (make(3),))
class KeepsAGraph(Function):
    """Builds a graph in its forward and differentiates it in its backward, as reentrant wrappers do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        with torch.enable_grad():
            ctx.inner = x.detach().requires_grad_()
            ctx.result = ctx.inner.sin() * ctx.inner
        ctx.save_for_backward(x)
        return ctx.result.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        if torch.is_grad_enabled():
            return grad * (x.cos() * x + x.sin())
        return torch.autograd.grad(ctx.result, ctx.inner, grad, retain_graph=True)[0]


@entry(lambda make: (make(3),))
class AppliesAnother(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return SavesInput.apply(x) + SavesInput.apply(x.detach().requires_grad_()).detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * SavesInput.apply(x) * 6 / x


@entry(lambda make: (make(3),))
class DifferentiatesThroughItself(Function):
    """Its backward is another function of the same kind, so that every order works."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * DifferentiatesThroughItself.apply(x + torch.pi / 2)


@entry(lambda make: (make(3), make(3)))
class ReturnsAResultWithHistory(Function):
    """Computes with gradients on inside; PyTorch replaces the history by the function's own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        with torch.enable_grad():
            product = x * y
        ctx.save_for_backward(x, y)
        return product

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, y = ctx.saved_tensors
        return grad * y, grad * x
