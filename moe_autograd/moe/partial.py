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
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moe_autograd.autograd.recompute import Recompute
from moe_autograd.errors import TooFewExpertsError, listed
from moe_autograd.moe.attendance import Attendance, name_of
from moe_autograd.moe.dispatch import DispatchPlan, combine, concatenate, dispatch, renormalize, select
from moe_autograd.moe.experts import check_output
from moe_autograd.moe.failures import ExpertFailure, Rests, Tolerance
from moe_autograd.moe.routing import Routing


@dataclass(frozen=True)
class PartialPass:
    """One pass of a layer in which experts may be lost.

    Args:
        routing: of the pass's tokens; failures are added to its list.
        experts: of the layer, all of them.
        rests: of the layer.
        tolerance: of the layer.
    """

    routing: Routing
    experts: Sequence[nn.Module]
    rests: Rests
    tolerance: Tolerance

    def compute(
        self, x: Tensor, plan: DispatchPlan, *, max_concurrency: int | None, recompute: bool | Recompute
    ) -> tuple[Tensor, Sequence[int]]:
        """Dispatch tokens, call experts, and combine what those return that answer.

        Args:
            x: (T, D).
            plan: of all choices.
            max_concurrency: how many experts run at once at most.
            recompute: whether, or how, experts that run here keep only their input.

        Returns:
            (T, D), and the experts that answered.

        Raises:
            TooFewExpertsError: some tokens have fewer than `min_experts`, and may not become zeros.
        """
        plan = self._without_resting(plan)
        called = [self.experts[index] for index in plan.active]
        attendance = Attendance(called, plan, self.routing.failures, self.rests, self.tolerance)
        slices = dispatch(x, plan) if called else ()
        outputs = attendance.call(slices, max_concurrency=max_concurrency, recompute=recompute)
        for position, tokens in enumerate(slices):
            if position not in attendance.lost:
                check_output(plan.active[position], tokens, outputs[position])
        if attendance.lost:
            lost = {plan.active[position] for position in attendance.lost}
            outputs = [output for position, output in enumerate(outputs) if position not in attendance.lost]
            plan, _ = select(plan, self._choices(self._all_but(lost)))
        y = self._combine(x, outputs, plan, attendance.take_first_error())
        attendance.follow_backwards_of(y)
        return y, plan.active

    def _without_resting(self, plan: DispatchPlan) -> DispatchPlan:
        """Return the plan without the experts that are left alone (Rule 2), and note them."""
        resting = {index: reason for index, reason in self.rests.resting().items() if index in plan.active}
        if not resting:
            return plan
        is_called_E = self._all_but(resting)
        if not self.tolerance.allow_zero_outputs:
            is_short_T = self._is_short(self._choices(is_called_E))
            is_called_E[self.routing.expert_index[is_short_T].flatten()] = True
        plan, _ = select(plan, self._choices(is_called_E))
        self.routing.failures.extend(
            ExpertFailure(index, name_of(self.experts[index], index), "forward", reason)
            for index, reason in resting.items()
            if index not in plan.active
        )
        return plan

    def _combine(
        self, x: Tensor, outputs: Sequence[Tensor], plan: DispatchPlan, cause: Exception | None
    ) -> Tensor:
        """Combine the outputs of the experts that answered, for which `plan` is (Rule 1)."""
        weights_TK, failures = self.routing.combine_weights, self.routing.failures
        if not failures:
            return combine(outputs or [x[:0]], weights_TK, plan)
        is_answered_TK = self._choices(self._all_but({failure.expert_index for failure in failures}))
        is_short_T = self._is_short(is_answered_TK)
        short = is_short_T.nonzero().flatten().tolist()
        if short and not self.tolerance.allow_zero_outputs:
            raise self._too_few(short) from cause
        # Rows of tokens that become zeros are taken out, not multiplied by zero, which would keep an infinite one.
        is_kept_TK = self._of_those_kept(is_answered_TK) & ~is_short_T.unsqueeze(1)
        kept_plan, is_kept_N = select(plan, is_kept_TK)
        rows_ND = concatenate(outputs)[is_kept_N] if outputs else x[:0]
        weights_TK = renormalize(weights_TK, is_kept_TK, self.routing.is_kept)
        return combine([rows_ND], weights_TK, kept_plan)

    def _is_short(self, is_there_TK: Tensor) -> Tensor:
        """Return (T,), bool: which tokens have too few experts; of what the router dropped they have no need."""
        num_there_T = self._of_those_kept(is_there_TK).sum(dim=1)
        num_wanted_T = self._of_those_kept(torch.ones_like(is_there_TK)).sum(dim=1)
        return num_there_T < num_wanted_T.clamp(max=self.tolerance.min_experts)

    def _of_those_kept(self, choices_TK: Tensor) -> Tensor:
        return choices_TK if self.routing.is_kept is None else choices_TK & self.routing.is_kept

    def _all_but(self, expert_indexes: Collection[int]) -> Tensor:
        """Return (E,), bool: False at these."""
        device = self.routing.expert_index.device
        is_there_E = torch.ones(self.routing.num_experts, dtype=torch.bool, device=device)
        is_there_E[list(expert_indexes)] = False
        return is_there_E

    def _choices(self, of_experts_E: Tensor) -> Tensor:
        """Return what is known of the experts, (E,), for each choice, (T, K)."""
        return of_experts_E[self.routing.expert_index]

    def _too_few(self, short: Sequence[int]) -> TooFewExpertsError:
        failures = self.routing.failures
        return TooFewExpertsError(
            f"MixtureOfExperts: expected at least {self.tolerance.min_experts} of the {self.routing.top_k} experts of "
            f"every token to answer, got fewer for {len(short)} of {self.routing.num_tokens} tokens "
            f"({listed(short, ', ')}), since these did not: {listed(failures, '; ')}. Repeat the pass, or let such "
            "tokens become zeros (allow_zero_outputs=True).",
            tokens=short,
            failures=failures,
        )
