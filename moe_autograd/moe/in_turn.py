"""Without gradients, experts that compute one after the other: the plain loop, in the loop's memory.

A backward wants the tokens of all experts, and a map on threads has their tokens and results on the way at once. Where
there is neither, an expert's tokens are gathered when it is called and its results added soon after, and their memory
is free for the next. The same is added in the same order, so the numbers are those of `combine`. Only where experts
return several dtypes, each result is weighted in its own, as in the loop, and not in the widest of all.

Shape letters: T tokens, D d_model, K top-k, N = T * K choices, R of these.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, nn

from moe_autograd.autograd.in_turn import Way, name_guilty_in_turn, way_in_turn
from moe_autograd.moe.dispatch import DispatchPlan, rows_of, sorted_weights
from moe_autograd.moe.experts import check_output

_LEAST_AT_ONCE = 2**17  # elements of results that are added at once, if there are as many: 512 KB in float32


def way_without_gradients(
    experts: Sequence[nn.Module],
    x: Tensor,
    combine_weights: Tensor,
    plan: DispatchPlan,
    max_concurrency: int | None,
) -> Way | None:
    """Return how `compute_in_turn` calls experts; `None` if it would not, or if it would save next to nothing.

    Args: as there; `max_concurrency` is how many may be called at once.
    """
    num_elements = sum(plan.counts) * x.shape[1]
    if torch.is_grad_enabled() or num_elements < 2 * _LEAST_AT_ONCE:
        return None
    if not x.is_cpu or type(combine_weights) is not Tensor:
        return None
    like = [(x[:count],) for count in plan.counts]  # of their shapes; nothing is gathered yet
    way = way_in_turn(experts, like, [{}] * len(experts), max_concurrency=max_concurrency)
    return None if way is None or way.draws else way


def compute_in_turn(
    way: Way, experts: Sequence[nn.Module], x: Tensor, combine_weights: Tensor, plan: DispatchPlan
) -> Tensor:
    """Return what `combine` makes of what the experts return for what `dispatch` gives them.

    Args:
        way: how to call them.
        experts: those of `plan.active`.
        x: (T, D).
        combine_weights: (T, K), floating.
        plan: of the same T tokens.

    Raises:
        TypeError: an expert returns something that is not a tensor.
        ValueError: it changes the shape of its tokens.
        BaseException: of an expert, with a note that names it.
    """
    weights_N1 = sorted_weights(combine_weights, plan)
    tokens_per_call = plan.token_index.split(list(plan.counts))

    def output_of(position: int) -> Tensor:
        x_RD = x.index_select(0, tokens_per_call[position])
        try:
            y_RD: Tensor = way.compute(experts[position], x_RD)
        except BaseException as error:
            name_guilty_in_turn(error, position, experts, [f"expert {index}" for index in plan.active])
            raise
        check_output(plan.active[position], x_RD, y_RD)
        return y_RD

    y_TD = x.new_zeros(x.shape, dtype=combine_weights.dtype)
    for calls, rows in _runs(plan, x.shape[1], at_once=combine_weights.dtype.itemsize < 4):
        # Without names each is freed before the next is made.
        y_TD = _add(y_TD, plan.token_index[rows], rows_of(list(map(output_of, calls))) * weights_N1[rows])
    return y_TD


def _runs(plan: DispatchPlan, width: int, *, at_once: bool) -> Iterator[tuple[range, slice]]:
    """Yield the positions of calls whose results are added together, and which of the N choices these are.

    Args:
        plan: of the calls.
        width: D.
        at_once: whether all are. In half precision torch may round a sum of several once, if it adds them at once.
    """
    first_call = first_row = 0
    for call, end_row in enumerate(itertools.accumulate(plan.counts)):
        is_last = call == len(plan.counts) - 1
        if is_last or (not at_once and (end_row - first_row) * width >= _LEAST_AT_ONCE):
            yield range(first_call, call + 1), slice(first_row, end_row)
            first_call, first_row = call + 1, end_row


def _add(y_TD: Tensor, token_index: Tensor, weighted_RD: Tensor) -> Tensor:
    dtype = torch.promote_types(y_TD.dtype, weighted_RD.dtype)
    return y_TD.to(dtype).index_add_(0, token_index, weighted_RD.to(dtype))
