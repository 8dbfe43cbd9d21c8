"""Every function of the catalogue gives through the map exactly what it gives applied one call after another.

For each: results with their structure and flags, in every grad mode; gradients by `.backward()` and by
`torch.autograd.grad`, for all leaves and for each alone; twice over a retained graph; of the second order;
and in float64 against numerical differentiation.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function

from moe_autograd import map_with_parallel_backward, parallel_apply
from tests.support.catalogue import GivenLeaves
from tests.support.comparison import MapFunction, Raised, aliases, assert_same_program, loss_of, tensors_in
from tests.support.functions import CATALOGUE, Case, Leaves

NUM_CALLS = 3

every_case = pytest.mark.parametrize("case", CATALOGUE, ids=str)


def call_all(apply: MapFunction, case: Case, make: Leaves) -> tuple[tuple[Any, ...], list[tuple[Any, ...]]]:
    args_per_call = [case.args(make) for _ in range(NUM_CALLS)]
    return apply(case.func, *args_per_call), args_per_call


def test_the_catalogue_names_each_case_once() -> None:
    names = [str(case) for case in CATALOGUE]
    assert len(names) > 50
    assert len(set(names)) == len(names)


@every_case
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_results_have_the_same_values_structure_flags_and_aliases(
    case: Case, mode: Callable[[], AbstractContextManager[None]]
) -> None:
    def program(apply: MapFunction) -> Any:
        make = Leaves()
        args_per_call = [case.args(make) for _ in range(NUM_CALLS)]
        versions = [tensor._version for tensor in tensors_in(args_per_call)]
        with mode():
            results = apply(case.func, *args_per_call)
        changed = [
            tensor._version > version
            for tensor, version in zip(tensors_in(args_per_call), versions, strict=True)
        ]
        return results, args_per_call, changed, aliases(results, args_per_call)

    assert_same_program(program)


@every_case
def test_backward_fills_the_same_gradients(case: Case) -> None:
    def program(apply: MapFunction) -> Any:
        make = Leaves()
        results, _ = call_all(apply, case, make)
        loss = loss_of(results)
        if loss.requires_grad:
            loss.backward()
        return loss, [leaf.grad for leaf in make.made]

    assert_same_program(program)


@every_case
def test_the_gradient_of_each_leaf_alone_is_the_same(case: Case) -> None:
    def program(apply: MapFunction) -> Any:
        gradients: list[Any] = []
        make = Leaves()
        call_all(apply, case, make)
        for i, leaf in enumerate(make.made):
            if leaf.requires_grad:
                again = Leaves()
                loss = loss_of(call_all(apply, case, again)[0])
                if loss.requires_grad:
                    gradients += torch.autograd.grad(loss, again.made[i], allow_unused=True)
        return gradients

    assert_same_program(program)


@every_case
def test_a_loss_over_one_call_leaves_the_other_calls_alone(case: Case) -> None:
    def program(apply: MapFunction) -> Any:
        make = Leaves()
        results, _ = call_all(apply, case, make)
        loss = loss_of(results[1])
        if loss.requires_grad:
            loss.backward()
        return [leaf.grad for leaf in make.made]

    assert_same_program(program)


@every_case
def test_a_loss_over_one_result_of_each_call_gives_the_same_gradients(case: Case) -> None:
    def program(apply: MapFunction) -> Any:
        make = Leaves()
        results, _ = call_all(apply, case, make)
        loss = loss_of([next(tensors_in(result), None) for result in results])
        if loss.requires_grad:
            loss.backward()
        return [leaf.grad for leaf in make.made]

    assert_same_program(program)


@every_case
def test_a_retained_graph_gives_the_same_gradients_again(case: Case) -> None:
    def program(apply: MapFunction) -> Any:
        make = Leaves()
        loss = loss_of(call_all(apply, case, make)[0])
        if loss.requires_grad:
            loss.backward(retain_graph=True)
            loss.backward(retain_graph=True)
            loss.backward()
        return [leaf.grad for leaf in make.made]

    assert_same_program(program)


@every_case
@pytest.mark.parametrize("power", [1, 2])
def test_the_second_order_is_the_same(case: Case, power: int) -> None:
    """Be PyTorch's own answer right, wrong (an intermediate was saved) or an error (once_differentiable)."""

    def program(apply: MapFunction) -> Any:
        make = Leaves()
        results, _ = call_all(apply, case, make)
        loss = loss_of([tensor**power for tensor in tensors_in(results) if tensor.requires_grad])
        leaves = [leaf for leaf in make.made if leaf.requires_grad]
        if not loss.requires_grad:
            return None
        first = torch.autograd.grad(loss, leaves, create_graph=True, allow_unused=True)
        penalty = loss_of(
            [grad * grad for grad in first if grad is not None and grad.layout is torch.strided]
        )
        if not penalty.requires_grad:
            return first, None
        penalty.backward()  # not `grad`: PyTorch's refusal sits on a path that leads to no leaf
        return first, [leaf.grad for leaf in leaves]

    said = assert_same_program(program, tolerance=1e-12)  # terms may be added up in another order
    assert isinstance(said, Raised) == (not case.twice)


def numerically(case: Case) -> tuple[Callable[..., tuple[Tensor, ...]], tuple[Tensor, ...]]:
    """The case's differentiable results over the map, as a function of all its leaves."""
    make = Leaves()
    for _ in range(NUM_CALLS):
        case.args(make)

    def compute(*leaves: Tensor) -> tuple[Tensor, ...]:
        results, _ = call_all(map_with_parallel_backward, case, GivenLeaves(leaves))
        return tuple(tensor for tensor in tensors_in(results) if tensor.requires_grad)

    return compute, tuple(leaf for leaf in make.made if leaf.requires_grad)


@pytest.mark.parametrize("case", [case for case in CATALOGUE if case.checked], ids=str)
def test_gradients_agree_with_numerical_differentiation(case: Case) -> None:
    compute, leaves = numerically(case)
    assert torch.autograd.gradcheck(compute, leaves)


@pytest.mark.parametrize("case", [case for case in CATALOGUE if case.checked_twice], ids=str)
def test_second_derivatives_agree_with_numerical_differentiation(case: Case) -> None:
    compute, leaves = numerically(case)
    assert torch.autograd.gradgradcheck(compute, leaves)


class Square(Function):
    """Its gradient depends on its input, so a second derivative has two parts."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * ctx.saved_tensors[0] * grad


@pytest.mark.parametrize("is_module", [False, True])
def test_the_second_derivative_of_a_fourth_power_is_twelve_and_not_six(is_module: bool) -> None:
    """Half of it is missing where a backward forgets that what it has saved depends on the input."""
    xs = [torch.ones((), requires_grad=True) for _ in range(NUM_CALLS)]
    calls = [(x,) for x in xs]
    if is_module:
        squares = tuple(parallel_apply([Square.apply] * NUM_CALLS, calls))
    else:
        squares = map_with_parallel_backward(Square, *calls)
    first = torch.autograd.grad(torch.stack(squares).square().sum(), xs, create_graph=True)
    assert [grad.item() for grad in first] == [4.0] * NUM_CALLS
    second = torch.autograd.grad(torch.stack(first).sum(), xs, create_graph=True)
    assert [grad.item() for grad in second] == [12.0] * NUM_CALLS
    assert [grad.item() for grad in torch.autograd.grad(torch.stack(second).sum(), xs)] == [24.0] * NUM_CALLS
