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
    rows = []
    for x_D, expert_index, weights_K in zip(x, routing.expert_index, routing.combine_weights, strict=True):
        answered = [k for k, index in enumerate(expert_index.tolist()) if index not in lost_in_forward]
        row = 0 * (x_D + weights_K.sum())  # so that there is a gradient, of zero, where nobody answers
        for k in answered:
            index = int(expert_index[k])
            y = experts[index](x_D)
            weight = weights_K[k] / weights_K[answered].sum() if len(answered) >= min_experts else 0.0
            row = row + weight * (y.detach() if index in lost_in_backward else y)
        rows.append(row)
    return torch.stack(rows)
