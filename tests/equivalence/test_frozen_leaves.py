"""Leaves that a call freezes after it has used them: what they are in the backward counts, as in a loop."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.comparing_modules import assert_same_without_error, name_of
from tests.support.comparison import MapFunction
from tests.support.module_programs import NUM_CALLS, finish, leaves


def multiplied_and_frozen(weight: Tensor, x: Tensor) -> Tensor:
    y = x * weight
    weight.requires_grad_(False)
    return y


def outputs_of_frozen_weights(apply: MapFunction, weights: list[Tensor]) -> list[Tensor]:
    calls = [functools.partial(multiplied_and_frozen, weight) for weight in weights]
    return apply(calls, [(x,) for x in leaves(requires_grad=False)])


def weights_that_stay_frozen(apply: MapFunction) -> Any:
    weights = leaves(NUM_CALLS, 4)
    said = finish(outputs_of_frozen_weights(apply, weights), *weights)
    return said, [weight.requires_grad for weight in weights]


def weights_that_stay_frozen_beside_one_that_does_not(apply: MapFunction) -> Any:
    weights, (x, scale) = leaves(NUM_CALLS, 4), leaves(2)
    calls = [functools.partial(multiplied_and_frozen, weight) for weight in weights]
    return finish(apply([*calls, scale.mul], [(x,)] * (NUM_CALLS + 1)), x, scale, *weights)


def weights_that_are_trained_after_all(apply: MapFunction) -> Any:
    weights = leaves(NUM_CALLS, 4)
    outputs = outputs_of_frozen_weights(apply, weights)
    for weight in weights:
        weight.requires_grad_()
    return finish(outputs, *weights)


def weights_that_are_quantized_in_their_place(apply: MapFunction) -> Any:
    def call(weight: Tensor, x: Tensor) -> Tensor:
        y = multiplied_and_frozen(weight, x)
        weight.data = weight.data.to(torch.int8)
        return y

    weights, xs = leaves(NUM_CALLS, 4), leaves()
    return finish(apply([functools.partial(call, weight) for weight in weights], [(x,) for x in xs]), *xs)


def inputs_that_need_gradients_only_within_their_call(apply: MapFunction) -> Any:
    """As attributions of `captum` do: what was computed meanwhile has a history that leads to no gradient."""

    def call(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.requires_grad_().sin()
        (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        x.requires_grad_(False)
        return y, grad

    xs = leaves(requires_grad=False)
    return finish(apply([call] * NUM_CALLS, [(x,) for x in xs]), *xs)


@pytest.mark.parametrize("options", [{}, {"max_concurrency": 1}, {"defer_weight_grads": True}], ids=repr)
@pytest.mark.parametrize(
    "program",
    [
        weights_that_stay_frozen,
        weights_that_stay_frozen_beside_one_that_does_not,
        weights_that_are_trained_after_all,
        weights_that_are_quantized_in_their_place,
        inputs_that_need_gradients_only_within_their_call,
    ],
    ids=name_of,
)
def test_leaves_frozen_by_their_call_are_as_in_a_loop(
    program: Callable[[MapFunction], Any], options: dict[str, Any]
) -> None:
    assert_same_without_error(program, **options)
