"""Functions that use each feature of `FunctionCtx`, in each style that PyTorch knows.

Legend: `make` is `Leaves`; all tensors are float64 unless said otherwise.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from tests.support.catalogue import entry


@entry(lambda make: (make(3),))
@entry(lambda make: (make(),), name="scalar")
@entry(lambda make: (make(0, 3),), name="empty")
@entry(lambda make: (make(4, 3).t(),), name="not_contiguous")
@entry(lambda make: (make(3).sin(),), name="of_a_result")
@entry(lambda make: (make.parameter(3),), name="of_a_parameter")
@entry(lambda make: (make(3, requires_grad=False),), name="of_a_constant", checked=False, checked_twice=False)
class SavesInput(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * 3 * x**2


@entry(lambda make: (make(3),))
class ReadsTwice(Function):
    """Asks for what it saved as often as it needs it, as code that is written line by line does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x, x.detach().sign())
        return x.abs() * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2 * ctx.saved_tensors[0] * ctx.saved_tensors[1]


@entry(lambda make: (make(3),))
class SavesOutput(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.exp()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (y,) = ctx.saved_tensors
        return grad * y


@entry(lambda make: (make(3),), checked_twice=False)
class SavesIntermediate(Function):
    """What it saves has no history, so PyTorch's second derivative lacks a term, and so must ours."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x.cos())
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (cosine,) = ctx.saved_tensors
        return grad * cosine


@entry(lambda make: (make(3),))
class ReturnsIntermediate(Function):
    """The documented way to save an intermediate and be differentiable twice: return it as well."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        cosine = x.cos()
        ctx.save_for_backward(x, cosine)
        return x.sin(), cosine

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_cosine: Tensor) -> Tensor:
        x, cosine = ctx.saved_tensors
        return grad * cosine - grad_cosine * x.sin()


@entry(lambda make: (make(2, 3), make(2, 3)))
class SavesAllSorts(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        product = x * y
        ctx.save_for_backward(y)  # the later call counts
        ctx.save_for_backward(x, None, y, x, product)
        ctx.save_for_forward(x)  # forward-mode AD only; must be accepted
        return product

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, nothing, y, again, product = ctx.saved_tensors
        assert nothing is None
        assert torch.equal(x, again)
        assert torch.equal(product, x * y)
        return grad * y, grad * again


@entry(lambda make: (make(3),))
class KeepsAttributes(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.exponent = 3
        ctx.note = {"shape": tuple(x.shape)}
        ctx.x = x  # not saved: PyTorch allows it
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        assert ctx.note == {"shape": tuple(ctx.x.shape)}
        assert not hasattr(ctx, "never_set")
        return grad * ctx.exponent * ctx.x ** (ctx.exponent - 1)


@entry(lambda make: (make(3), make(3)), name="both")
@entry(lambda make: (make(3), make(3, requires_grad=False)), name="first")
@entry(lambda make: (make(3, requires_grad=False), make(3)), name="second")
class AsksWhatIsNeeded(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        assert type(ctx.needs_input_grad) is tuple
        ctx.seen = ctx.needs_input_grad
        ctx.save_for_backward(x, y)
        return x * y.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, y = ctx.saved_tensors
        assert ctx.seen == ctx.needs_input_grad
        grad_x = grad * y.sin() if ctx.needs_input_grad[0] else None
        return grad_x, grad * x * y.cos() if ctx.needs_input_grad[1] else None


@entry(lambda make: (make(3) * 1,))
@entry(lambda make: ((make(4) * 1)[1:],), name="of_a_view")
@entry(lambda make: (make(3, requires_grad=False),), name="constant", checked=False, checked_twice=False)
class ChangesInPlace(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x.mul_(2)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


@entry(lambda make: (make(3).clone(), make(3)))
class ChangesOneOfTwoInPlace(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        x.mul_(y)
        ctx.mark_dirty(x)
        ctx.save_for_backward(y, x)
        return x, y + 1

    @staticmethod
    def backward(ctx: Any, grad_x: Tensor, grad_sum: Tensor) -> tuple[Tensor, Tensor]:
        y, product = ctx.saved_tensors
        return grad_x * y, grad_x * product / y + grad_sum


@entry(lambda make: (make(5),))
@entry(lambda make: (make(2, 5),), name="rows")
class MarksNonDifferentiable(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        values, order = x.sort(dim=-1)
        negated = -values
        ctx.mark_non_differentiable(order, negated)
        ctx.save_for_backward(order)
        return values, order, negated

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_order: Tensor, grad_negated: Tensor) -> Tensor:
        (order,) = ctx.saved_tensors
        assert torch.equal(grad_negated, torch.zeros_like(grad))
        return torch.zeros_like(grad).scatter(-1, order, grad)


@entry(lambda make: (make(3),))
class LeavesGradsUnmaterialized(Function):
    """Its second result is used by nobody who sums only the first: then the gradient is `None`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x)
        return x.sin(), x.cos()

    @staticmethod
    def backward(ctx: Any, grad_sine: Tensor | None, grad_cosine: Tensor | None) -> Tensor | None:
        (x,) = ctx.saved_tensors
        total = None
        for grad, slope in ((grad_sine, x.cos()), (grad_cosine, -x.sin())):
            if grad is not None:
                total = grad * slope if total is None else total + grad * slope
        return total


@entry(lambda make: (make(3),))
class MaterializesGrads(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x)
        return x.sin(), x.sum()

    @staticmethod
    def backward(ctx: Any, grad_sine: Tensor, grad_sum: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        assert grad_sine.shape == x.shape
        assert grad_sum.shape == ()
        return grad_sine * x.cos() + grad_sum


@entry(lambda make: (make(3), 2))
@entry(lambda make: (make(3),), name="default")
class HasSetupContext(Function):
    @staticmethod
    def forward(x: Tensor, exponent: int = 3) -> Tensor:
        return x**exponent

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, ctx.exponent = inputs
        ctx.save_for_backward(x, output)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        x, _ = ctx.saved_tensors
        return grad * ctx.exponent * x ** (ctx.exponent - 1), None


@entry(lambda make: (make(4), make(4)))
class HasSetupContextAndTwoOutputs(Function):
    @staticmethod
    def forward(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x * y, x.argsort(), x - y

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        assert type(output) is tuple
        ctx.mark_non_differentiable(output[1])
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _: None, grad_difference: Tensor | None) -> tuple[Any, Any]:
        x, y = ctx.saved_tensors
        grad = torch.zeros_like(x) if grad is None else grad
        grad_difference = torch.zeros_like(x) if grad_difference is None else grad_difference
        return grad * y + grad_difference, grad * x - grad_difference


@entry(lambda make: (make(3),), name="default")
@entry(lambda make: (make(3), 5.0), name="given")
class HasDefaultArguments(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float = 2.0, *rest: Any) -> Tensor:
        assert rest == ()
        ctx.scale = scale
        return x * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return (grad * ctx.scale, None)[: len(ctx.needs_input_grad)]


@entry(lambda make: (make(3),))
class HasClassMethods(Function):
    factor = 4.0

    @classmethod
    def forward(cls, ctx: Any, x: Tensor) -> Tensor:
        return x * cls.factor

    @classmethod
    def backward(cls, ctx: Any, grad: Tensor) -> Tensor:
        return grad * cls.factor


@entry(lambda make: (make(3),))
class InheritsClassMethods(HasClassMethods):
    factor = 5.0


@entry(lambda make: (make(3),))
class HasClassMethodSetupContext(Function):
    factor = 4.0

    @classmethod
    def forward(cls, x: Tensor) -> Tensor:
        return x**2 * cls.factor

    @classmethod
    def setup_context(cls, ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @classmethod
    def backward(cls, ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * cls.factor * 2 * x


@entry(lambda make: (make(3),))
class HasVjp(Function):
    """`vjp` is PyTorch's other name for `backward`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.sin()

    @staticmethod
    def vjp(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * x.cos()


@entry(lambda make: (make(3),), checked_twice=False, twice=False)
class IsOnceDifferentiable(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        assert not torch.is_grad_enabled()
        (x,) = ctx.saved_tensors
        return grad * 3 * x**2
