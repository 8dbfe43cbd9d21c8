"""Functions whose arguments, results or gradients have unusual forms, all of which PyTorch accepts.

Legend: `make` is `Leaves`; all tensors are float64 unless said otherwise.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from tests.support.catalogue import entry


class Pair(NamedTuple):
    first: Tensor
    second: Tensor


@entry(lambda make: (make(3),))
@entry(lambda make: (make(3).sin(),), name="of_a_result")
class ReturnsItsInput(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 1


@entry(lambda make: (make(3), make(3)))
@entry(lambda make: (make(3), make(3, requires_grad=False)), name="constant")
class ReturnsItsInputAndMore(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(x, y)
        return x, x * y, y

    @staticmethod
    def backward(ctx: Any, grad_x: Tensor, grad: Tensor, grad_y: Tensor) -> tuple[Tensor, Tensor]:
        x, y = ctx.saved_tensors
        return grad_x + grad * y, grad_y + grad * x


@entry(lambda make: (make(3), "flat"))
@entry(lambda make: (make(3), "rest"), name="rest")
@entry(lambda make: (make(2, 3), "transposed"), name="transposed")
class ReturnsAView(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, kind: str) -> Tensor:
        ctx.kind, ctx.shape = kind, x.shape
        return {"flat": lambda: x.view(-1), "rest": lambda: x[1:], "transposed": x.t}[kind]()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        if ctx.kind == "rest":
            return torch.nn.functional.pad(grad, (1, 0)), None
        return grad.reshape(ctx.shape) if ctx.kind == "flat" else grad.t(), None


@entry(lambda make: (make(3).clone(),))
class ChangesInPlaceUnmarked(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


@entry(lambda make: (make(3),))
class ReturnsOneTensorTwice(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 2
        return y, y

    @staticmethod
    def backward(ctx: Any, grad: Tensor, other: Tensor) -> Tensor:
        return grad * 2 + other * 2


@entry(lambda make: (make(3),), checked=False, checked_twice=False)
class ReturnsViewsOfOneResult(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        y = x * 2
        return y[:1], y[1:]

    @staticmethod
    def backward(ctx: Any, grad: Tensor, other: Tensor) -> Tensor:
        return torch.cat([grad, other]) * 2


@entry(lambda make: (make(3), 2.0, "text", None, [1, 2], {"key": 3}), checked=False, checked_twice=False)
class TakesAndReturnsAnything(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: float, *others: Any) -> tuple[Any, ...]:
        ctx.scale, ctx.num_others = scale, len(others)
        return others, x * scale, None, "text", 7, {"key": [1.5]}

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        assert [grad is None for grad in grads] == [True, False, True, True, True, True]
        return (grads[1] * ctx.scale, None, *[None] * ctx.num_others)  # type: ignore[operator]


@entry(lambda make: (make(3), {"weights": [make(3, requires_grad=False)]}))
class TakesTensorsInContainers(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, container: dict[str, list[Tensor]]) -> Tensor:
        (ctx.weights,) = container["weights"]
        return x * ctx.weights

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.weights, None


@entry(lambda make: (make(3),), checked=False, checked_twice=False)
class ReturnsAList(Function):
    """Only a tuple is a structure to PyTorch: tensors in a list pass through without history."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> list[Tensor]:
        return [x * 2, x * 3]

    @staticmethod
    def backward(ctx: Any, grad: None) -> Tensor:
        raise AssertionError("nothing depends on it")


@entry(lambda make: (make(3),), checked=False, checked_twice=False)
class ReturnsNothing(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> None:
        return None

    @staticmethod
    def backward(ctx: Any, grad: None) -> Tensor:
        raise AssertionError("nothing depends on it")


@entry(lambda make: (make(3),), checked=False, checked_twice=False)
class ReturnsAnEmptyTuple(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[()]:
        return ()

    @staticmethod
    def backward(ctx: Any) -> Tensor:
        raise AssertionError("nothing depends on it")


@entry(lambda make: (make(3),))
class ReturnsATupleOfOne(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor]:
        return (x * 2,)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor]:
        return (grad * 2,)


@entry(lambda make: (make(3),))
class ReturnsANamedTuple(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Pair:
        return Pair(x * 2, x * 3)

    @staticmethod
    def backward(ctx: Any, grad: Tensor, other: Tensor) -> Tensor:
        return grad * 2 + other * 3


@entry(lambda make: (), checked=False, checked_twice=False)
class TakesNothing(Function):
    @staticmethod
    def forward(ctx: Any) -> Tensor:
        return torch.ones(2, dtype=torch.float64)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[()]:
        raise AssertionError("nothing requires a gradient")


@entry(lambda make: tuple(make(2) for _ in range(2)), name="2")
@entry(lambda make: tuple(make(2) for _ in range(7)), name="7")
class TakesAnyNumber(Function):
    @staticmethod
    def forward(ctx: Any, *xs: Tensor) -> tuple[Tensor, ...]:
        return tuple(x * (i + 1) for i, x in enumerate(xs))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, ...]:
        return tuple(grad * (i + 1) for i, grad in enumerate(grads))


@entry(lambda make: (make(3), torch.arange(3)), checked=False, checked_twice=False)
class UsesIntegers(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        ctx.save_for_backward(order)
        return order + 1, x[order], x > 0

    @staticmethod
    def backward(ctx: Any, grad_order: Tensor, grad: Tensor, grad_mask: Tensor) -> tuple[Tensor, None]:
        (order,) = ctx.saved_tensors
        return torch.zeros_like(grad).index_add(0, order, grad), None


@entry(lambda make: (make(3), make(3)))
class GivesNoneForOne(Function):
    """A wrong derivative on purpose where it is `None`: PyTorch takes it for zero, without asking."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * 2, None


@entry(lambda make: (make(3),))
class GivesNoGradient(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.sign() * 0

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        return None


@entry(lambda make: (make(3), make(2, 3), make(2, 1)))
class GivesExpandedGradients(Function):
    """Larger gradients than the inputs, summed down by PyTorch as in broadcasting."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        return x + y + z

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return grad, grad, grad


@entry(lambda make: (make(3),))
class GivesMoreNones(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return grad * 2, None, None


@entry(lambda make: (make(3), torch.float32), name="float32", checked=False, checked_twice=False)
@entry(lambda make: (make(3), torch.int64), name="int64", checked=False, checked_twice=False)
class GivesAnotherDtype(Function):
    """PyTorch casts the gradient to the input's dtype."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = dtype
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return (grad * 2).to(ctx.dtype), None


@entry(lambda make: (make(2, 3),))
class GivesTheGradientItself(Function):
    """The same tensor for both inputs, expanded: PyTorch must not add in place into it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.shape = x.shape
        return x.sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.expand(ctx.shape)
