"""What a layer computes when experts are lost, in plain PyTorch: one expert after the other, over the survivors."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import torch
from torch import Tensor

from moe_autograd.moe.routing import Routing


def combine_survivors(
    x: Tensor,
    routing: Routing,
    experts: Sequence[Callable[[Tensor], Tensor]],
    *,
    lost_in_forward: Collection[int] = (),
    lost_in_backward: Collection[int] = (),
    min_experts: int = 1,
) -> Tensor:
    """Return the layer's outputs for tokens `x`, (T, D); differentiate it for the gradients.

    Args:
        x: the tokens.
        routing: of these tokens, by a router whose weights sum to one.
        experts: plain functions.
        lost_in_forward: have no output.
        lost_in_backward: have an output, and nothing flows through them.
        min_experts: a token with fewer that answered gets zeros.
    """
    lost = torch.tensor([index in lost_in_forward for index in range(len(experts))])
    is_answered_TK = ~lost[routing.expert_index]
    kept_TK = routing.combine_weights.masked_fill(~is_answered_TK, 0.0)
    has_enough_T = is_answered_TK.sum(dim=1) >= min_experts
    sums_T = kept_TK.sum(dim=1) + (~is_answered_TK).all(dim=1)  # of nobody: not zero, to be divided by
    weights_TK = kept_TK / sums_T.unsqueeze(1) * has_enough_T.unsqueeze(1)
    y = 0 * (x + routing.combine_weights.sum())  # a gradient, of zero, also where nobody answers
    for index, expert in enumerate(experts):
        tokens, choice = ((routing.expert_index == index) & is_answered_TK).nonzero(as_tuple=True)
        if len(tokens):
            output = expert(x[tokens])
            output = output.detach() if index in lost_in_backward else output
            y = y.index_add(0, tokens, weights_TK[tokens, choice].unsqueeze(1) * output)
    return y
