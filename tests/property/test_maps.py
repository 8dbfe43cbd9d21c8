"""Whatever is put together from maps gives the gradients of the same thing put together from plain calls.

Hypothesis draws small programs: stages of autograd functions or modules over a few tensors, some of them shared,
some constant, some results unused, with or without a bound; and which gradients are asked for, and how.

A missing gradient counts as zero here: where a loss leaves out some calls of a map, the functions that those calls
took their inputs from are still in its graph, and may turn "no gradient" into zeros (as behind any operation with
several inputs).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from moe_autograd import map_with_parallel_backward, parallel_apply
from tests.support.comparison import assert_same, natively, one_after_another
from tests.support.functions_context import (
    ChangesInPlace,
    HasSetupContext,
    KeepsAttributes,
    MaterializesGrads,
    SavesInput,
    SavesOutput,
)
from tests.support.functions_results import GivesNoGradient, ReturnsItsInput

FUNCTIONS = [SavesInput, SavesOutput, KeepsAttributes, HasSetupContext, MaterializesGrads, GivesNoGradient]
FUNCTIONS += [ReturnsItsInput, ChangesInPlace]


@dataclass(frozen=True)
class Stage:
    """One map: which function (or modules, where it is `None`), and which tensors its calls take."""

    func: Any
    taken: tuple[int, ...]
    bound: int | None
    recompute: bool


@dataclass(frozen=True)
class Plan:
    """A program: its stages, which leaves are constants, which results the loss uses, and how it is differentiated."""

    stages: tuple[Stage, ...]
    constants: tuple[bool, bool, bool]
    used: tuple[bool, ...]
    asked: tuple[bool, bool, bool]
    how: str


stages = st.builds(
    Stage,
    func=st.sampled_from([None, None, *FUNCTIONS]),
    taken=st.lists(st.integers(0, 9), min_size=1, max_size=4).map(tuple),
    bound=st.sampled_from([None, None, 1, 2]),
    recompute=st.booleans(),
)
plans = st.builds(
    Plan,
    stages=st.lists(stages, min_size=1, max_size=4).map(tuple),
    constants=st.tuples(st.booleans(), st.booleans(), st.just(False)),
    used=st.lists(st.booleans(), min_size=20, max_size=20).map(tuple),
    asked=st.tuples(st.booleans(), st.booleans(), st.just(True)),
    how=st.sampled_from(["backward", "grad", "twice", "second order"]),
)


def run(plan: Plan, map_functions: Any, map_modules: Any) -> Any:
    generator = torch.Generator().manual_seed(1)
    leaves = [torch.randn(3, generator=generator, dtype=torch.float64) for _ in range(3)]
    for leaf, is_constant in zip(leaves, plan.constants, strict=True):
        leaf.requires_grad_(not is_constant)
    weight = torch.randn(3, 3, generator=generator, dtype=torch.float64, requires_grad=True)
    layer = nn.Linear(3, 3).double()
    layer.load_state_dict({"weight": weight.detach() / 3, "bias": torch.ones(3)})
    modules: list[Any] = [layer, lambda x: (x @ weight).tanh(), torch.sin, lambda x: layer(x) * weight[0]]

    tensors: list[Tensor] = list(leaves)
    for stage in plan.stages:
        taken = [tensors[i % len(tensors)] for i in stage.taken]
        if stage.func is None:
            called = [modules[i % len(modules)] for i in stage.taken]
            options = {"max_concurrency": stage.bound, "recompute": stage.recompute}
            tensors += map_modules(called, [(x,) for x in taken], **options)
        else:
            if stage.func in (ChangesInPlace, ReturnsItsInput):
                taken = [x * 1 for x in taken]  # neither a leaf nor shared may be changed, nor its view
            results = map_functions(stage.func, *[(x,) for x in taken], max_concurrency=stage.bound)
            tensors += [result[0] if isinstance(result, tuple) else result for result in results]

    used = [x for x, is_used in zip(tensors, plan.used, strict=False) if is_used]
    loss = sum(((i + 1) * x.tanh()).sum() for i, x in enumerate([*used, leaves[2]]))
    assert isinstance(loss, Tensor)
    wanted = [x for x, is_asked in zip([*leaves, weight], [*plan.asked, True], strict=True) if is_asked]
    wanted = [x for x in [*wanted, layer.weight] if x.requires_grad]
    values = [x.detach().clone() for x in tensors], [x.requires_grad for x in tensors]
    if plan.how in ("backward", "twice"):
        if plan.how == "twice":
            loss.backward(retain_graph=True)
        loss.backward()
        tensors = [*leaves, weight, *layer.parameters()]
        return values, numbers([x.grad for x in tensors], tensors)
    grads = torch.autograd.grad(loss, wanted, allow_unused=True, create_graph=plan.how == "second order")
    if plan.how == "second order":
        penalty = sum((grad**2).sum() for grad in grads if grad is not None)
        if isinstance(penalty, Tensor) and penalty.requires_grad:
            second = torch.autograd.grad(penalty, wanted, allow_unused=True)
            return values, numbers(grads, wanted), numbers(second, wanted)
    return values, numbers(grads, wanted)


def numbers(grads: Sequence[Tensor | None], tensors: Sequence[Tensor]) -> list[Tensor]:
    """The gradients' numbers alone: whether one is a view is nobody's business."""
    pairs = zip(grads, tensors, strict=True)
    return [torch.zeros_like(x).detach() if grad is None else grad.detach().clone() for grad, x in pairs]


@given(plans)
@settings(max_examples=150, deadline=None)
def test_any_composition_of_maps_gives_the_values_and_gradients_of_plain_calls(plan: Plan) -> None:
    native = run(plan, natively, one_after_another)
    mapped = run(plan, map_with_parallel_backward, parallel_apply)
    assert_same(native, mapped, tolerance=1e-9)
