"""What calls of an autograd function change in place while others take the same memory: such a map is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function

from moe_autograd import map_with_parallel_backward
from tests.support.comparison import MapFunction, assert_same, natively
from tests.support.module_programs import finish, leaves


class MayChange(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float | None) -> Tensor:
        ctx.factor = factor
        if factor is None:
            return x + 1
        ctx.mark_dirty(x)
        return x.mul_(factor)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * (ctx.factor or 1), None


def part(x: Tensor) -> Tensor:
    return x[:2]


def whole(x: Tensor) -> Tensor:
    return x


@pytest.mark.parametrize(
    "calls",
    [
        [(whole, 3.0), (whole, None)],
        [(whole, None), (whole, 3.0)],
        [(whole, 3.0), (whole, 5.0)],
        [(part, 3.0), (whole, None)],
        [(whole, None), (part, 3.0)],
    ],
)
@pytest.mark.parametrize("max_concurrency", [None, 1])
def test_two_calls_of_a_function_take_no_memory_that_one_of_them_changes(
    calls: list[tuple[Callable[[Tensor], Tensor], float | None]], max_concurrency: int | None
) -> None:
    (x,) = leaves(1)
    y = x * 2
    with pytest.raises(RuntimeError, match=r"map_with_parallel_backward: expected .* changed in place"):
        map_with_parallel_backward(
            MayChange, *[(take(y), factor) for take, factor in calls], max_concurrency=max_concurrency
        )


def test_calls_of_a_function_may_change_parts_that_do_not_overlap() -> None:
    def program(apply: MapFunction) -> Any:
        (x,) = leaves(1, 3, 8)
        y = x * 2
        return finish([*apply(MayChange, (y[:, :3], 3.0), (y[:, 3:], 5.0), (x, None)), y], x)

    assert_same(program(natively), program(map_with_parallel_backward), tolerance=1e-12)


def test_without_gradients_calls_of_a_function_may_change_what_they_like() -> None:
    x = torch.ones(3)
    with torch.no_grad():
        map_with_parallel_backward(MayChange, (x, 2.0), (x, 3.0), max_concurrency=1)
    assert x.tolist() == [6.0] * 3


def test_a_function_may_take_twice_what_it_changes() -> None:
    """It says itself what its gradients are."""

    class ChangesOneOfTwo(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
            ctx.mark_dirty(x)
            return x.mul_(3)

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
            return grad * 3, grad

    def program(apply: MapFunction) -> Any:
        x, z = leaves(2)
        y, v = x * 2, z * 2
        return finish([*apply(ChangesOneOfTwo, (y, y), (v, v)), y], x, z)

    assert_same(program(natively), program(map_with_parallel_backward), tolerance=1e-12)
