"""Calls that give a module they share other weights, as `functional_call` does, compute with their own."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.function import Function
from torch.func import functional_call

from moe_autograd import map_with_parallel_backward, parallel_apply
from tests.support.comparing_modules import assert_same_without_error
from tests.support.comparison import MapFunction, Raised, assert_same_program, one_after_another
from tests.support.functions_waiting import PATIENCE_S
from tests.support.module_programs import finish, leaves, parameters, seeded
from tests.support.swapping import run_with, run_with_from_elsewhere
from tests.support.templates import NUM_CALLS, Waits, Weights, say, template_and_weights


def lambdas(template: nn.Module, weights: Weights) -> Callable[[Tensor], Any]:
    return lambda x: functional_call(template, weights, (x,))


def lambdas_by_attribute(template: nn.Module, weights: Weights) -> Callable[[Tensor], Any]:
    return lambda x: torch.func.functional_call(template, weights, (x,))


def bound_arguments(template: nn.Module, weights: Weights) -> Callable[[Tensor], Any]:
    return functools.partial(functional_call, template, weights)


def a_function_of_the_same_file(template: nn.Module, weights: Weights) -> Callable[[Tensor], Any]:
    return lambda x: _helper(template, weights, x)


def _helper(template: nn.Module, weights: Weights, x: Tensor) -> Any:
    return functional_call(template, weights, (x,))


def a_function_of_another_file(template: nn.Module, weights: Weights) -> Callable[[Tensor], Any]:
    return lambda x: run_with(template, weights, x)


def a_function_bound_to_its_arguments(template: nn.Module, weights: Weights) -> Callable[[Tensor], Any]:
    return functools.partial(run_with_from_elsewhere, template, weights)


def an_import_inside(template: nn.Module, weights: Weights) -> Callable[[Tensor], Any]:
    def run(x: Tensor) -> Any:
        from torch.func import functional_call as call_with

        return call_with(template, weights, (x,))

    return run


class Functional(nn.Module):
    """A template's function with weights of its own; the template is hidden from `modules()`."""

    def __init__(self, template: nn.Module, weights: Weights) -> None:
        super().__init__()
        self.template, self.weights = [template], weights

    def forward(self, x: Tensor) -> Any:
        return functional_call(self.template[0], self.weights, (x,))


class Calls:
    def __init__(self, template: nn.Module, weights: Weights) -> None:
        self.template, self.weights = template, weights

    def __call__(self, x: Tensor) -> Any:
        return functional_call(self.template, self.weights, (x,))

    def run(self, x: Tensor) -> Any:
        return functional_call(self.template, self.weights, (x,))


def methods(template: nn.Module, weights: Weights) -> Callable[[Tensor], Any]:
    return Calls(template, weights).run


def forwards_of_instances(template: nn.Module, weights: Weights) -> Callable[[Tensor], Any]:
    module = nn.Identity()
    module.forward = lambda x: functional_call(template, weights, (x,))  # type: ignore[method-assign, assignment]
    return module


MAKERS: list[Callable[[nn.Module, Weights], Callable[[Tensor], Any]]]
MAKERS = [lambdas, lambdas_by_attribute, bound_arguments, a_function_of_the_same_file, methods, Calls]
MAKERS += [a_function_of_another_file, a_function_bound_to_its_arguments, an_import_inside]
MAKERS += [Functional, forwards_of_instances]


@pytest.mark.parametrize("options", [{}, {"recompute": True}, {"defer_weight_grads": True}], ids=str)
@pytest.mark.parametrize("make", MAKERS, ids=lambda make: make.__name__)
def test_calls_that_share_a_template_compute_with_their_own_weights(
    make: Callable[[nn.Module, Weights], Any], options: dict[str, bool]
) -> None:
    def program(apply: MapFunction) -> Any:
        (template, waits, own), xs = template_and_weights(apply), leaves(NUM_CALLS)
        calls = [make(template, weights) for weights in own]
        tensors = [*xs, *[w for weights in own for w in weights.values()]]
        return say(apply, template, waits, calls, [(x,) for x in xs], *tensors)

    assert_same_without_error(program, **options)


def test_the_template_may_be_an_argument() -> None:
    def program(apply: MapFunction) -> Any:
        (template, waits, own), xs = template_and_weights(apply), leaves(NUM_CALLS)
        inputs = [(template, weights, (x,)) for weights, x in zip(own, xs, strict=True)]
        tensors = [*xs, *[w for weights in own for w in weights.values()]]
        return say(apply, template, waits, [functional_call] * NUM_CALLS, inputs, *tensors)

    assert_same_without_error(program)


def test_a_call_of_the_template_itself_has_its_own_weights_and_so_has_one_of_a_part() -> None:
    def program(apply: MapFunction) -> Any:
        (template, waits, own), xs = template_and_weights(apply), leaves(3)
        calls = [lambdas(template, own[0]), template, template[2]]
        return say(apply, template, waits, calls, [(x,) for x in xs], *xs, *own[0].values())

    assert_same_without_error(program)


def test_templates_of_their_own_are_called_side_by_side() -> None:
    barrier, xs = threading.Barrier(4), leaves()

    class Meets(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            barrier.wait(PATIENCE_S)
            return x

    modules = seeded(lambda: nn.Sequential(nn.Linear(4, 4), Meets()))
    calls = [lambdas(module, dict(module.named_parameters())) for module in modules]
    finish(parallel_apply(calls, [(x,) for x in xs]), *xs)
    assert all(p.grad is not None for p in parameters(modules))


def test_statistics_of_a_module_among_the_arguments_are_those_of_a_loop() -> None:
    def program(apply: MapFunction) -> Any:
        (norm,), xs, waits = seeded(lambda: nn.BatchNorm1d(4), 1), leaves(3), Waits(apply)

        def run(module: nn.Module, x: Tensor, *, is_first: bool) -> Any:
            return module(waits(x) if is_first else x)

        inputs = [(norm, x) for x in xs]
        kwargs = [{"is_first": i == 0} for i in range(3)]
        outputs = apply([run] * 3 + [waits.come], [*inputs, (leaves(1)[0],)], [*kwargs, {}])
        return finish(outputs, *xs, *norm.parameters()), list(norm.buffers())

    assert_same_without_error(program)


class WithTemplate(Function):
    """Computes with other weights, as a template of the arguments."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, template: nn.Module, weights: Weights) -> Any:
        return functional_call(template, weights, (x,))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad, None, None


def test_functions_that_share_a_template_compute_with_their_own_weights() -> None:
    def program(apply: MapFunction) -> Any:
        template, _, own = template_and_weights(one_after_another)
        xs = leaves(NUM_CALLS)
        template[1] = Meanders()
        return finish(
            list(apply(WithTemplate, *[(x, template, w) for x, w in zip(xs, own, strict=True)])), *xs
        )

    assert not isinstance(assert_same_program(program), Raised)


def test_functions_with_templates_of_their_own_are_called_side_by_side() -> None:
    barrier, xs, templates = threading.Barrier(4), leaves(), seeded(lambda: nn.Linear(4, 4))

    class MeetsWith(WithTemplate):
        @staticmethod
        def forward(ctx: Any, x: Tensor, template: nn.Module, weights: Weights) -> Any:
            barrier.wait(PATIENCE_S)
            return functional_call(template, weights, (x,))

    args = [(x, m, dict(m.named_parameters())) for x, m in zip(xs, templates, strict=True)]
    finish(list(map_with_parallel_backward(MeetsWith, *args)), *xs)


class Meanders(nn.Module):
    """Computes long enough for other calls to come."""

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(200):
            x = (x + x.sin()) / 2
        return x
