"""A layer's pass in which experts may be lost: who is called, and what is made of those that answer.

::

    routing ── without those left alone ──▶ dispatch ──▶ experts, all at once ──▶ combine ──▶ y
                     (`Rests`)                              │ (`Attendance`)          │
                                                            ▼                         ├ weights renormalised
                                                     routing.failures                 └ too few: raise, or zeros

Rules:

1. What counts is each token's own experts: one that fails leaves the tokens of others as they are.
2. An expert is left alone only as long as each of its tokens has enough others, or may become zeros.
3. An expert that is lost between forward and backward has a part in the values, and none in the gradients: what
   would flow through it is left out. What the router learns from its output, which is known, is not.

Shape letters: T tokens, D d_model, E experts, K top-k.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn

from moe_autograd.autograd.recompute import Recompute
from moe_autograd.errors import TooFewExpertsError
from moe_autograd.moe.attendance import Attendance, name_of
from moe_autograd.moe.dispatch import DispatchPlan, combine, dispatch, renormalize, select
from moe_autograd.moe.experts import check_output
from moe_autograd.moe.failures import ExpertFailure, Rests, Tolerance
from moe_autograd.moe.routing import Routing

_MAX_NAMED = 8  # tokens, or failures, in one message


def compute_with_those_that_answer(
    x: Tensor,
    routing: Routing,
    plan: DispatchPlan,
    experts: Sequence[nn.Module],
    rests: Rests,
    tolerance: Tolerance,
    *,
    max_concurrency: int | None,
    recompute: bool | Recompute,
) -> tuple[Tensor, Sequence[int]]:
    """Dispatch tokens, call experts, and combine what those return that answer.

    Args:
        x: (T, D).
        routing: of these tokens; failures are added to its list.
        plan: of all choices.
        experts: of the layer, all of them.
        rests: of the layer.
        tolerance: of the layer.
        max_concurrency: how many experts run at once at most.
        recompute: whether, or how, experts that run here keep only their input.

    Returns:
        (T, D), and the experts that answered.

    Raises:
        TooFewExpertsError: some tokens have fewer than `min_experts`, and may not become zeros.
    """
    plan = _without_resting(plan, routing, experts, rests, tolerance)
    called = [experts[index] for index in plan.active]
    attendance = Attendance(called, plan, routing.failures, rests, tolerance)
    slices = dispatch(x, plan) if called else ()
    outputs = attendance.call(slices, max_concurrency=max_concurrency, recompute=recompute)
    for position, tokens in enumerate(slices):
        if position not in attendance.lost:
            check_output(plan.active[position], tokens, outputs[position])
    if attendance.lost:
        lost = {plan.active[position] for position in attendance.lost}
        outputs = [output for position, output in enumerate(outputs) if position not in attendance.lost]
        plan, _ = select(plan, _all_but(lost, routing)[routing.expert_index])
    y = _combine(x, outputs, routing, plan, tolerance, attendance.take_first_error())
    attendance.follow_backwards_of(y)
    return y, plan.active


def _without_resting(
    plan: DispatchPlan,
    routing: Routing,
    experts: Sequence[nn.Module],
    rests: Rests,
    tolerance: Tolerance,
) -> DispatchPlan:
    """Return the plan without the experts that are left alone (Rule 2), and note them."""
    resting = {index: reason for index, reason in rests.resting().items() if index in plan.active}
    if not resting:
        return plan
    is_called_E = _all_but(resting, routing)
    if not tolerance.allow_zero_outputs:
        is_short_T = _is_short(is_called_E[routing.expert_index], routing, tolerance)
        is_called_E[routing.expert_index[is_short_T].flatten()] = True
    plan, _ = select(plan, is_called_E[routing.expert_index])
    routing.failures.extend(
        ExpertFailure(index, name_of(experts[index], index), "forward", reason)
        for index, reason in resting.items()
        if index not in plan.active
    )
    return plan


def _combine(
    x: Tensor,
    outputs: Sequence[Tensor],
    routing: Routing,
    plan: DispatchPlan,
    tolerance: Tolerance,
    cause: Exception | None,
) -> Tensor:
    """Combine the outputs of the experts that answered, for which `plan` is (Rule 1)."""
    if not routing.failures:
        return combine(outputs or [x[:0]], routing.combine_weights, plan)
    is_answered_TK = _all_but({failure.expert_index for failure in routing.failures}, routing)[
        routing.expert_index
    ]
    is_short_T = _is_short(is_answered_TK, routing, tolerance)
    short = is_short_T.nonzero().flatten().tolist()
    if short and not tolerance.allow_zero_outputs:
        raise _too_few(short, routing, tolerance) from cause
    # Rows of tokens that become zeros are taken out, not multiplied by zero, which would keep an infinite one.
    is_kept_TK = _of_those_kept(is_answered_TK, routing) & ~is_short_T.unsqueeze(1)
    kept_plan, is_kept_N = select(plan, is_kept_TK)
    rows_ND = torch.cat(tuple(outputs))[is_kept_N] if outputs else x[:0]
    return combine([rows_ND], renormalize(routing.combine_weights, is_kept_TK), kept_plan)


def _is_short(is_there_TK: Tensor, routing: Routing, tolerance: Tolerance) -> Tensor:
    """Return (T,), bool: which tokens have too few experts; of what the router dropped they have no need."""
    num_there_T = _of_those_kept(is_there_TK, routing).sum(dim=1)
    num_wanted_T = _of_those_kept(torch.ones_like(is_there_TK), routing).sum(dim=1)
    return num_there_T < num_wanted_T.clamp(max=tolerance.min_experts)


def _of_those_kept(choices_TK: Tensor, routing: Routing) -> Tensor:
    return choices_TK if routing.is_kept is None else choices_TK & routing.is_kept


def _all_but(expert_indexes: Collection[int], routing: Routing) -> Tensor:
    """Return (E,), bool: False at these."""
    is_there_E = torch.ones(routing.num_experts, dtype=torch.bool, device=routing.expert_index.device)
    is_there_E[list(expert_indexes)] = False
    return is_there_E


def _too_few(short: Sequence[int], routing: Routing, tolerance: Tolerance) -> TooFewExpertsError:
    failures = routing.failures
    return TooFewExpertsError(
        f"MixtureOfExperts: expected at least {tolerance.min_experts} of the {routing.top_k} experts of every token to "
        f"answer, got fewer for {len(short)} of {routing.num_tokens} tokens ({_listed(short, ', ')}), since these did "
        f"not: {_listed(failures, '; ')}. Repeat the pass, or let such tokens become zeros (allow_zero_outputs=True).",
        tokens=short,
        failures=failures,
    )


def _listed(things: Sequence[object], separator: str) -> str:
    more = len(things) - _MAX_NAMED
    named = separator.join(map(str, things[:_MAX_NAMED]))
    return f"{named}{separator}and {more} more" if more > 0 else named
