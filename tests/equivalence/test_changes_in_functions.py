"""What calls of an autograd function change in place while others take the same memory: such a map is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function

from moe_autograd import map_with_parallel_backward, parallel_apply
from tests.support.comparison import MapFunction, assert_same, assert_same_program, natively, tensors_in
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


def changes_a_view(returns: str) -> type[Function]:
    """Return a function that triples its argument in place, and says or returns something besides."""

    class Triples(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Any:
            ctx.mark_dirty(x.mul_(3))
            if returns == "no gradient":
                ctx.mark_non_differentiable(x)
            results = {"a tuple": (x,), "a number too": (3, x), "another too": (x, x + 1), "twice": (x, x)}
            return results.get(returns, x)

        @staticmethod
        def backward(ctx: Any, *grads: Tensor | None) -> Tensor | None:
            return next((3 * grad for grad in grads if isinstance(grad, Tensor)), None)

    return Triples


@pytest.mark.parametrize(
    "returns", ["itself", "a tuple", "no gradient", "a number too", "another too", "twice"]
)
@pytest.mark.parametrize("is_view", [True, False])
@pytest.mark.parametrize("is_apart", [True, False])
def test_a_view_that_a_function_changes_is_what_it_is_natively_or_refused_in_the_same_words(
    returns: str, is_view: bool, is_apart: bool
) -> None:
    def program(apply: MapFunction) -> Any:
        (x,) = leaves(1)
        pasts = [x * 2, MayChange.apply(x, None) if is_apart else x * 2]  # type: ignore[no-untyped-call]
        results = apply(changes_a_view(returns), *[(past[0] if is_view else past[0] * 1,) for past in pasts])
        found = [tensor for result in results for tensor in tensors_in(result)]
        return finish([*found, *pasts], x), [tensor.requires_grad for tensor in found]

    assert_same_program(program)


@pytest.mark.parametrize("in_module", [False, True])
@pytest.mark.parametrize("when", ["before", "after"])
def test_a_changed_tensor_retains_its_gradient_from_after_the_map_only(in_module: bool, when: str) -> None:
    """PyTorch, asked before, failed with "INTERNAL ASSERT FAILED": it looks among the results for the wrong one."""

    def program(apply: MapFunction) -> Any:
        (x,) = leaves(1)
        first, changed = x * 2, x * 3
        if when == "before":
            changed.retain_grad()
        results = apply(first, changed)
        changed.retain_grad()
        grads = finish([*results, changed], x)
        return grads, changed.grad

    def mapped(*tensors: Tensor) -> Any:
        if in_module:
            return parallel_apply([lambda t: t + 1, lambda t: t.mul_(4).sin()], [(t,) for t in tensors])
        return map_with_parallel_backward(MayChange, (tensors[0], None), (tensors[1], 4.0))

    def looped(*tensors: Tensor) -> Any:
        changed = tensors[1].mul_(4)
        return tensors[0] + 1, changed.sin() if in_module else changed

    if when == "before":
        with pytest.raises(RuntimeError, match="change no tensor in place that retains its gradient"):
            program(mapped)
    else:
        assert_same(program(looped), program(mapped))


class Forgets(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x.mul_(2))
        return x.clone()


def test_a_changed_tensor_that_is_no_result_is_refused_in_pytorchs_words() -> None:
    (x,) = leaves(1)
    inputs = [x * 2, x * 3]
    for tensor in inputs:
        tensor.retain_grad()
    with pytest.raises(RuntimeError, match="marked as dirty during the forward method were not returned"):
        map_with_parallel_backward(Forgets, *[(tensor,) for tensor in inputs])
