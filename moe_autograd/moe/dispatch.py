"""Move tokens to their experts and their results back: pure functions, differentiable any number of times.

The (T, K) choices are flattened to N = T * K and sorted by expert once. Each expert's tokens are then one
contiguous tensor, and results return in one weighted scatter-add, or several where they are large. What the sort
learned travels from `dispatch` to `combine` in a frozen `DispatchPlan`. Only the counts, which are the sizes of those
tensors, have to be known in Python: one device synchronisation a layer, none a token or an expert.

Shape letters: T tokens, D d_model, E experts, K top-k, N = T * K choices.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_autograd.autograd.uncompiled import left_alone

_LEAST_AT_ONCE = 2**20  # elements of outputs that are added at once, if there are as many: 4 MB in float32


@dataclass(frozen=True, eq=False)
class DispatchPlan:
    """Where each choice goes.

    Args:
        order: (N,), int64, positions in the flattened (T, K) choices, sorted by expert and by token within.
        token_index: (N,), int64, the token of each choice in that order.
        active: the experts that get at least one token, in order.
        counts: how many tokens each of these gets; sums to N.
    """

    order: Tensor
    token_index: Tensor
    active: tuple[int, ...]
    counts: tuple[int, ...]


def plan_dispatch(expert_index: Tensor, tokens_per_expert: Tensor) -> DispatchPlan:
    """Sort the choices by expert.

    Args:
        expert_index: (T, K), int64.
        tokens_per_expert: (E,), int64, the counts of the same choices.

    >>> plan_dispatch(torch.tensor([[2], [0], [2]]), torch.tensor([1, 0, 2])).token_index
    tensor([1, 0, 2])
    """
    order_N = expert_index.flatten().argsort(stable=True)
    counts_E = tokens_per_expert.tolist()
    active = tuple(index for index, count in enumerate(counts_E) if count)
    return DispatchPlan(
        order=order_N,
        token_index=order_N // max(expert_index.shape[1], 1),
        active=active,
        counts=tuple(counts_E[index] for index in active),
    )


def select(plan: DispatchPlan, is_kept: Tensor) -> tuple[DispatchPlan, Tensor]:
    """Leave out choices.

    Args:
        plan: of T tokens.
        is_kept: (T, K), bool.

    Returns:
        The plan of the choices that are kept, and which rows they are among all rows of `plan`: (N,), bool.

    >>> both = plan_dispatch(torch.tensor([[0, 1], [1, 0]]), torch.tensor([2, 2]))
    >>> kept, rows = select(both, torch.tensor([[False, True], [True, True]]))
    >>> kept.counts, kept.token_index, rows
    ((1, 2), tensor([1, 0, 1]), tensor([False,  True,  True,  True]))
    """
    is_kept_N = is_kept.flatten().index_select(0, plan.order)
    counts = torch.tensor(plan.counts, dtype=torch.int64, device=is_kept.device)
    place_N = torch.arange(len(counts), device=is_kept.device).repeat_interleave(counts)
    counts_left = place_N[is_kept_N].bincount(minlength=len(counts)).tolist()
    left = {index: count for index, count in zip(plan.active, counts_left, strict=True) if count}
    kept = DispatchPlan(plan.order[is_kept_N], plan.token_index[is_kept_N], tuple(left), tuple(left.values()))
    return kept, is_kept_N


def renormalize(combine_weights: Tensor, is_kept: Tensor, was_kept: Tensor | None = None) -> Tensor:
    """Share the weights of choices that are left out among the token's others, in proportion to theirs.

    Args:
        combine_weights: (T, K), floating.
        is_kept: (T, K), bool.
        was_kept: (T, K), bool, the choices that had a part in the weights; `None`: all.

    Returns:
        (T, K): rows that keep all they had, as they are. In the others, zero where a choice is left out; a row that
        keeps any has the sum it had, so a router that normalizes to one is normalized still. Where those that are kept
        have weights too small to divide by, each gets the same. Never NaN. Gradients flow to `combine_weights`.

    >>> weights = torch.tensor([[0.75, 0.25], [0.5, 0.5]])
    >>> renormalize(weights, torch.tensor([[True, True], [True, False]]))
    tensor([[0.7500, 0.2500],
            [1.0000, 0.0000]])
    """
    kept_TK = combine_weights.where(is_kept, 0.0)
    sums_T1 = kept_TK.sum(dim=1, keepdim=True)
    can_divide_T1 = sums_T1.abs() > torch.finfo(sums_T1.dtype).tiny
    even_TK = is_kept / is_kept.sum(dim=1, keepdim=True).clamp(min=1)
    # The divisor is replaced before the division: a gradient through the branch not taken is to be no NaN.
    shares_TK = torch.where(can_divide_T1, kept_TK / sums_T1.where(can_divide_T1, 1.0), even_TK)
    shared_TK = shares_TK * combine_weights.sum(dim=1, keepdim=True)
    is_left_out_TK = ~is_kept if was_kept is None else was_kept & ~is_kept
    return torch.where(is_left_out_TK.any(dim=1, keepdim=True), shared_TK, combine_weights)


def dispatch(x: Tensor, plan: DispatchPlan) -> tuple[Tensor, ...]:
    """Copy each active expert's tokens together.

    Args:
        x: (T, D).
        plan: of the same T tokens.

    Returns:
        For each of `plan.active` a tensor (num_tokens, D) with memory of its own. Gradients flow to `x`; a
        token that went to K experts receives the sum of K gradients.
    """
    slices: tuple[Tensor, ...] = _Gather.apply(x, plan.token_index, plan.counts)  # type: ignore[no-untyped-call]  # torch's own gap
    return slices


def combine(outputs: Sequence[Tensor], combine_weights: Tensor, plan: DispatchPlan) -> Tensor:
    """Add up what the experts returned for each token, times its weight.

    Args:
        outputs: for each of `plan.active` a tensor (num_tokens, D), in that order; at least one.
        combine_weights: (T, K), floating.
        plan: the one that `dispatch` used.

    Returns:
        (T, D), in the wider of both dtypes: with float32 weights, bfloat16 outputs are summed in float32.
        Gradients flow to `outputs` and `combine_weights`.
    """
    weights_N1 = sorted_weights(combine_weights, plan)
    dtype = functools.reduce(torch.promote_types, {output.dtype for output in outputs})
    y_dtype = torch.promote_types(dtype, weights_N1.dtype)
    # In half precision torch may round a sum of several once, if it adds them at once.
    runs = [outputs] if y_dtype.itemsize < 4 else _runs(outputs)
    del outputs  # each goes when it is added, where the caller holds no list of them
    if len(runs) == 1:
        weighted_ND = concatenate(runs.pop()) * weights_N1
        y_TD = weighted_ND.new_zeros(combine_weights.shape[0], weighted_ND.shape[1])
        return y_TD.index_add(0, plan.token_index, weighted_ND)
    num_rows = [sum(map(len, run)) for run in runs]
    y_TD = runs[0][0].new_zeros(combine_weights.shape[0], runs[0][0].shape[1], dtype=y_dtype)
    runs.reverse()
    for tokens, weights in zip(plan.token_index.split(num_rows), weights_N1.split(num_rows), strict=True):
        y_TD = _AddRows.apply(y_TD, tokens, rows_of(runs.pop()).to(dtype) * weights)  # type: ignore[no-untyped-call]  # torch's own gap
    return y_TD


def sorted_weights(combine_weights: Tensor, plan: DispatchPlan) -> Tensor:
    """Return the weights of the choices, (T, K), in the order of the plan: (N, 1)."""
    return combine_weights.flatten().index_select(0, plan.order).unsqueeze(1)


def _runs(outputs: Sequence[Tensor]) -> list[Sequence[Tensor]]:
    """Put together neighbours of which few rows are to be added: each addition by itself takes its time, too."""
    ends, num_elements = [0], 0
    for index, output in enumerate(outputs):
        if type(output) is not Tensor:
            return [outputs]
        num_elements += output.numel()
        if num_elements >= _LEAST_AT_ONCE:
            ends.append(index + 1)
            num_elements = 0
    if len(ends) < 3:
        return [outputs]
    return [outputs[start:end] for start, end in itertools.pairwise([*ends[:-1], len(outputs)])]


def rows_of(run: Sequence[Tensor]) -> Tensor:
    """Return the rows of all of them, of one tensor itself."""
    return run[0] if len(run) == 1 else concatenate(run)


def concatenate(outputs: Sequence[Tensor]) -> Tensor:
    """Return the rows of all of `outputs`, in the widest of their dtypes.

    Under autocast to bfloat16 `torch.cat` refuses float16, which experts may return that are so elsewhere, and the
    other way round. It is switched off by functions of C: Ctrl-C that comes when `torch.autocast` is left, in Python,
    would leave its cache of weights filled for good.
    """
    kind = outputs[0].device.type
    if not torch.is_autocast_enabled(kind):
        return torch.cat(tuple(outputs))
    try:
        torch.set_autocast_enabled(kind, False)
        return torch.cat(tuple(outputs))
    finally:
        torch.set_autocast_enabled(kind, True)


class _AddRows(torch.autograd.Function):
    """``y.index_add_(0, token_index, rows)``, which keeps the rows for its backward though it needs none of them.

    Not in place where somebody sees what is computed: a selective checkpoint refuses changes of what it keeps.
    """

    @staticmethod
    def forward(ctx: Any, y: Tensor, token_index: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(token_index)
        if torch._C._len_torch_dispatch_stack():
            return y.index_add(0, token_index, rows)
        ctx.mark_dirty(y)
        return y.index_add_(0, token_index, rows)

    @staticmethod
    @left_alone
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor, None, Tensor]:
        (token_index,) = ctx.saved_tensors
        return grad_y, None, grad_y.index_select(0, token_index)


class _Gather(torch.autograd.Function):
    """``x[token_index].split(counts)``, but every piece has memory and a version counter of its own.

    Pieces that are views of one tensor would let an expert that works in place (a leading
    ``ReLU(inplace=True)``) invalidate what its neighbours saved, and one expert's saved input would keep
    everybody's tokens alive.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, token_index: Tensor, counts: tuple[int, ...]) -> tuple[Tensor, ...]:
        ctx.save_for_backward(token_index)
        ctx.x_shape = x.shape
        return tuple(x.index_select(0, tokens) for tokens in torch.split(token_index, list(counts)))

    @staticmethod
    @left_alone
    def backward(ctx: Any, *grad_slices: Tensor) -> tuple[Tensor, None, None]:
        (token_index,) = ctx.saved_tensors
        grad_ND = torch.cat(grad_slices)
        return grad_ND.new_zeros(ctx.x_shape).index_add(0, token_index, grad_ND), None, None
