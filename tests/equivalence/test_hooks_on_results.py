"""Hooks and `retain_grad` on results of a map: they see what comes from outside of the call and from within it.

And hooks on results of one node, be it of calls or of an expert elsewhere, that no gradient comes to.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.hooks import unserializable_hook

from moe_autograd import map_with_parallel_backward, parallel_apply
from tests.support.comparing_modules import assert_same_modules_program
from tests.support.comparison import (
    MapFunction,
    Raised,
    assert_same_program,
    one_after_another,
    tensors_in,
)
from tests.support.functions_context import SavesInput
from tests.support.module_programs import leaves, parameters, seeded
from tests.support.several_results import Heads, Where, both, expert_of, results_of

SUMS = 1e-10  # parts of a gradient are told apart by a difference
ENOUGH_TO_OVERFLOW = 400  # backwards, were each to wrap a hook once more


class Saves(nn.Linear):
    """Its last operator saves its result."""

    def forward(self, x: Tensor) -> Any:
        return super().forward(x).tanh()


class AddsALoss(Saves):
    """Its second result is computed from its first."""

    def forward(self, x: Tensor) -> Any:
        hidden = super().forward(x)
        return hidden, hidden.square().sum()


class Splits(Saves):
    """Its results are outputs of one node, and one computed from them."""

    def forward(self, x: Tensor) -> Any:
        one, two = super().forward(x).split([1, 3], 1)
        return two, (one * two).sum(), one


class HoldsAMap(nn.Module):
    """Its first result is one of a map within, where another was computed from it."""

    def __init__(self, num_inputs: int, num_outputs: int) -> None:
        super().__init__()
        self.parts = nn.ModuleList(AddsALoss(num_inputs, num_outputs) for _ in range(2))

    def forward(self, x: Tensor) -> Any:
        returned = self.apply_to_all([*self.parts], [(x,), (x * 2,)])
        return returned[0][0], sum(loss for _, loss in returned)

    apply_to_all: Any


class ChangesInPlace(Saves):
    """Its first result is its input, changed."""

    def forward(self, x: Tensor) -> Any:
        return x.mul_(2), super().forward(x)


def log_hook(result: Tensor, log: list[Tensor]) -> None:
    result.register_hook(lambda grad: log.append(grad.detach().clone()))


def scale_hook(result: Tensor, log: list[Tensor]) -> None:
    result.register_hook(lambda grad: -grad).remove()
    result.register_hook(lambda grad: grad * 0.5)
    result.register_hook(lambda grad: grad * 3)


def retain(result: Tensor, log: list[Tensor]) -> None:
    result.retain_grad()


def retain_what_is_scaled(result: Tensor, log: list[Tensor]) -> None:
    scale_hook(result, log)
    result.retain_grad()


def once(loss: Tensor, wanted: list[Tensor]) -> None:
    loss.backward()


def twice(loss: Tensor, wanted: list[Tensor]) -> None:
    loss.backward(retain_graph=True)
    loss.backward()


def second_order(loss: Tensor, wanted: list[Tensor]) -> None:
    grads = torch.autograd.grad(loss, wanted, create_graph=True, allow_unused=True)
    torch.stack([grad.sin().sum() for grad in grads if grad is not None]).sum().backward()


def check(
    kind: Callable[[int, int], nn.Module],
    used: slice,
    watch: Callable[[Tensor, list[Tensor]], None],
    differentiate: Callable[[Tensor, list[Tensor]], None],
    options: dict[str, Any],
) -> None:
    def program(apply: MapFunction) -> Any:
        modules, xs = seeded(lambda: kind(4, 4)), leaves()
        for module in modules:
            module.apply_to_all = apply
        returned = [[*tensors_in(own)] for own in apply(modules, [(x * 2,) for x in xs])]
        logs: list[list[Tensor]] = [[] for _ in xs]
        for (first, *_), log in zip(returned, logs, strict=True):
            watch(first, log)
        wanted = [*xs, *parameters(modules)]
        parts = [result.sin().sum() for own in returned for result in own[used] or own]
        differentiate(torch.stack([part * i for i, part in enumerate(parts, 1)]).sum(), wanted)
        kept = [first.grad for first, *_ in returned if first.retains_grad]
        # A hook may see the parts of a gradient.
        return [t.grad for t in wanted], [None if t is None else t.detach() for t in kept], [*map(_sum, logs)]

    mapped = functools.partial(parallel_apply, **options)
    said = assert_same_program(program, native_apply=one_after_another, mapped_apply=mapped, tolerance=SUMS)
    assert not isinstance(said, Raised)


def _sum(log: list[Tensor]) -> Tensor | None:
    return torch.stack(log).sum(0) if log else None


WATCHES = [log_hook, scale_hook, retain, retain_what_is_scaled]
USED = {"first": slice(1), "second": slice(1, 2), "all": slice(3)}


@pytest.mark.parametrize("options", [{}, {"recompute": True}, {"defer_weight_grads": True}], ids=str)
@pytest.mark.parametrize("differentiate", [once, twice, second_order])
@pytest.mark.parametrize("watch", WATCHES)
@pytest.mark.parametrize("used", USED)
@pytest.mark.parametrize("kind", [Saves, AddsALoss, Splits, HoldsAMap])
def test_gradients_of_a_results_hooks_are_those_of_a_loop(
    kind: Any, used: str, watch: Any, differentiate: Any, options: dict[str, Any]
) -> None:
    check(kind, USED[used], watch, differentiate, options)


@pytest.mark.parametrize("differentiate", [once, twice, second_order])
@pytest.mark.parametrize("watch", WATCHES)
@pytest.mark.parametrize("used", USED)
def test_gradients_of_hooks_on_a_changed_input_are_those_of_a_loop(
    used: str, watch: Any, differentiate: Any
) -> None:
    check(ChangesInPlace, USED[used], watch, differentiate, {})


class HooksItsResult(AddsALoss):
    def forward(self, x: Tensor) -> Any:
        returned = super().forward(x)
        returned[0].register_hook(lambda grad: grad * 1.5)
        return returned


class HooksItsNode(AddsALoss):
    def forward(self, x: Tensor) -> Any:
        returned = super().forward(x)
        returned[0].grad_fn.register_prehook(lambda grads: (grads[0] * 1.5,))
        return returned


@pytest.mark.parametrize("differentiate", [once, twice, second_order])
@pytest.mark.parametrize("kind", [HooksItsResult, HooksItsNode])
@pytest.mark.parametrize("watch", [scale_hook, retain, retain_what_is_scaled])
@pytest.mark.parametrize("used", USED)
def test_gradients_that_hooks_within_a_call_have_changed_are_not_changed_twice(
    kind: Any, used: str, watch: Any, differentiate: Any
) -> None:
    """A hook on a result took the change for what comes from within, and changed it once more."""
    check(kind, USED[used], watch, differentiate, {})


def test_a_hook_sees_once_and_whole_what_comes_to_its_result_through_other_results_alone() -> None:
    """As for maps of what a classifier looks at: it returns features and classes, and the loss is of the latter."""

    def program(apply: MapFunction) -> Any:
        modules, xs, log = seeded(lambda: AddsALoss(4, 4)), leaves(), dict[int, list[Tensor]]()
        returned = apply(modules, [(x,) for x in xs])
        for i, (hidden, _) in enumerate(returned):
            hidden.register_hook(lambda grad, i=i: log.setdefault(i, []).append(grad))
        torch.stack([loss for _, loss in returned]).sum().backward()
        return sorted(log), [log[i] for i in sorted(log)]

    assert len(assert_same_modules_program(program)[0]) == 4


@pytest.mark.parametrize("mode", ["all", "any"])
def test_a_hook_on_several_results_of_a_call_runs_once(mode: Any) -> None:
    def program(apply: MapFunction) -> Any:
        modules, xs, log = seeded(lambda: AddsALoss(4, 4)), leaves(), list[Any]()
        returned = apply(modules, [(x,) for x in xs])
        for results in returned:
            torch.autograd.graph.register_multi_grad_hook(results, lambda _: log.append(True), mode=mode)
        torch.stack([loss for _, loss in returned]).sum().backward()
        return log

    assert len(assert_same_modules_program(program)) == 4


def test_hooks_on_inputs_that_other_calls_returned_count_in_second_derivatives() -> None:
    def program(apply: MapFunction) -> Any:
        modules, xs = seeded(lambda: Saves(4, 4)), leaves()

        def call(x: Tensor) -> Tensor:
            x.register_hook(lambda grad: grad * 3)
            return x.sin()

        hidden = apply(modules, [(x,) for x in xs])
        wanted = [*xs, *parameters(modules)]
        second_order(torch.stack(apply([call] * len(xs), [(h,) for h in hidden])).sum(), wanted)
        return [tensor.grad for tensor in wanted]

    assert not isinstance(assert_same_modules_program(program), Raised)


def test_a_hook_on_a_result_that_another_map_takes_outlasts_any_number_of_backwards() -> None:
    """Each backward wrapped it once more, until Python's stack was full."""

    def program(apply: MapFunction) -> Any:
        (x,), log = leaves(1), list[float]()
        hidden = apply([torch.sin, torch.cos], [(x,), (x,)])
        hidden[0].register_hook(lambda grad: log.append(grad.sum().item()))
        loss = torch.stack(apply([torch.sin, torch.cos], [(h,) for h in hidden])).sum()
        for _ in range(ENOUGH_TO_OVERFLOW):
            loss.backward(retain_graph=True)
        return log, x.grad

    assert len(assert_same_modules_program(program)[0]) == ENOUGH_TO_OVERFLOW


def test_a_hook_on_an_input_that_a_nested_map_takes_is_registered_once() -> None:
    """Each backward registered two more hooks on the caller's tensor."""

    def program(apply: MapFunction) -> Any:
        def call(x: Tensor) -> Tensor:
            x.register_hook(lambda grad: grad * 2)
            return torch.stack(apply([torch.sin, torch.cos], [(x,), (x,)])).sum(0)

        xs = leaves(2)
        loss = torch.stack(apply([call, torch.sin], [(x,) for x in xs])).sum()
        for _ in range(3):
            loss.backward(retain_graph=True)
        return len(xs[0]._backward_hooks or ()), [x.grad for x in xs]

    assert assert_same_modules_program(program)[0] == 1


@pytest.mark.parametrize(
    "where", ["offloaded", "in micro-batches", "computed again", "remote", "remote, computed again"]
)
def test_a_hook_on_a_result_of_an_expert_elsewhere_is_not_called_without_a_gradient(where: Where) -> None:
    module, plain = both(Heads)
    with expert_of(module, where) as expert:
        grads = []
        for each in (expert, plain):
            x, (one, other) = results_of(each, where if each is expert else "offloaded")
            other.register_hook(lambda grad: grad * 2)
            one.sum().backward(retain_graph=True)
            (one + other).sum().backward()
            grads.append(x.grad)
        torch.testing.assert_close(*grads)


@pytest.mark.parametrize("where", ["offloaded", "remote"])
@pytest.mark.parametrize("mode", ["all", "any"])
def test_a_hook_on_several_results_of_an_expert_elsewhere_runs_once(where: Where, mode: Any) -> None:
    with expert_of(both(Heads)[0], where) as expert:
        _, results = results_of(expert)
        log: list[Any] = []
        torch.autograd.graph.register_multi_grad_hook(results, log.append, mode=mode)
        results[1].sum().backward()
        assert len(log) == 1


def test_a_hook_that_is_marked_as_one_not_to_be_saved_remains_so(
    recwarn: pytest.WarningsRecorder, tmp_path: Path
) -> None:
    result, _ = map_with_parallel_backward(SavesInput, *[(x,) for x in leaves(2)])
    result.register_hook(unserializable_hook(lambda grad: None))
    torch.save(result, tmp_path / "result.pt")
    assert not [each for each in recwarn if "hook" in str(each.message)]
