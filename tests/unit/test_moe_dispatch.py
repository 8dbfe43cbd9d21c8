"""Dispatch and combine move tokens exactly, and can be differentiated twice."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from moe_autograd.moe.dispatch import DispatchPlan, combine, dispatch, plan_dispatch
from moe_autograd.moe.idle import with_zero_grads


def plan_of(expert_index: Tensor, num_experts: int) -> DispatchPlan:
    return plan_dispatch(expert_index, torch.bincount(expert_index.flatten(), minlength=num_experts))


def random_choices(num_tokens: int, num_experts: int, top_k: int) -> Tensor:
    torch.manual_seed(num_tokens)
    return torch.rand(num_tokens, num_experts).topk(top_k).indices


@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k"), [(1, 1, 1), (7, 3, 2), (50, 64, 3), (9, 4, 4)]
)
def test_each_expert_gets_exactly_its_tokens_in_order(num_tokens: int, num_experts: int, top_k: int) -> None:
    expert_index = random_choices(num_tokens, num_experts, top_k)
    x = torch.arange(num_tokens).float().unsqueeze(1)
    plan = plan_of(expert_index, num_experts)
    slices = dict(zip(plan.active, dispatch(x, plan), strict=True))
    for expert in range(num_experts):
        tokens = (expert_index == expert).any(dim=1).nonzero().squeeze(1)
        if len(tokens):
            assert slices[expert].squeeze(1).tolist() == tokens.tolist()
        else:
            assert expert not in slices


def test_combining_unchanged_slices_with_weights_that_sum_to_one_gives_the_tokens_back() -> None:
    x, expert_index = torch.randn(20, 5, dtype=torch.float64), random_choices(20, 6, 3)
    weights = torch.rand(20, 3, dtype=torch.float64).softmax(-1)
    plan = plan_of(expert_index, 6)
    torch.testing.assert_close(combine(dispatch(x, plan), weights, plan), x)


def test_every_slice_is_contiguous_with_memory_of_its_own() -> None:
    plan = plan_of(random_choices(20, 6, 2), 6)
    slices = dispatch(torch.randn(20, 5), plan)
    assert all(piece.is_contiguous() and piece._base is None for piece in slices)
    assert len({piece.untyped_storage().data_ptr() for piece in slices}) == len(slices)


def test_an_expert_that_works_in_place_disturbs_no_other() -> None:
    x = torch.randn(20, 5, requires_grad=True)
    plan = plan_of(random_choices(20, 2, 1), 2)
    first, second = dispatch(x, plan)
    squared = second.pow(2)  # saves `second` for its backward
    first.relu_()
    (first.sum() + squared.sum()).backward()
    chosen = plan.token_index[: plan.counts[0]]
    expected = 2 * x.detach()
    expected[chosen] = (x.detach()[chosen] > 0).float()
    torch.testing.assert_close(x.grad, expected)


def test_one_slice_alive_does_not_keep_the_others() -> None:
    plan = plan_of(random_choices(20, 2, 1), 2)
    first, second = dispatch(torch.randn(20, 5), plan)
    gone = weakref.ref(second.untyped_storage())
    gc.disable()
    try:
        assert gone() is not None
        del second
        assert gone() is None
    finally:
        gc.enable()
    assert first.shape == (plan.counts[0], 5)


def test_first_and_second_derivatives_of_dispatch_and_combine_are_exact() -> None:
    expert_index = random_choices(6, 4, 2)
    plan = plan_of(expert_index, 4)
    x = torch.randn(6, 3, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(6, 2, dtype=torch.float64, requires_grad=True)

    def layer(x: Tensor, weights: Tensor) -> Tensor:
        return combine([piece.tanh() * (i + 1) for i, piece in enumerate(dispatch(x, plan))], weights, plan)

    assert torch.autograd.gradcheck(layer, (x, weights))
    assert torch.autograd.gradgradcheck(layer, (x, weights))


def test_outputs_in_bfloat16_are_summed_in_the_weights_float32() -> None:
    expert_index = random_choices(6, 8, 8)
    plan = plan_of(expert_index, 8)
    outputs = [piece.bfloat16() for piece in dispatch(torch.randn(6, 3), plan)]
    weights = torch.rand(6, 8)
    y = combine(outputs, weights, plan)
    assert y.dtype == torch.float32
    torch.testing.assert_close(
        y, combine([output.float() for output in outputs], weights, plan), rtol=0, atol=0
    )


# ---- results large enough to be added in several runs

LARGE = 2**20 // 500  # columns of which 500 rows and some are added at once


def large_outputs(plan: DispatchPlan, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(count, LARGE, dtype=dtype) for count in plan.counts]


@pytest.mark.parametrize("weights_dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dtypes", [[torch.float32], [torch.bfloat16], [torch.bfloat16, torch.float16]])
@pytest.mark.parametrize("has_autocast", [False, True])
def test_large_results_are_added_as_if_at_once(
    dtypes: list[torch.dtype], weights_dtype: torch.dtype, has_autocast: bool
) -> None:
    plan = plan_of(random_choices(500, 6, 4), 6)
    outputs = [
        output.to(dtypes[i % len(dtypes)]).requires_grad_() for i, output in enumerate(large_outputs(plan))
    ]
    weights = torch.rand(500, 4).to(weights_dtype).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16, enabled=has_autocast):
        y = combine(outputs, weights, plan)
    weighted = torch.cat(outputs) * weights.flatten()[plan.order].unsqueeze(1)
    expected = weighted.new_zeros(500, LARGE).index_add(0, plan.token_index, weighted)
    assert y.dtype == expected.dtype
    assert torch.equal(y, expected)
    grad = torch.randn(500, LARGE).to(y.dtype)
    for found, wanted in zip(
        torch.autograd.grad(y, [weights, *outputs], grad),
        torch.autograd.grad(expected, [weights, *outputs], grad),
        strict=True,
    ):
        assert found.dtype == wanted.dtype
        assert torch.equal(found, wanted)


def test_of_large_results_no_copy_is_kept_for_the_backward() -> None:
    plan = plan_of(random_choices(1500, 6, 3), 6)
    outputs = [output.requires_grad_() for output in large_outputs(plan, torch.bfloat16)]
    saved: list[Tensor] = []
    with saved_tensors_hooks(lambda tensor: saved.append(tensor.detach()), lambda _: torch.ones(1)):
        combine(outputs, torch.rand(1500, 3, requires_grad=True), plan)
    kept = [tensor.data_ptr() for tensor in saved if tensor.shape[-1:] == (LARGE,)]
    assert kept == [output.data_ptr() for output in outputs]


def test_large_results_go_when_they_are_added() -> None:
    plan = plan_of(random_choices(1500, 6, 3), 6)
    watched: list[weakref.ref[Tensor]] = []
    num_alive: list[int] = []

    def watched_outputs() -> list[Tensor]:
        outputs = large_outputs(plan)
        watched.extend(map(weakref.ref, outputs))
        return outputs

    def note(tensor: Tensor) -> None:
        if tensor.shape[-1:] == (LARGE,):
            num_alive.append(sum(ref() is not None for ref in watched))

    with saved_tensors_hooks(note, lambda _: torch.ones(1)):
        combine(watched_outputs(), torch.rand(1500, 3, requires_grad=True), plan)
    assert num_alive == [6, 5, 4, 3, 2, 1]


class SeesAll(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("modes", [(SeesAll, nullcontext), (nullcontext, SeesAll), (SeesAll, SeesAll)])
def test_large_results_are_added_alike_in_both_runs_of_a_checkpoint_of_which_one_is_under_a_mode(
    modes: tuple[Callable[[], Any], Callable[[], Any]],
) -> None:
    plan = plan_of(random_choices(1500, 6, 3), 6)
    outputs, weights = large_outputs(plan), torch.rand(1500, 3, requires_grad=True)
    with modes[0]():
        y = checkpoint(combine, outputs, weights, plan, use_reentrant=False)
    with modes[1]():
        (found,) = torch.autograd.grad(y.square().sum(), weights)
    (expected,) = torch.autograd.grad(combine(outputs, weights, plan).square().sum(), weights)
    assert torch.equal(found, expected)


def test_large_results_are_added_under_a_selective_checkpoint_that_keeps_all() -> None:
    plan = plan_of(random_choices(1500, 6, 3), 6)
    outputs, weights = large_outputs(plan), torch.rand(1500, 3, requires_grad=True)
    keep_all = functools.partial(
        create_selective_checkpoint_contexts, lambda *_, **__: CheckpointPolicy.MUST_SAVE
    )
    y = checkpoint(combine, outputs, weights, plan, use_reentrant=False, context_fn=keep_all)
    (found,) = torch.autograd.grad(y.square().sum(), weights)
    (expected,) = torch.autograd.grad(combine(outputs, weights, plan).square().sum(), weights)
    assert torch.equal(found, expected)


def test_no_token_makes_an_empty_plan_and_no_slice() -> None:
    plan = plan_of(torch.empty(0, 2, dtype=torch.int64), 3)
    assert (plan.active, plan.counts, plan.order.shape) == ((), (), (0,))
    assert dispatch(torch.empty(0, 5), plan) == ()


# ---- zero gradients for idle parameters


def test_with_zero_grads_changes_no_value_and_gives_exact_zeros_even_for_infinite_parameters() -> None:
    x = torch.randn(3, requires_grad=True)
    idle = torch.full((2, 2), float("inf"), requires_grad=True)
    y = with_zero_grads(x * 2, [idle])
    assert torch.equal(y, x * 2)
    y.mul_(1).sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 2.0))
    assert torch.equal(idle.grad, torch.zeros(2, 2))


def test_with_zero_grads_of_frozen_parameters_adds_no_node() -> None:
    y = torch.randn(3, requires_grad=True) * 2
    node = y.grad_fn
    assert with_zero_grads(y, [torch.randn(2)]) is y
    assert y.grad_fn is node


class NotesZeros(TorchDispatchMode):
    """Notes when zeros like a parameter are made."""

    def __init__(self, events: list[str]) -> None:
        super().__init__()
        self.events = events

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.zeros_like.default:
            self.events.append("made")
        return func(*args, **kwargs or {})


@pytest.mark.parametrize(("num_elements", "num_together"), [(2**18, 1), (2**16, 4), (2**19, 1)])
def test_zeros_of_large_idle_parameters_are_made_when_those_before_are_taken(
    num_elements: int, num_together: int
) -> None:
    """All were in memory at once, beside the gradients that they were added to."""
    events: list[str] = []
    parameters = [torch.ones(num_elements, requires_grad=True) for _ in range(8)]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
        parameter.register_post_accumulate_grad_hook(lambda _: events.append("taken"))
    y = with_zero_grads(torch.ones(3, requires_grad=True) * 2, parameters)
    with NotesZeros(events):
        y.sum().backward()
    assert events == [*["made"] * num_together, *["taken"] * num_together] * (8 // num_together)
    assert all(torch.equal(parameter.grad, torch.ones_like(parameter)) for parameter in parameters)


def test_idle_parameters_that_have_no_shape_yet_are_left_out() -> None:
    lazy, x = nn.LazyLinear(2), torch.ones(3, requires_grad=True)
    with_zero_grads(x * 2, [*lazy.parameters()]).sum().backward()
    assert x.grad is not None
    assert all(parameter.grad is None for parameter in lazy.parameters())


def test_zeros_of_idle_parameters_may_be_changed_in_place() -> None:
    parameters = [torch.ones(2, num_columns, requires_grad=True) for num_columns in (1, 3, 2**18, 2)]
    y = with_zero_grads(torch.ones(3, requires_grad=True) * 2, parameters)
    zeros = torch.autograd.grad(y.sum(), parameters, retain_graph=True)
    assert len({grad.untyped_storage().data_ptr() for grad in zeros}) == len(parameters)
    for grad in zeros:
        assert not grad.any()
        grad.add_(1)
    for parameter in parameters:
        parameter.register_hook(lambda grad: grad.add_(2))
    y.sum().backward()
    assert all(torch.equal(parameter.grad, torch.full_like(parameter, 2)) for parameter in parameters)
