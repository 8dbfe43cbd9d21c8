"""Gradients of many backwards at once, and of these: `is_grads_batched=True`, `vectorize=True`, as in a loop."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.functional import hessian, jacobian

from moe_autograd import MixtureOfExperts, TopKRouter, parallel_apply
from moe_autograd.autograd.batched import Batches
from tests.support.comparison import MapFunction, Raised, assert_same_program, one_after_another
from tests.support.readable import wait

PARTS = 1e-10  # sums of parts in another order
WAYS = [{}, {"max_concurrency": 1}, {"recompute": True}, {"defer_weight_grads": True}]


class Waits(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return wait(self.linear(x)).tanh()


class Features(Waits):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        features = super().forward(x)
        return features, features.exp() * features


def seeded(kind: type[nn.Module] = Waits) -> tuple[list[nn.Module], Tensor]:
    torch.manual_seed(0)
    return [kind() for _ in range(2)], torch.randn(3, dtype=torch.float64).requires_grad_()


def values(*found: Tensor | None) -> list[Tensor | None]:
    """Their strides are anybody's."""
    return [None if one is None else one.detach().contiguous() for one in found]


def weights_of(modules: list[nn.Module]) -> list[nn.Parameter]:
    return [weight for module in modules for weight in module.parameters()]


def penalty_on_a_jacobian(apply: MapFunction) -> Any:
    modules, x = seeded()
    y = sum(apply(modules, [(x,)] * 2))
    basis = torch.eye(3, dtype=torch.float64)
    (found,) = torch.autograd.grad(y, x, basis, is_grads_batched=True, create_graph=True)
    (found.square().sum() + y.sum()).backward()
    return values(found, x.grad, *[weight.grad for weight in weights_of(modules)])


def third_order(apply: MapFunction) -> Any:
    modules, x = seeded()
    y = sum(apply(modules, [(x,)] * 2))
    (grad,) = torch.autograd.grad(y.sin().sum(), x, create_graph=True)
    basis = torch.eye(3, dtype=torch.float64)
    wanted = [x, *weights_of(modules)]
    second = torch.autograd.grad(grad, wanted, basis, is_grads_batched=True, create_graph=True)
    third = torch.autograd.grad(sum(one.sin().sum() for one in second), wanted)
    return values(*second, *third)


def by_name(apply: MapFunction) -> Any:
    modules, x = seeded(Features)
    (features, results), (_, others) = apply(modules, [(x,)] * 2)
    basis = torch.eye(3, dtype=torch.float64)
    y = results * others
    wanted = [features, x]
    found = torch.autograd.grad(y, wanted, basis, is_grads_batched=True, create_graph=True)
    further = torch.autograd.grad(sum(one.sin().sum() for one in found), [*wanted, *weights_of(modules)])
    return values(*found, *further)


def some_of_many(apply: MapFunction) -> Any:
    """Of two results one gets many gradients, and the other a part of them that is the same for all."""
    modules, x = seeded()
    first, last = apply(modules, [(x,)] * 2)
    y = first * 2 + last.sum()
    (found,) = torch.autograd.grad(
        y, x, torch.eye(3, dtype=torch.float64), is_grads_batched=True, create_graph=True
    )
    return values(found, *torch.autograd.grad(found.sin().sum(), [x, *weights_of(modules)]))


def of_torch_functional(apply: MapFunction, compute: Callable[..., Any]) -> Any:
    modules, x = seeded()

    def function(x: Tensor) -> Tensor:
        y: Tensor = sum(apply(modules, [(x,)] * 2))
        return y.sin().sum() if compute is hessian else y

    found = compute(function, x, create_graph=True, vectorize=True)
    return values(found, *torch.autograd.grad(found.sin().sum(), [x, *weights_of(modules)]))


def one_within_the_other(apply: MapFunction) -> Any:
    """The inner batch has a level of its own."""
    modules, x = seeded()
    of = functools.partial(jacobian, create_graph=True, vectorize=True)
    found = of(lambda x: of(lambda x: sum(apply(modules, [(x,)] * 2)).sin(), x), x)
    return values(found, *torch.autograd.grad(found.sin().sum(), [x, *weights_of(modules)]))


PROGRAMS = [
    penalty_on_a_jacobian,
    third_order,
    by_name,
    some_of_many,
    functools.partial(of_torch_functional, compute=jacobian),
    functools.partial(of_torch_functional, compute=hessian),
    one_within_the_other,
]


@pytest.mark.parametrize("options", WAYS, ids=str)
@pytest.mark.parametrize("program", PROGRAMS, ids=range(len(PROGRAMS)))
def test_they_are_as_in_a_loop(program: Callable[..., Any], options: dict[str, Any]) -> None:
    mapped = functools.partial(parallel_apply, **options)
    if program is by_name and "recompute" in options:
        with pytest.raises(
            RuntimeError, match="expected a result that is asked for by name to lead to others"
        ):
            program(mapped)
        return
    said = assert_same_program(program, native_apply=one_after_another, mapped_apply=mapped, tolerance=PARTS)
    assert not isinstance(said, Raised), said


def test_a_layers_jacobian_has_gradients() -> None:
    torch.manual_seed(0)
    layer = MixtureOfExperts(TopKRouter(3, 2, 2), [Waits(), Waits()]).double()
    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    one_by_one, at_once = [
        jacobian(lambda x: layer(x)[0], x, create_graph=True, vectorize=vectorize)
        for vectorize in (False, True)
    ]
    torch.testing.assert_close(at_once, one_by_one)
    wanted = [x, *layer.experts.parameters()]
    expected = torch.autograd.grad(one_by_one.sin().sum(), wanted)
    torch.testing.assert_close(torch.autograd.grad(at_once.sin().sum(), wanted), expected)


@pytest.mark.parametrize("sizes", [{}, {1: 2}, {2: 1}, {1: 3, 2: 2}, {1: 1, 3: 3}])
def test_what_is_taken_apart_comes_together_again(sizes: dict[int, int]) -> None:
    many = torch.randn(*sizes.values(), 4)
    tensor = many
    for level in sizes:
        tensor = torch._add_batch_dim(tensor, 0, level)
    batches = Batches([None, tensor])
    assert batches.sizes == sizes
    _, apart = batches.apart([None, tensor])
    assert apart is not None
    assert torch.equal(apart, many)
    (together,) = batches.together([apart])
    assert together is not None
    assert Batches([together]).sizes == sizes
    (same,) = batches.apart([torch.ones(4)])
    assert same is not None
    assert same.shape == many.shape
