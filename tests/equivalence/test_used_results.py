"""Results of one call that were computed from each other: what a loop has of their gradients, the map has."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._dynamo import compiled_autograd

from moe_autograd import parallel_apply
from tests.support.comparison import MapFunction, Raised, assert_same_program, one_after_another
from tests.support.computed_from_each_other import Plan, run
from tests.support.module_programs import leaves, parameters, seeded

PARTS = 1e-10  # sums of parts in another order


class Classifier(nn.Module):
    """Returns features and classes."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = self.body(x).tanh()
        return features, self.head(features)


class Stack(nn.Module):
    """Returns the states after each of its layers, the last one first."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> list[Tensor]:
        states = [x]
        for layer in self.layers:
            states.append(layer(states[-1]).sin() + states[-1])
        return states[:0:-1]


class Cell(nn.Module):
    """Returns both states, as torch's own cell does: one is computed from the other."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.cell(x)


class Within(nn.Module):
    """Its results are those of a map within, and what it computes from both."""

    apply_to_all: Any

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(Classifier() for _ in range(2))

    def forward(self, x: Tensor) -> Any:
        (features, classes), (others, more) = self.apply_to_all([*self.parts], [(x,), (x * 2,)])
        return features, classes * more, (features * others).sum()


KINDS = [Classifier, Stack, Cell, Within]


def results_of(apply: MapFunction, kind: type[nn.Module]) -> tuple[list[Any], list[Tensor]]:
    """Return what each call returned, and all leaves."""
    modules, xs = seeded(kind), leaves()
    for module in modules:
        module.apply_to_all = apply
    return apply(modules, [(x * 2,) for x in xs]), [*xs, *parameters(modules)]


def detached(grads: Iterable[Tensor | None]) -> list[Tensor | None]:
    return [None if grad is None else grad.detach() for grad in grads]


def loss_of(returned: list[Any]) -> Tensor:
    return torch.stack([t.sin().sum() * i for own in returned for i, t in enumerate(own, 1)]).sum()


def asked_for(apply: MapFunction, kind: type[nn.Module]) -> Any:
    returned, wanted = results_of(apply, kind)
    return torch.autograd.grad(loss_of(returned), [*[t for own in returned for t in own], *wanted])


def asked_for_without_inputs(apply: MapFunction, kind: type[nn.Module]) -> Any:
    returned, _ = results_of(apply, kind)
    every = [t for own in returned for t in own]
    return torch.autograd.grad([own[1].sum() for own in returned], every, allow_unused=True)


def asked_for_one(apply: MapFunction, kind: type[nn.Module]) -> Any:
    returned, wanted = results_of(apply, kind)
    return torch.autograd.grad(returned[1][1].exp().sum(), [returned[1][0], *wanted], allow_unused=True)


def accumulated_in_results(apply: MapFunction, kind: type[nn.Module]) -> Any:
    returned, wanted = results_of(apply, kind)
    loss_of(returned).backward(inputs=[own[0] for own in returned])
    return [own[0].grad for own in returned], [t.grad for t in wanted]


def hooks_that_clip(apply: MapFunction, kind: type[nn.Module]) -> Any:
    returned, wanted = results_of(apply, kind)
    seen: list[Tensor] = []
    for own in returned:
        for t in own:
            t.register_hook(lambda grad: (seen.append(grad.clone()), grad.clamp(-0.5, 0.5))[1])
    loss_of(returned).backward()
    return sorted(seen, key=lambda grad: (grad.dim(), grad.sum().item())), [t.grad for t in wanted]


def hooks_on_several(apply: MapFunction, kind: type[nn.Module]) -> Any:
    returned, wanted = results_of(apply, kind)
    seen: list[Any] = []
    for own in returned:
        torch.autograd.graph.register_multi_grad_hook(own, seen.append)
    loss_of(returned).backward()
    return sorted(seen, key=lambda grads: grads[0].sum().item()), [t.grad for t in wanted]


def retained(apply: MapFunction, kind: type[nn.Module]) -> Any:
    returned, wanted = results_of(apply, kind)
    for own in returned:
        own[0].retain_grad()
    loss_of(returned).backward(retain_graph=True)
    first = [own[0].grad.clone() for own in returned]
    loss_of(returned).backward()
    return first, [own[0].grad for own in returned], [t.grad for t in wanted]


def penalty_on_gradients(apply: MapFunction, kind: type[nn.Module]) -> Any:
    returned, wanted = results_of(apply, kind)
    grads = torch.autograd.grad(loss_of(returned), [own[0] for own in returned], create_graph=True)
    (loss_of(returned) + torch.stack([grad.square().sum() for grad in grads]).sum()).backward()
    return detached(grads), [t.grad for t in wanted]


def penalty_on_all_gradients(apply: MapFunction, kind: type[nn.Module]) -> Any:
    returned, wanted = results_of(apply, kind)
    every = [*[t for own in returned for t in own], *wanted]
    grads = torch.autograd.grad(loss_of(returned), every, create_graph=True)
    torch.stack([grad.sin().sum() for grad in grads]).sum().backward()
    return detached(grads), [t.grad for t in wanted]


def third_order(apply: MapFunction, kind: type[nn.Module]) -> Any:
    returned, wanted = results_of(apply, kind)
    features = returned[0][0]
    (grad,) = torch.autograd.grad(loss_of(returned), features, create_graph=True)
    second = torch.autograd.grad(grad.sin().sum(), [features, *wanted], create_graph=True, allow_unused=True)
    parts = [one.sin().sum() for one in second if one is not None and one.requires_grad]
    third = torch.autograd.grad(torch.stack(parts).sum(), wanted, allow_unused=True)
    return detached([grad, *second, *third])


def one_result_after_the_other(apply: MapFunction, kind: type[nn.Module]) -> Any:
    returned, wanted = results_of(apply, kind)
    for own in returned:
        own[0].retain_grad()
        own[1].sum().backward(retain_graph=True)
        own[0].sum().backward(retain_graph=True)
    return [own[0].grad for own in returned], [t.grad for t in wanted]


def compiled(apply: MapFunction, kind: type[nn.Module]) -> Any:
    """The loop's own backward is not compiled."""
    torch._dynamo.reset()
    returned, wanted = results_of(apply, kind)
    with nullcontext() if apply is one_after_another else compiled_autograd._enable(lambda graph: graph):
        loss_of(returned).backward()
    return [t.grad for t in wanted]


def changed_afterwards(apply: MapFunction, kind: type[nn.Module]) -> Any:
    returned, wanted = results_of(apply, kind)
    if kind is not Classifier:
        return ()
    for _, classes in returned:
        classes.mul_(2)
    return torch.autograd.grad(loss_of(returned), [*[own[0] for own in returned], *wanted])


PROGRAMS = [
    asked_for,
    asked_for_without_inputs,
    asked_for_one,
    accumulated_in_results,
    hooks_that_clip,
    hooks_on_several,
    retained,
    penalty_on_gradients,
    penalty_on_all_gradients,
    third_order,
    one_result_after_the_other,
    pytest.param(compiled, marks=pytest.mark.filterwarnings("ignore")),  # torch's compiler warns of itself
    changed_afterwards,
]


@pytest.mark.parametrize("options", [{}, {"max_concurrency": 1}, {"defer_weight_grads": True}], ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_it_is_as_in_a_loop(
    program: Callable[..., Any], kind: type[nn.Module], options: dict[str, Any]
) -> None:
    mapped = functools.partial(parallel_apply, **options)
    said = assert_same_program(
        functools.partial(program, kind=kind),
        native_apply=one_after_another,
        mapped_apply=mapped,
        tolerance=PARTS,
    )
    assert not isinstance(said, Raised), said


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 1 << 32), st.sampled_from([{}, {"max_concurrency": 1}, {"defer_weight_grads": True}]))
def test_random_programs_are_as_in_a_loop(seed: int, options: dict[str, Any]) -> None:
    plan = Plan.at_random(random.Random(seed))
    mapped = functools.partial(parallel_apply, **options)
    assert_same_program(
        functools.partial(run, plan), native_apply=one_after_another, mapped_apply=mapped, tolerance=PARTS
    )
