"""A layer that goes on without experts that fail computes what a plain loop over the survivors computes."""

from __future__ import annotations

import dataclasses
import gc
import math
import re
import threading
import weakref

import pytest
import torch
from torch import Tensor, nn

from moe_autograd.errors import (
    ServerUnavailableError,
    TooFewExpertsError,
)
from moe_autograd.moe.layer import MixtureOfExperts
from moe_autograd.moe.routers import TopKRouter
from moe_autograd.moe.routing import Routing
from tests.support.survivors import combine_survivors
from tests.support.unreliable import (
    D_MODEL,
    NUM_EXPERTS,
    Unreliable,
    assert_same_gradients,
    expected_of,
    gradients,
    layer_of,
    tokens,
)

pytestmark = pytest.mark.usefixtures("clock")


# ---- values and gradients


@pytest.mark.parametrize("lost", [{0}, {1, 3}, {0, 2, 4}], ids=str)
@pytest.mark.parametrize("options", [{}, {"recompute": True}, {"max_concurrency": 1}], ids=str)
def test_experts_lost_in_the_forward_have_no_part_in_values_and_gradients(lost, options):
    layer = layer_of(3, fails=dict.fromkeys(lost, "forward"), allow_zero_outputs=True, **options)
    x = tokens()
    y, routing = layer(x, return_routing=True)
    expected = expected_of(layer, x, lost_in_forward=lost)
    torch.testing.assert_close(y, expected, rtol=1e-6, atol=1e-6)
    assert_same_gradients(gradients(y, layer, x), gradients(expected, layer, x))
    assert {(failure.expert_index, failure.expert, failure.phase) for failure in routing.failures} == {
        (index, f"expert {index}", "forward") for index in lost
    }


@pytest.mark.parametrize("options", [{}, {"recompute": True}], ids=str)
def test_experts_lost_in_the_backward_have_a_part_in_the_values_and_none_in_the_gradients(options):
    lost = {1, 2}
    layer = layer_of(3, fails=dict.fromkeys(lost, "backward"), **options)
    x = tokens()
    y, routing = layer(x, return_routing=True)
    assert routing.failures == []
    expected = expected_of(layer, x, lost_in_backward=lost)
    torch.testing.assert_close(y, expected, rtol=1e-6, atol=1e-6)
    assert_same_gradients(gradients(y, layer, x), gradients(expected, layer, x))
    assert {(failure.expert_index, failure.phase) for failure in routing.failures} == {
        (index, "backward") for index in lost
    }


def second_order(y: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradient of tokens, and that of its square."""
    (grad,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    return grad, *torch.autograd.grad(grad.square().sum(), x)


@pytest.mark.parametrize("options", [{}, {"recompute": True}], ids=str)
def test_experts_lost_in_a_backward_that_makes_a_graph_are_left_out_of_gradients_of_any_order(options):
    layer, x = layer_of(3, fails=dict.fromkeys({1, 2}, "backward"), **options), tokens()
    y, routing = layer(x, return_routing=True)
    expected = second_order(expected_of(layer, x, lost_in_backward={1, 2}), x)
    torch.testing.assert_close(second_order(y, x), expected, rtol=1e-6, atol=1e-6)
    assert {(failure.expert_index, failure.phase) for failure in routing.failures} == {
        (index, "backward") for index in (1, 2)
    }


def test_experts_lost_in_the_backward_of_a_backward_are_left_out_there():
    class FailsLater(Unreliable):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            y.register_hook(self._fail_later)
            return y

        def _fail_later(self, grad: Tensor) -> Tensor:
            later = grad * 1
            if later.requires_grad:
                later.register_hook(self._fail)
            return later

    def without_second_order(x: Tensor) -> Tensor:
        x = x * 1
        x.register_hook(torch.Tensor.detach)
        return linear(x)

    layer, x = layer_of(3), tokens()
    layer.experts[1] = FailsLater().double()
    linears = [expert.linear for expert in layer.experts]
    linear, linears[1] = linears[1], without_second_order
    y, routing = layer(x, return_routing=True)
    expected = second_order(combine_survivors(x, layer.router(x), linears), x)
    torch.testing.assert_close(second_order(y, x), expected, rtol=1e-6, atol=1e-6)
    assert {(failure.expert_index, failure.phase) for failure in routing.failures} == {(1, "backward")}


@pytest.mark.parametrize("min_experts", [1, 2])
def test_a_token_whose_choices_were_dropped_needs_no_more_experts_than_it_has_left(min_experts):
    layer = layer_of(3, fails={1: "forward"}, min_experts=min_experts, allow_zero_outputs=True)
    layer.router.capacity_factor = 0.4
    x = tokens()
    y, routing = layer(x, return_routing=True)
    answered = routing.is_kept & (routing.expert_index != 1)
    wanted = routing.is_kept.sum(1).clamp(max=min_experts)
    weights = routing.combine_weights.where(answered & (answered.sum(1) >= wanted).unsqueeze(1), 0)
    weights = (weights / weights.sum(1, keepdim=True)).nan_to_num() * routing.combine_weights.sum(
        1, keepdim=True
    )
    expected = torch.zeros_like(x)
    for index, expert in enumerate(layer.experts):
        expected = expected + (weights * (routing.expert_index == index)).sum(
            1, keepdim=True
        ) * expert.linear(x)
    torch.testing.assert_close(y, expected, rtol=1e-6, atol=1e-6)


def test_without_a_failure_the_numbers_are_those_of_a_strict_layer_to_the_last_bit():
    x = tokens()
    tolerant, strict = layer_of(), layer_of(on_failure="raise")
    y, expected = tolerant(x), strict(x)
    assert torch.equal(y, expected)
    torch.testing.assert_close(gradients(y, tolerant, x), gradients(expected, strict, x), rtol=0, atol=0)


def test_only_tokens_of_a_lost_expert_change():
    x = tokens()
    y, routing = layer_of(fails={0: "forward"})(x, return_routing=True)
    is_touched = (routing.expert_index == 0).any(dim=1)
    assert 0 < is_touched.sum() < len(x)
    assert torch.equal(y[~is_touched], layer_of(on_failure="raise")(x)[~is_touched])


def test_only_tokens_of_a_lost_expert_change_where_the_router_drops_choices_whatever_their_weights():
    def with_signs(router: nn.Module, args: object, routing: Routing) -> Routing:
        weights = torch.tensor([[0.5, -0.5, 0.0]], dtype=torch.float64).expand(routing.num_tokens, 3)
        return dataclasses.replace(routing, combine_weights=weights, is_kept=weights != 0)

    tolerant, strict = layer_of(3, fails={0: "forward"}), layer_of(3, on_failure="raise")
    for layer in (tolerant, strict):
        layer.router.register_forward_hook(with_signs)
    x = tokens()
    y, routing = tolerant(x, return_routing=True)
    is_touched = (routing.is_kept & (routing.expert_index == 0)).any(dim=1)
    assert 0 < is_touched.sum() < len(x)
    assert torch.equal(y[~is_touched], strict(x)[~is_touched])


def test_the_routing_tells_what_the_router_decided_whoever_is_lost():
    x = tokens()
    _, routing = layer_of(fails={0: "forward"})(x, return_routing=True)
    _, undisturbed = layer_of(on_failure="raise")(x, return_routing=True)
    assert torch.equal(routing.combine_weights, undisturbed.combine_weights)
    assert torch.equal(routing.tokens_per_expert, undisturbed.tokens_per_expert)


def test_a_router_that_does_not_normalize_keeps_the_sums_it_had():
    layer = layer_of(fails={0: "forward"}, allow_zero_outputs=True)
    layer.router.normalize = False
    x = tokens()
    weights = layer.router(x).combine_weights.sum(dim=1, keepdim=True)
    torch.testing.assert_close(layer(x), weights * expected_of(layer, x, lost_in_forward={0}))


def test_leading_dimensions_and_bfloat16_stay_what_they_are():
    layer = layer_of(fails={0: "forward"}).bfloat16()
    x = tokens().detach().bfloat16().reshape(5, 6, D_MODEL)
    y = layer(x)
    assert (y.shape, y.dtype) == (x.shape, x.dtype)
    expected = expected_of(layer.float(), x.reshape(-1, D_MODEL).float(), lost_in_forward={0})
    torch.testing.assert_close(y.reshape(-1, D_MODEL).float(), expected, rtol=0.05, atol=0.05)


def test_a_router_may_return_the_same_routing_again():
    class Fixed(nn.Module):
        num_experts = NUM_EXPERTS

        def __init__(self, routing: Routing) -> None:
            super().__init__()
            self.routing = routing

        def forward(self, x: Tensor) -> Routing:
            return self.routing

    layer = layer_of(fails={0: "forward"})
    x = tokens()
    layer.router = Fixed(layer.router(x))
    assert [len(layer(x, return_routing=True)[1].failures) for _ in range(2)] == [1, 1]
    assert layer.router.routing.failures == []


# ---- too few


def test_each_token_counts_its_own_experts_and_those_with_too_few_are_named():
    layer = layer_of(fails={0: "forward", 1: "forward"}, min_experts=2, max_concurrency=1)
    x = tokens()
    is_short = torch.isin(layer.router(x).expert_index, torch.tensor([0, 1])).any(dim=1)
    short = is_short.nonzero().flatten().tolist()
    with pytest.raises(TooFewExpertsError) as raised:
        layer(x)
    text = str(raised.value)
    assert (
        f"at least 2 of the 2 experts of every token to answer, got fewer for {len(short)} of 30 tokens"
        in text
    )
    assert "'expert 0', forward: ServerUnavailableError: the cable is out" in text
    assert "allow_zero_outputs=True" in text
    assert raised.value.tokens == tuple(short)
    assert {failure.expert_index for failure in raised.value.failures} == {0, 1}
    assert raised.value.__cause__ is layer.experts[0].error, "the first one"


@pytest.mark.parametrize("min_experts", [1, 2, 3])
def test_tokens_with_too_few_become_zeros_where_that_is_allowed(min_experts):
    lost = {0, 1, 4}
    layer = layer_of(
        3, fails=dict.fromkeys(lost, "forward"), min_experts=min_experts, allow_zero_outputs=True
    )
    x = tokens()
    y = layer(x)
    expected = expected_of(layer, x, lost_in_forward=lost, min_experts=min_experts)
    torch.testing.assert_close(y, expected, rtol=1e-6, atol=1e-6)
    assert_same_gradients(gradients(y, layer, x), gradients(expected, layer, x))


def test_zeros_do_not_depend_on_what_the_others_returned():
    layer = layer_of(fails={0: "forward"}, min_experts=2, allow_zero_outputs=True)
    with torch.no_grad():
        for expert in layer.experts[1:]:
            expert.linear.bias.fill_(float("inf"))
    is_short = (layer.router(tokens()).expert_index == 0).any(dim=1)
    x = tokens().detach()[is_short].requires_grad_()
    y = layer(x)
    assert torch.equal(y, torch.zeros_like(x))
    y.sum().backward()
    assert x.grad.abs().sum() == layer.router.weight.grad.abs().sum() == 0


def test_without_any_expert_there_are_zeros_and_gradients_of_zero():
    layer = layer_of(fails=dict.fromkeys(range(NUM_EXPERTS), "forward"), allow_zero_outputs=True)
    x = tokens()
    y = layer(x)
    assert torch.equal(y, torch.zeros_like(x))
    y.sum().backward()
    assert torch.equal(x.grad, torch.zeros_like(x))
    assert torch.equal(layer.router.weight.grad, torch.zeros_like(layer.router.weight))


def test_a_lost_expert_counts_as_idle_for_those_who_want_zero_gradients():
    layer = layer_of(fails={0: "forward"}, zero_grads_for_idle_experts=True)
    layer(tokens()).sum().backward()
    assert torch.equal(layer.experts[0].linear.weight.grad, torch.zeros(D_MODEL, D_MODEL).double())


# ---- memory


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_pass_that_lost_an_expert_goes_with_its_graph(phase):
    class Fresh(Unreliable):
        def _fail(self, grad: Tensor) -> None:
            raise ServerUnavailableError("gone")

        def forward(self, x: Tensor) -> Tensor:
            if phase == "forward":
                raise ServerUnavailableError("gone")
            return super().forward(x)

    layer = layer_of(fails={0: phase}, timeout_after_min_s=60.0)
    layer.experts[0] = Fresh().double()
    layer.experts[0].fails_in = phase
    x = tokens()
    gone = weakref.ref(x)
    gc.collect()
    gc.disable()
    try:
        y, routing = layer(x, return_routing=True)
        y.sum().backward()
        noted = routing.failures
        del x, y, routing
        assert gone() is None
        assert [(failure.phase, failure.reason) for failure in noted] == [
            (phase, "ServerUnavailableError: gone")
        ]
    finally:
        gc.enable()


def test_without_gradients_nothing_is_recorded():
    layer = layer_of(fails={0: "forward"})
    with torch.no_grad():
        assert not layer(tokens()).requires_grad


def test_no_token_needs_no_expert():
    layer = layer_of(fails=dict.fromkeys(range(NUM_EXPERTS), "forward"), timeout_after_min_s=1.0)
    x = tokens(0)
    y, routing = layer(x, return_routing=True)
    y.sum().backward()
    assert (y.shape, routing.failures) == (x.shape, [])


def test_the_repr_names_what_was_chosen():
    assert "on_failure" not in repr(layer_of(on_failure="raise"))
    assert "on_failure='drop', min_experts=2" in repr(layer_of(min_experts=2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"on_failure": "ignore"}, 'expected on_failure "raise" or "drop", got \'ignore\''),
        *[
            (
                {"min_experts": given},
                rf"expected a whole min_experts from 1 to top_k, got {given!r} \(top_k=2\)",
            )
            for given in (0, 3, 1.5, "two")
        ],
        *[
            (
                {"timeout_after_min_s": given},
                rf"timeout_after_min_s of at least 0 seconds \(up to 1e\+08\) or None, got {re.escape(str(given))}",
            )
            for given in (-1.0, math.nan, math.inf, 1e10, 10**400)
        ],
        ({"on_failure": "raise", "allow_zero_outputs": True}, 'expected on_failure="drop"'),
        ({"on_failure": "raise", "timeout_after_min_s": 1.0}, 'expected on_failure="drop"'),
    ],
)
def test_options_that_make_no_sense_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        layer_of(**options)


def test_min_experts_of_a_router_that_does_not_tell_its_top_k_is_checked_when_it_routes():
    class Own(nn.Module):
        num_experts = NUM_EXPERTS

        def __init__(self) -> None:
            super().__init__()
            self.router = TopKRouter(D_MODEL, NUM_EXPERTS, 2)

        def forward(self, x: Tensor) -> Routing:
            return self.router(x)

    layer = MixtureOfExperts(Own(), [nn.Identity()] * NUM_EXPERTS, on_failure="drop", min_experts=3)
    with pytest.raises(ValueError, match=r"got 3 \(top_k=2\)"):
        layer(tokens().float())


# ---- options that change no number


def test_experts_keep_only_their_input_where_that_is_chosen():
    layer = layer_of(recompute=True)
    layer(tokens()).sum().backward()
    assert [expert.num_calls for expert in layer.experts] == [2] * NUM_EXPERTS


def test_experts_run_one_at_a_time_where_that_is_chosen(nothing_is_small):
    layer, others, are_there = layer_of(max_concurrency=1), threading.Event(), []

    def wait_for_another(*_):
        are_there.append(False)
        if len(are_there) > 1:
            others.set()
        else:
            are_there[0] = others.wait(0.2)

    for expert in layer.experts:
        expert.register_forward_pre_hook(wait_for_another)
    layer(tokens())
    assert are_there == [False] * NUM_EXPERTS
