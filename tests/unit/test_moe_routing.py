"""Routers decide as Mixtral does, and the losses are those of the papers."""

from __future__ import annotations

import dataclasses
import math
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from moe_autograd.moe.losses import load_balancing_loss, z_loss
from moe_autograd.moe.routers import TopKRouter, within_capacity
from moe_autograd.moe.routing import Routing


def router_of(num_experts: int = 6, top_k: Any = 2, **options: object) -> TopKRouter:
    torch.manual_seed(0)
    return TopKRouter(8, num_experts, top_k, **options)  # type: ignore[arg-type]  # options vary by test


# ---- the router


def test_the_router_has_one_weight_and_no_bias() -> None:
    parameters = dict(router_of().named_parameters())
    assert {name: tuple(p.shape) for name, p in parameters.items()} == {"weight": (6, 8)}


def test_a_new_router_draws_its_weight_as_linear_does() -> None:
    router = router_of()
    torch.manual_seed(0)
    assert torch.equal(router.weight, nn.Linear(8, 6, bias=False).weight)


def test_routing_is_softmax_over_all_experts_then_top_k_then_weights_that_sum_to_one() -> None:
    router, x = router_of(), torch.randn(10, 8)
    routing = router(x)
    probabilities = torch.softmax(x @ router.weight.T, dim=-1)
    best, index = torch.topk(probabilities, 2)
    torch.testing.assert_close(routing.probabilities, probabilities)
    assert torch.equal(routing.expert_index, index)
    torch.testing.assert_close(routing.combine_weights, best / best.sum(-1, keepdim=True))


def test_without_normalizing_the_weights_are_the_probabilities_and_a_single_choice_still_teaches() -> None:
    router, x = router_of(top_k=1, normalize=False), torch.randn(10, 8)
    routing = router(x)
    assert torch.equal(routing.combine_weights, routing.probabilities.gather(1, routing.expert_index))
    routing.combine_weights.sum().backward()
    assert router.weight.grad is not None
    assert router.weight.grad.abs().sum() > 0


def test_equal_probabilities_are_ordered_as_topk_orders_them() -> None:
    router = router_of(num_experts=8, top_k=3)
    with torch.no_grad():
        router.weight.zero_()
    routing = router(torch.randn(5, 8))
    assert torch.equal(routing.expert_index, torch.topk(torch.full((5, 8), 1 / 8), 3).indices)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_probabilities_are_at_least_float32_whatever_the_tokens(dtype: torch.dtype) -> None:
    router = router_of().to(dtype)
    routing = router(torch.randn(4, 8, dtype=dtype))
    expected = torch.promote_types(dtype, torch.float32)
    assert routing.logits.dtype == dtype
    assert routing.probabilities.dtype == routing.combine_weights.dtype == expected
    torch.testing.assert_close(routing.probabilities, F.softmax(routing.logits.to(expected), dim=-1))


def test_leading_dimensions_are_flattened_to_tokens() -> None:
    router, x = router_of(), torch.randn(3, 4, 8)
    assert torch.equal(router(x).expert_index, router(x.reshape(12, 8)).expert_index)
    assert router(x[0, 0]).num_tokens == 1


@pytest.mark.parametrize("top_k", [0, -1, 7, 1.5])
def test_top_k_out_of_range_is_refused_with_both_numbers(top_k: Any) -> None:
    with pytest.raises(
        ValueError, match=rf"expected a whole top_k from 1 to num_experts, got {top_k} \(num_experts=6\)"
    ):
        router_of(top_k=top_k)


@pytest.mark.parametrize(
    "capacity_factor", [0, -1.0, float("inf"), float("nan"), pytest.param(10**400, id="10**400")]
)
def test_a_capacity_that_is_none_is_refused(capacity_factor: float) -> None:
    with pytest.raises(ValueError, match="expected a positive capacity_factor or None, got"):
        router_of(capacity_factor=capacity_factor)


@pytest.mark.parametrize(
    "capacity_factor", [0.01, 0.5, 1.0, 1.25, 100.0, 1e30, 1e308, pytest.param(10**308, id="10**308")]
)
@pytest.mark.parametrize("num_tokens", [0, 1, 50])
def test_an_expert_keeps_its_heaviest_choices_up_to_its_capacity_and_the_others_weigh_nothing(
    capacity_factor: float, num_tokens: int
) -> None:
    x = torch.randn(num_tokens, 8)
    plain, routing = router_of()(x), router_of(capacity_factor=capacity_factor)(x)
    assert routing.is_kept is not None
    capacity = math.ceil(min(float(capacity_factor) * num_tokens * 2 / 6, num_tokens * 2))
    weights = [
        plain.combine_weights[plain.expert_index == expert].sort(descending=True).values
        for expert in range(6)
    ]
    kept = [routing.combine_weights[routing.is_kept & (plain.expert_index == expert)] for expert in range(6)]
    for all_of_one, kept_of_one in zip(weights, kept, strict=True):
        torch.testing.assert_close(kept_of_one.sort(descending=True).values, all_of_one[:capacity])
    assert routing.num_dropped == sum(max(0, len(all_of_one) - capacity) for all_of_one in weights)
    assert not routing.combine_weights[~routing.is_kept].any()


@pytest.mark.parametrize("capacity_factor", ["1.1", "1.11", "1.15", "1.25", "2.2", "0.7", "1.001"])
@pytest.mark.parametrize("num_tokens", [1, 50, 100, 1000])
def test_capacities_are_those_of_exact_arithmetic(capacity_factor: str, num_tokens: int) -> None:
    router = router_of(num_experts=10, top_k=1, capacity_factor=float(capacity_factor))
    with torch.no_grad():
        router.weight.zero_()[0] = 1.0
    routing = router(torch.ones(num_tokens, 8))
    assert routing.is_kept is not None
    assert routing.is_kept.sum() == math.ceil(Fraction(capacity_factor) * num_tokens / 10)


def test_of_equal_weights_the_earlier_token_is_kept() -> None:
    kept = within_capacity(torch.tensor([[0, 1]] * 4), torch.full((4, 2), 0.5), capacity=3)
    assert torch.equal(kept, torch.tensor([[True] * 2] * 3 + [[False] * 2]))


def test_losses_and_loads_are_those_before_tokens_are_dropped() -> None:
    x = torch.randn(50, 8)
    plain, routing = router_of()(x), router_of(capacity_factor=0.5)(x)
    assert (plain.num_dropped, routing.num_dropped > 0) == (0, True)
    assert torch.equal(routing.tokens_per_expert, plain.tokens_per_expert)
    assert torch.equal(routing.load_balancing_loss, plain.load_balancing_loss)


def test_the_repr_of_a_router_names_a_capacity_that_was_chosen() -> None:
    assert repr(router_of()) == "TopKRouter(d_model=8, num_experts=6, top_k=2)"
    assert repr(router_of(capacity_factor=1.5)).endswith("top_k=2, capacity_factor=1.5)")


@pytest.mark.parametrize(("d_model", "num_experts"), [(0, 6), (8, 0), (8, 6.0), ("8", 6)])
def test_sizes_without_elements_are_refused(d_model: Any, num_experts: Any) -> None:
    with pytest.raises(
        ValueError, match=rf"expected whole .* \(d_model={d_model!r}, num_experts={num_experts!r}\)"
    ):
        TopKRouter(d_model, num_experts, 1)


def test_sizes_may_be_whole_numbers_of_other_types() -> None:
    router = TopKRouter(*torch.tensor([8, 6, 2]).numpy())
    assert [type(size) for size in (router.d_model, router.num_experts, router.top_k)] == [int] * 3
    assert router(torch.randn(5, 8)).expert_index.shape == (5, 2)


@pytest.mark.parametrize("shape", [(5, 7), (2, 5, 9), ()])
def test_tokens_of_another_width_are_refused_with_their_shape(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"TopKRouter: expected x of shape \(\.\.\., 8\), got ") as caught:
        router_of()(torch.randn(shape))
    assert str(shape) in str(caught.value)


# ---- the decision


def test_a_routing_is_frozen_and_prints_its_loads_not_its_tensors() -> None:
    routing = Routing(
        logits=torch.zeros(2, 3),
        probabilities=torch.full((2, 3), 1 / 3),
        expert_index=torch.tensor([[2, 0], [2, 1]]),
        combine_weights=torch.full((2, 2), 0.5),
    )
    with pytest.raises(dataclasses.FrozenInstanceError):
        routing.logits = torch.ones(2, 3)  # type: ignore[misc]  # the point of the test
    assert repr(routing) == "Routing(num_tokens=2, num_experts=3, top_k=2, tokens_per_expert=[1, 1, 2])"


def test_tokens_per_expert_counts_every_choice_and_lists_idle_experts() -> None:
    routing = router_of(num_experts=40, top_k=3)(torch.randn(7, 8))
    counts = torch.zeros(40, dtype=torch.int64)
    for index in routing.expert_index.flatten().tolist():
        counts[index] += 1
    assert torch.equal(routing.tokens_per_expert, counts)


# ---- the losses


def test_load_balancing_loss_is_the_sum_written_out() -> None:
    routing = router_of(num_experts=5, top_k=2)(torch.randn(30, 8))
    expected = torch.zeros(())
    for expert in range(5):
        fraction = (routing.expert_index == expert).any(dim=1).float().mean()
        expected = expected + 5 * fraction * routing.probabilities[:, expert].mean()
    torch.testing.assert_close(routing.load_balancing_loss, expected)


@pytest.mark.parametrize("num_tokens", [1, 30])
def test_load_balancing_loss_is_mixtrals(num_tokens: int) -> None:
    """As `load_balancing_loss_func` of Hugging Face transformers computes it, from a one-hot mask."""
    routing = router_of(num_experts=5, top_k=2)(torch.randn(num_tokens, 8))
    mask_TKE = F.one_hot(routing.expert_index, 5).float()
    expected = 5 * (mask_TKE.mean(dim=0) * routing.probabilities.mean(dim=0)).sum()
    torch.testing.assert_close(routing.load_balancing_loss, expected)


@pytest.mark.parametrize("top_k", [1, 2])
def test_an_even_load_costs_top_k_and_a_collapsed_one_num_experts(top_k: int) -> None:
    even = torch.full((8, 4), 1 / 4)
    assert load_balancing_loss(even, torch.full((4,), 2 * top_k)).item() == pytest.approx(top_k)
    collapsed = torch.eye(4)[torch.zeros(8, dtype=torch.int64)]
    assert load_balancing_loss(collapsed, torch.tensor([8, 0, 0, 0])).item() == pytest.approx(4)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_load_balancing_loss_is_computed_in_the_dtype_of_the_probabilities(dtype: torch.dtype) -> None:
    loss = load_balancing_loss(torch.full((3, 2), 0.5, dtype=dtype), torch.tensor([1, 2]))
    torch.testing.assert_close(loss, torch.ones((), dtype=dtype), rtol=torch.finfo(dtype).eps, atol=0)


@pytest.mark.parametrize("num_tokens", [1, 20])
def test_z_loss_is_the_mean_squared_logsumexp_in_float32_or_wider(num_tokens: int) -> None:
    logits = torch.randn(num_tokens, 6)
    expected = (logits.exp().sum(-1).log() ** 2).mean()
    torch.testing.assert_close(z_loss(logits), expected)
    assert z_loss(logits.bfloat16()).dtype == torch.float32
    torch.testing.assert_close(z_loss(logits.double()), (logits.double().exp().sum(-1).log() ** 2).mean())


def test_both_losses_teach_the_router() -> None:
    for name in ("load_balancing_loss", "z_loss"):
        router = router_of()
        routing = router(torch.randn(20, 8))
        getattr(routing, name).backward()
        assert router.weight.grad is not None, name
        assert router.weight.grad.abs().sum() > 0, name


def test_descending_the_load_balancing_loss_evens_the_load() -> None:
    router, x = router_of(num_experts=4, top_k=1), torch.randn(256, 8)
    with torch.no_grad():
        router.weight[0] = x.mean(0) * 5 + torch.randn(8)  # one favourite
    optimizer = torch.optim.Adam(router.parameters(), lr=0.05)
    before = router(x).tokens_per_expert.max()
    for _ in range(60):
        optimizer.zero_grad()
        router(x).load_balancing_loss.backward()
        optimizer.step()
    assert router(x).tokens_per_expert.max() < before


def test_losses_of_no_token_are_zero_not_nan() -> None:
    routing = router_of()(torch.randn(0, 8))
    assert routing.load_balancing_loss.item() == 0
    assert routing.z_loss.item() == 0
    assert routing.tokens_per_expert.tolist() == [0] * 6
