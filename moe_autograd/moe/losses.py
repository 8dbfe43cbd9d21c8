"""Auxiliary losses of a router: pure functions of what it computed.

Shape letters: T tokens, E experts.
"""

from __future__ import annotations

import torch
from torch import Tensor


def load_balancing_loss(probabilities: Tensor, tokens_per_expert: Tensor) -> Tensor:
    """Return ``E * sum_i f_i * P_i``, which grows as tokens pile up on the same experts.

    `f_i` is the number of choices that fell on expert `i`, divided by the number of tokens; `P_i` is the mean
    probability of expert `i`. With an even load the value is `top_k`, which is 1 for the Switch layer.

    Args:
        probabilities: (T, E), floating; each row sums to one.
        tokens_per_expert: (E,), integer; a token counts once for each expert chosen for it.

    Returns:
        A scalar of the dtype of `probabilities`; 0 for no token. Gradients flow to `probabilities` only:
        counting is not differentiable.

    Source: Fedus, Zoph, Shazeer, "Switch Transformers" (arXiv:2101.03961), equations 4 to 6, without the
    factor alpha; for `top_k > 1` as Mixtral's reference implementation counts (`load_balancing_loss_func`
    of Hugging Face transformers): choices are divided by tokens, not by choices.

    >>> even = torch.full((4, 2), 0.5)
    >>> load_balancing_loss(even, torch.tensor([2, 2])).item()
    1.0
    """
    num_tokens, num_experts = probabilities.shape
    num_tokens = max(num_tokens, 1)
    fractions_E = tokens_per_expert.to(probabilities.dtype) / num_tokens
    mean_probabilities_E = probabilities.sum(dim=0) / num_tokens
    return num_experts * (fractions_E * mean_probabilities_E).sum()


def z_loss(logits: Tensor) -> Tensor:
    """Return the mean squared ``logsumexp`` of the router's logits, which keeps them small.

    Args:
        logits: (T, E), floating; computed in float32 at least.

    Returns:
        A scalar, 0 for no token. Gradients flow to `logits`.

    Source: Zoph et al., "ST-MoE" (arXiv:2202.08906), equation 5.

    >>> round(z_loss(torch.zeros(3, 4)).item(), 4)  # log(4) squared
    1.9218
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return torch.logsumexp(logits, dim=-1).square().sum() / max(logits.shape[0], 1)
