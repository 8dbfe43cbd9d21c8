"""Calls whose inputs have histories that may not be walked for nothing: autograd functions in Python."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.autograd import Function
from torch.utils._pytree import tree_map_only

from tests.support.comparison import MapFunction


class Copies(Function):
    """Notes by name whose backward runs."""

    ran: ClassVar[list[object]] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor, name: object) -> Tensor:
        ctx.name = name
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        Copies.ran.append(ctx.name)
        return grad.clone(), None


def copied(x: Tensor, name: object = None) -> Tensor:
    copy: Tensor = Copies.apply(x, name)  # type: ignore[no-untyped-call]
    return copy


def behind_functions(apply: MapFunction) -> MapFunction:
    """Return a map of functions whose inputs are each copied by a function of its own."""

    def apply_behind(func: Any, *args_per_call: Any, **options: Any) -> Any:
        return apply(func, *copies_of(args_per_call), **options)

    return apply_behind


def modules_behind_functions(apply: MapFunction) -> MapFunction:
    """Return a map of modules whose inputs are each copied by a function of its own."""

    def apply_behind(modules: Any, inputs: Any, kwargs_tup: Any = None, **options: Any) -> Any:
        return apply(modules, copies_of(inputs), kwargs_tup, **options)

    return apply_behind


def copies_of(values: Any) -> Any:
    return tree_map_only(Tensor, lambda x: copied(x) if x.requires_grad else x, values)


def leaf(value: float = 1.0) -> Tensor:
    return torch.full((3,), value, dtype=torch.float64, requires_grad=True)
