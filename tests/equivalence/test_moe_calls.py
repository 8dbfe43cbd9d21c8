"""Which experts a layer calls, with which tokens, and what the others' parameters get."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe_autograd.autograd.offload import OffloadedExperts
from moe_autograd.moe.experts import FeedForwardExpert
from moe_autograd.moe.layer import MixtureOfExperts
from moe_autograd.moe.routers import TopKRouter
from moe_autograd.moe.routing import Routing
from tests.support.plain_layer import D_MODEL, assert_equals_plain_loop, favour, layer_of, plain_loop


class Counting(nn.Module):
    """An expert that notes the shapes it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D_MODEL, D_MODEL)
        self.shapes: list[tuple[int, ...]] = []

    def forward(self, x: Tensor) -> Tensor:
        self.shapes.append(tuple(x.shape))
        return self.linear(x)


def test_an_expert_is_called_once_with_all_its_tokens_and_idle_ones_are_not() -> None:
    layer = layer_of(Counting, num_experts=30, top_k=2)
    _, routing = layer(torch.randn(2, 9, D_MODEL, dtype=torch.float64), return_routing=True)
    loads = routing.tokens_per_expert.tolist()
    assert 0 in loads
    assert [expert.shapes for expert in layer.experts] == [[(n, D_MODEL)] if n else [] for n in loads]


def test_an_expert_is_not_called_with_more_tokens_than_its_capacity() -> None:
    layer = layer_of(Counting, dtype=torch.float32)
    favour(layer, 2)
    layer.router.capacity_factor = 1.5
    layer(torch.rand(10, 3, D_MODEL))
    sizes = [rows for expert in layer.experts for rows, _ in expert.shapes]
    assert max(sizes) == layer.experts[2].shapes[0][0] == 15


def test_a_router_of_ones_own_may_drop_everything() -> None:
    class DropsAll(TopKRouter):
        def forward(self, x: Tensor) -> Routing:
            return dataclasses.replace(super().forward(x), is_kept=torch.zeros(7, 2, dtype=torch.bool))

    experts = [nn.Linear(4, 4) for _ in range(3)]
    for on_failure in ("raise", "drop"):
        layer = MixtureOfExperts(DropsAll(4, 3, 2), experts, on_failure=on_failure)
        assert torch.equal(layer(torch.randn(7, 4)), torch.zeros(7, 4))


def test_parameters_of_idle_experts_get_no_gradient() -> None:
    layer = layer_of(num_experts=3, top_k=1)
    favour(layer, 1)
    layer(torch.rand(5, D_MODEL, dtype=torch.float64)).sum().backward()
    has_grad = [all(p.grad is not None for p in expert.parameters()) for expert in layer.experts]
    has_none = [all(p.grad is None for p in expert.parameters()) for expert in layer.experts]
    assert (has_grad, has_none) == ([False, True, False], [True, False, True])


def test_idle_experts_get_zeros_when_asked_and_busy_ones_what_they_got_before() -> None:
    plain, zeros = (
        layer_of(num_experts=3, top_k=1),
        layer_of(num_experts=3, top_k=1, zero_grads_for_idle_experts=True),
    )
    x = torch.rand(5, D_MODEL, dtype=torch.float64)
    for layer in (plain, zeros):
        favour(layer, 1)
        layer(x).sum().backward()
    for name, parameter in zeros.named_parameters():
        expected = plain.get_parameter(name).grad
        torch.testing.assert_close(
            parameter.grad, torch.zeros_like(parameter) if expected is None else expected
        )


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_nobody_looks_for_idle_parameters_where_there_are_no_gradients(mode: Callable[[], Any]) -> None:
    asked: list[nn.Module] = []

    class Asked(nn.Linear):
        def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Parameter]]:
            asked.append(self)
            return super().named_parameters(*args, **kwargs)

    layer = layer_of(lambda: Asked(D_MODEL, D_MODEL), zero_grads_for_idle_experts=True)
    asked.clear()
    x = torch.rand(5, D_MODEL, dtype=torch.float64)
    with mode():
        y = layer(x)
    assert asked == []
    torch.testing.assert_close(layer(x), y)
    assert asked


@pytest.mark.parametrize("zero_grads_for_idle_experts", [False, True])
def test_the_caller_may_change_the_output_in_place(zero_grads_for_idle_experts: bool) -> None:
    layer = layer_of(zero_grads_for_idle_experts=zero_grads_for_idle_experts)
    x = torch.randn(2, 9, D_MODEL, dtype=torch.float64, requires_grad=True)
    y = layer(x)
    y += x
    y.mul_(2).sum().backward()
    (expected,) = torch.autograd.grad((2 * (plain_loop(layer, x) + x)).sum(), x)
    torch.testing.assert_close(x.grad, expected)


@pytest.mark.parametrize("on_failure", ["raise", "drop"])
@pytest.mark.parametrize("shape", [(9, D_MODEL), (2, 9, D_MODEL), (D_MODEL,)])
def test_the_output_is_no_view(shape: tuple[int, ...], on_failure: str) -> None:
    layer, bias = layer_of(on_failure=on_failure), torch.zeros(D_MODEL, requires_grad=True)
    x = torch.randn(shape, dtype=torch.float64)
    with torch.no_grad():
        y = layer(x)
    y += bias
    y.sum().backward()
    assert not layer(x).detach_().requires_grad
    assert not layer(x)._is_view()


def test_no_token_calls_no_expert_and_still_has_gradients_to_give() -> None:
    layer = layer_of(Counting)
    x = torch.empty(2, 0, D_MODEL, dtype=torch.float64, requires_grad=True)
    y, routing = layer(x, return_routing=True)
    assert y.shape == x.shape
    assert routing.tokens_per_expert.sum() == 0
    y.sum().backward()
    assert x.grad is not None
    assert torch.equal(layer.router.weight.grad, torch.zeros_like(layer.router.weight))
    assert all(expert.shapes == [] for expert in layer.experts)


def test_an_expert_may_work_in_place_on_what_it_is_given() -> None:
    layer = layer_of(lambda: nn.Sequential(nn.ReLU(inplace=True), nn.Linear(D_MODEL, D_MODEL)))
    assert_equals_plain_loop(layer, torch.randn(40, D_MODEL, dtype=torch.float64))


def test_an_expert_that_works_in_place_on_what_is_wanted_again_raises() -> None:
    layer = layer_of(
        lambda: nn.Sequential(nn.ReLU(inplace=True), nn.Linear(D_MODEL, D_MODEL)), recompute=True
    )
    x = torch.randn(40, D_MODEL, dtype=torch.float64, requires_grad=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        layer(x).sum().backward()
    offloaded = OffloadedExperts(list(layer.experts), max_resident_bytes=100_000)
    with offloaded, pytest.raises(RuntimeError, match="a leaf Variable that requires grad"):
        MixtureOfExperts(layer.router, list(offloaded))(x)


def test_one_module_may_serve_as_several_experts() -> None:
    shared = FeedForwardExpert(D_MODEL)
    layer = MixtureOfExperts(TopKRouter(D_MODEL, 3, 2), [shared, FeedForwardExpert(D_MODEL), shared]).double()
    assert_equals_plain_loop(layer, torch.randn(40, D_MODEL, dtype=torch.float64))


def test_without_gradients_nothing_is_recorded() -> None:
    layer, x = layer_of(), torch.randn(4, D_MODEL, dtype=torch.float64)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            y = layer(x)
        assert not y.requires_grad
        torch.testing.assert_close(y, plain_loop(layer, x).detach())
