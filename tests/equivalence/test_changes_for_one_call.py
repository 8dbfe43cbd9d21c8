"""Calls that change a module they share for as long as they run: its mode, adapters, hooks, what is trained of it."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

from moe_autograd import parallel_apply
from tests.support.comparing_modules import assert_same_without_error
from tests.support.comparison import MapFunction
from tests.support.module_programs import leaves, seeded
from tests.support.templates import Waits, say


class Switched(nn.Module):
    """Has an adapter, and another one in training."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.is_adapted = nn.Linear(4, 4), True

    def forward(self, x: Tensor) -> Any:
        return self.linear(x) * (2 if self.is_adapted else 3) * (5 if self.training else 7)

    @contextlib.contextmanager
    def disable_adapter(self) -> Iterator[None]:
        self.is_adapted = False
        try:
            yield
        finally:
            self.is_adapted = True


def in_eval_mode(template: nn.Module, x: Tensor) -> Any:
    template.eval()
    try:
        return template(x)
    finally:
        template.train()


def without_adapter(template: nn.Module, x: Tensor) -> Any:
    switched = template.get_submodule("2")
    with switched.disable_adapter():  # type: ignore[operator]  # a method that nn.Module does not know
        return template(x)


def with_features(template: nn.Module, x: Tensor) -> Any:
    kept: list[Tensor] = []
    handle = template.get_submodule("2").register_forward_hook(lambda module, args, y: kept.append(y))
    try:
        return template(x), kept
    finally:
        handle.remove()


def frozen(template: nn.Module, x: Tensor) -> Any:
    template.requires_grad_(False)
    try:
        return template(x)
    finally:
        template.requires_grad_()


def frozen_one_by_one(template: nn.Module, x: Tensor) -> Any:
    for p in template.parameters():
        p.requires_grad = False
    try:
        return template(x)
    finally:
        for p in template.parameters():
            p.requires_grad = True


def with_a_mode_that_is_set(template: nn.Module, x: Tensor) -> Any:
    switched = template.get_submodule("2")
    switched.training = False
    try:
        return template(x)
    finally:
        switched.training = True


def with_a_mode_that_is_worked_out(template: nn.Module, x: Tensor) -> Any:
    switched = template.get_submodule("2")
    switched.training = min(True, 0)  # type: ignore[assignment]  # a number, which counts as one
    try:
        return template(x)
    finally:
        switched.training = True


def with_other_data(template: nn.Module, x: Tensor) -> Any:
    weight = template.get_parameter("0.weight")
    before, weight.data = weight.data, weight.data * 2
    try:
        return template(x).detach() + x
    finally:
        weight.data = before


@contextlib.contextmanager
def evaluating(template: nn.Module) -> Iterator[None]:
    template.eval()
    try:
        yield
    finally:
        template.train()


def in_a_context(template: nn.Module, x: Tensor) -> Any:
    with evaluating(template):
        return template(x)


@torch.no_grad()
def without_gradients(template: nn.Module, x: Tensor) -> Any:
    return in_eval_mode(template, x)


def as_a_teacher(template: nn.Module, x: Tensor) -> Any:
    return template(x) - without_gradients(template, x)


CHANGES = [in_eval_mode, without_adapter, with_features, frozen, frozen_one_by_one, with_a_mode_that_is_set]
CHANGES += [in_a_context, as_a_teacher, with_other_data, with_a_mode_that_is_worked_out]


@pytest.mark.parametrize("options", [{}, {"recompute": True}, {"defer_weight_grads": True}], ids=str)
@pytest.mark.parametrize("change", CHANGES)
def test_a_change_for_one_call_is_for_that_call(
    change: Callable[[nn.Module, Tensor], Any], options: dict[str, bool]
) -> None:
    def program(apply: MapFunction) -> Any:
        waits, xs = Waits(apply), leaves(4)
        (template,) = seeded(lambda: nn.Sequential(nn.Linear(4, 4), waits, Switched()), 1)
        calls = [template, lambda x: change(template, x)] * 2
        return say(apply, template, waits, calls, [(x,) for x in xs], *xs)

    assert_same_without_error(program, **options)


class Teaches(nn.Sequential):
    def evaluated(self, x: Tensor) -> Any:
        super().eval()
        try:
            return self(x)
        finally:
            super().train()


def test_so_is_one_that_a_module_makes_of_itself_by_methods_of_its_base() -> None:
    def program(apply: MapFunction) -> Any:
        waits, xs = Waits(apply), leaves(4)
        (template,) = seeded(lambda: Teaches(nn.Linear(4, 4), waits, Switched()), 1)
        calls = [template, cast(Teaches, template).evaluated] * 2
        return say(apply, template, waits, calls, [(x,) for x in xs], *xs)

    assert_same_without_error(program)


class HasMode(nn.Module):
    """As a dropout has, but for the random numbers."""

    def forward(self, x: Tensor) -> Tensor:
        return x * (5 if self.training else 7)


def test_calls_whose_modules_have_a_mode_alone_are_in_their_own() -> None:
    def program(apply: MapFunction) -> Any:
        waits, xs = Waits(apply), leaves(4)
        template = nn.Sequential(waits, HasMode())
        calls = [template, lambda x: in_eval_mode(template, x)] * 2
        return say(apply, template, waits, calls, [(x,) for x in xs], *xs)

    assert_same_without_error(program)


def test_calls_that_switch_the_mode_of_a_scripted_module_they_share_take_turns() -> None:
    """Its class has no forward by itself: a look at it raises."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".torch.jit")  # it is deprecated
        shared = torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)))
    inputs = [(shared, torch.randn(3, 4)) for _ in range(3)]
    torch.testing.assert_close(parallel_apply([in_eval_mode] * 3, inputs), [shared[0](x) for _, x in inputs])
