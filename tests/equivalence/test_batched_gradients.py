"""Gradients of many backwards at once, and of these, as in a loop.

Made by `is_grads_batched=True`, by `vectorize=True`, and by `torch.vmap` around a backward.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.functional import hessian, jacobian
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from moe_autograd import MixtureOfExperts, TopKRouter, parallel_apply
from moe_autograd.autograd.joining.batched import Batches
from moe_autograd.errors import UnsupportedTransformError
from tests.support.comparison import MapFunction, Raised, assert_same_program, one_after_another
from tests.support.functions_waiting import PATIENCE_S
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


Gradients = Callable[..., Any]


def at_once(y: Any, wanted: Any, basis: Tensor) -> Any:
    return torch.autograd.grad(y, wanted, basis, is_grads_batched=True, create_graph=True)


def by_vmap(y: Any, wanted: Any, basis: Tensor) -> Any:
    def of_one(grad: Tensor) -> Any:
        return torch.autograd.grad(y, wanted, grad, retain_graph=True, create_graph=True)

    return torch.vmap(of_one)(basis)


def penalty_on_a_jacobian(apply: MapFunction, gradients: Gradients) -> Any:
    modules, x = seeded()
    y = sum(apply(modules, [(x,)] * 2))
    (found,) = gradients(y, x, torch.eye(3, dtype=torch.float64))
    (found.square().sum() + y.sum()).backward()
    return values(found, x.grad, *[weight.grad for weight in weights_of(modules)])


def third_order(apply: MapFunction, gradients: Gradients) -> Any:
    modules, x = seeded()
    y = sum(apply(modules, [(x,)] * 2))
    (grad,) = torch.autograd.grad(y.sin().sum(), x, create_graph=True)
    wanted = [x, *weights_of(modules)]
    second = gradients(grad, wanted, torch.eye(3, dtype=torch.float64))
    third = torch.autograd.grad(sum(one.sin().sum() for one in second), wanted)
    return values(*second, *third)


def by_name(apply: MapFunction, gradients: Gradients) -> Any:
    modules, x = seeded(Features)
    (features, results), (_, others) = apply(modules, [(x,)] * 2)
    found = gradients(results * others, wanted := [features, x], torch.eye(3, dtype=torch.float64))
    further = torch.autograd.grad(sum(one.sin().sum() for one in found), [*wanted, *weights_of(modules)])
    return values(*found, *further)


def some_of_many(apply: MapFunction, gradients: Gradients) -> Any:
    """Of two results one gets many gradients, and the other a part of them that is the same for all."""
    modules, x = seeded()
    first, last = apply(modules, [(x,)] * 2)
    y = first * 2 + last.sum()
    (found,) = gradients(y, x, torch.eye(3, dtype=torch.float64))
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


def one_vmap_within_the_other(apply: MapFunction) -> Any:
    """The gradients of the outer one are the weights of the inner."""
    modules, x = seeded()
    y, z = apply(modules, [(x,)] * 2)

    def of_row(row: Tensor) -> Any:
        (many,) = by_vmap(y, [x], torch.eye(3, dtype=torch.float64) * row)
        (one,) = torch.autograd.grad(z, x, row, retain_graph=True, create_graph=True)
        return many.sin() + one

    found = torch.vmap(of_row, in_dims=1, out_dims=2)(torch.arange(6.0).view(3, 2).double())
    return values(found, *torch.autograd.grad(found.sin().sum(), [x, *weights_of(modules)]))


def hooks_that_bring_in_many(apply: MapFunction) -> Any:
    """Nothing of the gradients that the backward begins with is of many."""
    factors: list[Tensor] = []

    class Scales(Waits):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            y.register_hook(lambda grad: grad * factors[-1] if factors else grad)
            return y.exp()

    modules, x = seeded(Scales)
    y = sum(apply(modules, [(x,)] * 2))

    def of_one(factor: Tensor) -> Any:
        factors.append(factor)
        (found,) = torch.autograd.grad(y, x, torch.ones_like(y), retain_graph=True, create_graph=True)
        factors.clear()
        return found

    found = torch.vmap(of_one)(torch.arange(6.0, dtype=torch.float64).view(2, 3))
    return values(found, *torch.autograd.grad(found.sin().sum(), [x, *weights_of(modules)]))


PROGRAMS = [
    *[
        functools.partial(program, gradients=gradients)
        for program in (penalty_on_a_jacobian, third_order, by_name, some_of_many)
        for gradients in (at_once, by_vmap)
    ],
    one_vmap_within_the_other,
    hooks_that_bring_in_many,
    functools.partial(of_torch_functional, compute=jacobian),
    functools.partial(of_torch_functional, compute=hessian),
    one_within_the_other,
]


@pytest.mark.parametrize("options", WAYS, ids=str)
@pytest.mark.parametrize("program", PROGRAMS, ids=range(len(PROGRAMS)))
def test_they_are_as_in_a_loop(program: Callable[..., Any], options: dict[str, Any]) -> None:
    mapped = functools.partial(parallel_apply, **options)
    refusal = _refusal(program, options)
    if refusal is not None:
        with pytest.raises(RuntimeError, match=refusal):
            program(mapped)
        return
    said = assert_same_program(program, native_apply=one_after_another, mapped_apply=mapped, tolerance=PARTS)
    assert not isinstance(said, Raised), said


def _refusal(program: Any, options: dict[str, Any]) -> str | None:
    if "recompute" not in options:
        return None
    own = getattr(program, "keywords", {})
    if getattr(program, "func", None) is by_name:
        return "expected a result that is asked for by name to lead to others"
    if program in (one_vmap_within_the_other, hooks_that_bring_in_many) or own.get("gradients") is by_vmap:
        return "Recomputed values for the following tensors have different metadata"  # PyTorch's own
    return None


def test_pytorchs_checkpoint_refuses_to_run_again_under_vmap_as_well() -> None:
    def checkpointed(modules: Any, inputs: Any) -> Any:
        return [
            checkpoint(module, *x, use_reentrant=False) for module, x in zip(modules, inputs, strict=True)
        ]

    with pytest.raises(RuntimeError, match="have different metadata"):
        penalty_on_a_jacobian(checkpointed, by_vmap)


@pytest.mark.parametrize("is_leaf", [True, False])
@pytest.mark.parametrize(
    "saving",
    [save_on_cpu, lambda: saved_tensors_hooks(Tensor.clone, lambda t: t)],
    ids=["on the CPU", "as clones"],
)
def test_a_forward_runs_again_under_vmap_what_was_saved_by_hooks(saving: Any, is_leaf: bool) -> None:
    def checkpointed(modules: Any, inputs: Any) -> Any:
        return [checkpoint(m, *x, use_reentrant=False) for m, x in zip(modules, inputs, strict=True)]

    def program(apply: MapFunction) -> Any:
        modules, x = seeded()
        rows = x.detach().view(1, 3).requires_grad_()
        taken = rows if is_leaf else rows.sin()
        with saving():
            y = sum(apply(modules, [(taken,)] * 2))
        wanted = [rows, *weights_of(modules)]
        of_one = functools.partial(torch.autograd.grad, y, wanted, retain_graph=True)
        basis = torch.eye(3, dtype=torch.float64).view(3, 1, 3)
        return values(*torch.vmap(lambda factor: torch.vmap(lambda one: of_one(one * factor))(basis))(basis))

    mapped = functools.partial(parallel_apply, recompute=True)
    said = assert_same_program(program, native_apply=checkpointed, mapped_apply=mapped, tolerance=PARTS)
    assert not isinstance(said, Raised), said


@pytest.mark.parametrize("create_graph", [False, True])
def test_backwards_under_vmap_wait_for_each_other(create_graph: bool) -> None:
    """So they are on threads, each of which is in the transform."""
    barrier = threading.Barrier(2)

    class Meets(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            """Keep nothing."""

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            barrier.wait(PATIENCE_S)
            return grad.clone()

    x = torch.ones(3, dtype=torch.float64, requires_grad=True)
    y = sum(parallel_apply([lambda x: Meets.apply(x).exp()] * 2, [x] * 2))
    found = torch.vmap(
        lambda grad: torch.autograd.grad(y, x, grad, retain_graph=True, create_graph=create_graph)[0]
    )(torch.eye(3, dtype=torch.float64))
    torch.testing.assert_close(found, torch.diag(2 * x.exp()))


@pytest.mark.parametrize("transform", [torch.func.grad, lambda f: torch.vmap(torch.func.grad(f))])
def test_other_transforms_are_refused_by_name(transform: Any) -> None:
    modules, x = seeded()
    y = sum(parallel_apply(modules, [(x,)] * 2))

    def of_one(grad: Tensor) -> Any:
        return torch.autograd.grad(y, x, grad, retain_graph=True, create_graph=True)[0].sum()

    with pytest.raises(UnsupportedTransformError, match="got another transform"):
        transform(of_one)(torch.ones((2, 3)[transform is torch.func.grad :], dtype=torch.float64))


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
