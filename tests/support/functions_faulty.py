"""Functions that break PyTorch's rules, each in one way; the call whose last argument is true is the broken one.

They are no part of the catalogue: natively each ends in an error.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function


class Faulty(Function):
    """Doubles its input, without a fault. The subclasses replace a part."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, broken: bool) -> Any:
        ctx.broken = broken
        return x * 2

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * 2, None


class RaisesInForward(Faulty):
    @staticmethod
    def forward(ctx: Any, x: Tensor, broken: bool) -> Any:
        if broken:
            raise ValueError("broken on purpose")
        return x * 2


class RaisesInBackward(Faulty):
    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if ctx.broken:
            raise KeyError("broken on purpose")
        return grads[0] * 2, None


class GivesTooFewGradients(Faulty):
    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * 2 if ctx.broken else (grads[0] * 2, None)


class GivesTooManyGradients(Faulty):
    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return (grads[0], None, grads[0]) if ctx.broken else (grads[0] * 2, None)


class GivesAWrongShape(Faulty):
    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0][:-1] if ctx.broken else grads[0] * 2, None


class GivesASmallerShape(Faulty):
    """Could be expanded to the input's shape, which PyTorch does not do: it only sums down."""

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0].sum() if ctx.broken else grads[0] * 2, None


class GivesANumber(Faulty):
    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return 1.0 if ctx.broken else grads[0] * 2, None


class GivesAGradientToANumber(Faulty):
    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * 2, grads[0] if ctx.broken else None


class SavesANumber(Faulty):
    @staticmethod
    def forward(ctx: Any, x: Tensor, broken: bool) -> Any:
        ctx.save_for_backward(5 if broken else x)
        ctx.broken = broken
        return x * 2


class MarksANumberDirty(Faulty):
    @staticmethod
    def forward(ctx: Any, x: Tensor, broken: bool) -> Any:
        if broken:
            ctx.mark_dirty(5)
        ctx.broken = broken
        return x * 2


class MarksDirtyWithoutReturning(Faulty):
    @staticmethod
    def forward(ctx: Any, x: Tensor, broken: bool) -> Any:
        ctx.broken = broken
        if broken:
            ctx.mark_dirty(x)
        return x * 2


class ChangesALeafInPlace(Faulty):
    @staticmethod
    def forward(ctx: Any, x: Tensor, broken: bool) -> Any:
        ctx.broken = broken
        if not broken:
            return x * 2
        ctx.mark_dirty(x)
        return x.mul_(2)


class ChangesAViewAmongSeveralResults(Faulty):
    @staticmethod
    def forward(ctx: Any, x: Tensor, broken: bool) -> Any:
        ctx.broken = broken
        if not broken:
            return x * 2, x * 3
        ctx.mark_dirty(x)
        return x.mul_(2), x * 3

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * 2, None


class MarksANumberNonDifferentiable(Faulty):
    @staticmethod
    def forward(ctx: Any, x: Tensor, broken: bool) -> Any:
        ctx.broken = broken
        if broken:
            ctx.mark_non_differentiable(5)
        return x * 2


class LacksBackward(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, broken: bool) -> Any:
        return x * 2


class LacksForward(Function):
    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0], None


class HasBackwardAndVjp(Faulty):
    @staticmethod
    def vjp(ctx: Any, *grads: Any) -> Any:
        return grads[0] * 2, None


class ReadsWhatItNeverSaved(Faulty):
    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (x,) = ctx.saved_tensors
        return grads[0] * x, None


class ReadsAnUnknownAttribute(Faulty):
    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * (ctx.never_set if ctx.broken else 2), None


class RunsOutOfABackward(Faulty):
    """Runs a backward inside its backward that fails for a reason of its own."""

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if ctx.broken:
            torch.ones(2, dtype=torch.float64).sum().backward()
        return grads[0] * 2, None


BREAKS_FORWARD: list[type[Function]] = [
    RaisesInForward,
    SavesANumber,
    MarksANumberDirty,
    MarksDirtyWithoutReturning,
    ChangesALeafInPlace,
    ChangesAViewAmongSeveralResults,
    MarksANumberNonDifferentiable,
    LacksForward,
]
BREAKS_BACKWARD: list[type[Function]] = [
    RaisesInBackward,
    GivesTooFewGradients,
    GivesTooManyGradients,
    GivesAWrongShape,
    GivesASmallerShape,
    GivesANumber,
    GivesAGradientToANumber,
    LacksBackward,
    HasBackwardAndVjp,
    ReadsWhatItNeverSaved,
    ReadsAnUnknownAttribute,
    RunsOutOfABackward,
]
