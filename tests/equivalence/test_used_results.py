"""Results of one call that were computed from each other: what a loop has of their gradients, the map has."""

from __future__ import annotations

import functools
import gc
import random
import weakref
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._dynamo import compiled_autograd

from moe_autograd import parallel_apply
from tests.support.comparing_modules import assert_same_modules_program
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
    torch._dynamo.reset()
    returned, wanted = results_of(apply, kind)
    with compiled_autograd._enable(lambda graph: graph):
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


def count_backwards_between(apply: MapFunction, watch: Callable[[list[Any]], None]) -> list[int]:
    """Return how often each call went backward between its results."""
    counts = [0, 0]

    def call(x: Tensor, index: int) -> tuple[Tensor, Tensor]:
        def count(_: Tensor) -> None:
            counts[index] += 1

        hidden = x.sin()
        between = hidden * 2
        between.register_hook(count)
        return hidden, between.cos()

    returned = apply([call, call], [(x, i) for i, x in enumerate(leaves(2))])
    watch(returned)
    torch.stack([last.sum() + first.sum() for first, last in returned]).sum().backward()
    return counts


def test_where_nobody_looks_a_call_goes_backward_once() -> None:
    assert count_backwards_between(parallel_apply, lambda _: None) == [1, 1]
    assert count_backwards_between(parallel_apply, lambda returned: returned[0][1].retain_grad()) == [1, 1]
    assert count_backwards_between(parallel_apply, lambda returned: returned[1][0].retain_grad()) == [1, 2]


def test_a_map_within_a_call_that_nobody_looks_at_goes_backward_once() -> None:
    """The inner backward asks for where the call ends, by name."""
    counts: list[int] = []

    def outer(x: Tensor) -> Tensor:
        def inner(y: Tensor) -> tuple[Tensor, Tensor]:
            hidden = y.sin()
            between = hidden * 2
            between.register_hook(lambda _: counts.append(1))
            return hidden, between.cos()

        (first, last), _ = parallel_apply([inner, torch.sin], [(x,), (x,)])
        return first + last

    torch.stack(parallel_apply([outer, torch.sin], [(x,) for x in leaves(2)])).sum().backward()
    assert len(counts) == 1


def test_a_second_backward_raises_as_in_a_loop() -> None:
    def program(apply: MapFunction) -> Any:
        returned, _ = results_of(apply, Classifier)
        loss_of(returned).backward()
        return torch.autograd.grad(returned[0][1].sum(), returned[0][0])

    said = assert_same_modules_program(program)
    assert isinstance(said, Raised)
    assert "second time" in said.text


def test_what_raises_between_results_is_named() -> None:
    def refuse(grad: Tensor) -> None:
        raise ValueError("refused")

    def call(x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = x.sin()
        between = hidden * 2
        between.register_hook(refuse)
        return hidden, between.cos()

    returned = parallel_apply([torch.sin, call], [(x,) for x in leaves(2)], names=["good", "guilty"])
    with pytest.raises(ValueError, match="refused") as caught:
        torch.autograd.grad(returned[1][1].sum(), returned[1][0])
    (note,) = caught.value.__notes__
    assert note.startswith("parallel_apply, backward: raised by guilty ")


def test_inputs_that_were_changed_since_are_refused_in_second_derivatives() -> None:
    x = leaves(1)[0] * 2
    ((hidden, last), _) = parallel_apply([lambda x: (y := x + 1, y.sin()), lambda x: x + 2], [(x,), (x,)])
    x.mul_(2)
    with pytest.raises(RuntimeError, match="Give the call a clone of it"):
        torch.autograd.grad(last.sum(), hidden, create_graph=True)


def test_graphs_are_freed_with_the_results() -> None:
    class Mark:
        """Lives as long as the graph of a call."""

    def call(x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = x.sin()
        hidden.grad_fn.metadata["mark"] = mark = Mark()  # type: ignore[union-attr]
        marks.append(weakref.ref(mark))
        return hidden, hidden.cos()

    marks: list[weakref.ref[Mark]] = []
    gc.collect()
    gc.disable()
    try:
        for watch in (lambda t: None, lambda t: t.retain_grad(), lambda t: t.register_hook(torch.sin)):
            returned = parallel_apply([call, call], [(x,) for x in leaves(2)])
            watch(returned[0][0])
            torch.stack([last.sum() for _, last in returned]).sum().backward()
            del returned
            assert [mark() for mark in marks] == [None] * len(marks)
            returned = parallel_apply([call, call], [(x,) for x in leaves(2)])
            watch(returned[0][0])
            del returned
            assert [mark() for mark in marks] == [None] * len(marks)
    finally:
        gc.enable()


def test_a_call_that_retains_what_it_returns_lets_its_caller_see_it() -> None:
    def call(x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = x.sin()
        hidden.retain_grad()
        return hidden, hidden.exp()

    def program(apply: MapFunction) -> Any:
        returned = apply([call, call], [(x,) for x in leaves(2)])
        loss_of(returned).backward()
        return [(hidden.retains_grad, hidden.grad, last.grad_fn is not None) for hidden, last in returned]

    assert assert_same_modules_program(program)[0][0]
