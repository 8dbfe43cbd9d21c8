"""Routers: modules that look at tokens and return a `Routing`.

A router of one's own is any module with an attribute `num_experts` that maps `x`, (..., D), to the
`Routing` of its T tokens.

Shape letters: T tokens, D d_model, E experts, K top-k, N = T * K choices.
"""

from __future__ import annotations

import math
import operator
import sys

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moe_autograd.moe.routing import Routing

# By more than three roundings: 1.1 times a share of 10 is 11.000000000000002, and is not to be 12. Unlike a fraction,
# this can be compiled for any number of tokens.
_ROUNDED_DOWN = 1 - 1e-15


class TopKRouter(nn.Module):
    """Choose the `top_k` most probable experts of each token, as Mixtral does.

    Softmax over all experts in float32, then the `top_k` largest, then weights that sum to one. The
    softmax is taken in float32 whatever the tokens' dtype (float64 stays float64), because bfloat16 has
    too few digits to order close probabilities. Ties go as `torch.topk` decides.

    Args:
        d_model: width of a token.
        num_experts: how many experts there are to choose from.
        top_k: how many of them each token goes to, 1 to `num_experts`.
        normalize: divide the chosen probabilities by their sum. `False` leaves them as they are, as the Switch
            layer does: a single weight (``top_k=1``) would always be one and teach the router nothing.
        capacity_factor: how many times its even share, ``T * top_k / num_experts`` tokens rounded up, an expert
            takes at most. It keeps the choices with the largest weights; the others are dropped: they add nothing to
            their tokens, whose other weights stay as they are. `None` drops nothing. An attribute, so that
            evaluation may have another one.
        device: where to create the weight, as in `torch.nn.Linear`.
        dtype: the weight's dtype, as in `torch.nn.Linear`.

    The one parameter is `weight`, (num_experts, d_model); there is no bias.

    Raises:
        ValueError: `top_k` or a size is out of range, or a token has another width.
        TypeError: what it is called with is no tensor, or one of whole or complex numbers.

    Autograd: gradients flow to the tokens and to the weight, through the weights of the chosen experts and through
    `logits` and `probabilities`; which experts are chosen has none. To any order.

    Threads: may be called from several.

    Source: Jiang et al., "Mixtral of Experts" (arXiv:2401.04088), section 2.1.

    >>> router = TopKRouter(d_model=4, num_experts=3, top_k=2)
    >>> routing = router(torch.randn(5, 4))
    >>> routing.expert_index.shape, torch.allclose(routing.combine_weights.sum(-1), torch.ones(5))
    (torch.Size([5, 2]), True)
    """

    def __init__(
        self,
        d_model: int,
        num_experts: int,
        top_k: int,
        *,
        normalize: bool = True,
        capacity_factor: float | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not all(hasattr(size, "__index__") and size >= 1 for size in (d_model, num_experts)):
            raise ValueError(
                f"TopKRouter: expected whole d_model and num_experts of at least 1, got "
                f"(d_model={d_model!r}, num_experts={num_experts!r}). Pass positive sizes."
            )
        if not hasattr(top_k, "__index__") or not 1 <= top_k <= num_experts:
            raise ValueError(
                f"TopKRouter: expected a whole top_k from 1 to num_experts, got {top_k!r} (num_experts={num_experts}). "
                "Choose a smaller top_k or add experts."
            )
        if capacity_factor is not None and not 0 < capacity_factor <= sys.float_info.max:
            raise ValueError(
                f"TopKRouter: expected a positive capacity_factor or None, got {capacity_factor}. 1.0 lets each expert "
                "take its even share; None drops no token."
            )
        self.d_model = operator.index(d_model)
        self.num_experts = operator.index(num_experts)
        self.top_k = operator.index(top_k)
        self.normalize = normalize
        self.capacity_factor = capacity_factor
        self.weight = nn.Parameter(torch.empty(num_experts, d_model, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Draw the weight anew, as `torch.nn.Linear` draws its own."""
        nn.init.kaiming_uniform_(self.weight, a=math.sqrt(5))

    def forward(self, x: Tensor) -> Routing:
        """Decide for each token.

        Args:
            x: (..., d_model), floating; leading dimensions are flattened to T.

        Returns:
            A `Routing` of T tokens.
        """
        if not isinstance(x, Tensor):
            raise TypeError(
                f"TopKRouter: expected a tensor of shape (..., {self.d_model}), got {type(x).__name__} "
                f"(d_model={self.d_model}). Pass torch.as_tensor(x)."
            )
        if not x.is_floating_point():
            raise _no_floating(x)
        if x.dim() == 0 or x.shape[-1] != self.d_model:
            raise ValueError(
                f"TopKRouter: expected x of shape (..., {self.d_model}), got {tuple(x.shape)} "
                f"(d_model={self.d_model}). Check the layer before, or d_model."
            )
        logits_TE = F.linear(x.reshape(-1, self.d_model), self.weight)
        softmax_dtype = torch.promote_types(logits_TE.dtype, torch.float32)
        probabilities_TE = F.softmax(logits_TE, dim=-1, dtype=softmax_dtype)
        weights_TK, expert_index_TK = torch.topk(probabilities_TE, self.top_k, dim=-1)
        if self.normalize:
            weights_TK = weights_TK / weights_TK.sum(dim=-1, keepdim=True)
        if self.capacity_factor is None:
            return Routing(logits_TE, probabilities_TE, expert_index_TK, weights_TK)
        num_choices = expert_index_TK.numel()
        share = float(self.capacity_factor) * num_choices / self.num_experts * _ROUNDED_DOWN
        capacity = math.ceil(min(share, num_choices))
        is_kept_TK = within_capacity(expert_index_TK, weights_TK, capacity)
        weights_TK = weights_TK.where(is_kept_TK, 0.0)
        return Routing(logits_TE, probabilities_TE, expert_index_TK, weights_TK, is_kept_TK)

    def extra_repr(self) -> str:
        """Show the sizes in the module's `repr`."""
        sizes = f"d_model={self.d_model}, num_experts={self.num_experts}, top_k={self.top_k}"
        return sizes if self.capacity_factor is None else f"{sizes}, capacity_factor={self.capacity_factor}"


def _no_floating(x: Tensor) -> TypeError:
    advice = "Pass x.float(); of ids, embeddings."
    if x.is_complex():
        advice = "In a router of yours, call it with real ones, such as x.abs()."
    return TypeError(f"TopKRouter: expected floating numbers, got {tuple(x.shape)} of {x.dtype}. {advice}")


def within_capacity(expert_index: Tensor, weights: Tensor, capacity: int) -> Tensor:
    """Return which choices are among the `capacity` ones of largest weight of their expert: (T, K), bool.

    Args:
        expert_index: (T, K), int64.
        weights: (T, K), floating; of equal ones the earlier token's counts as larger.
        capacity: at most so many choices an expert.

    >>> within_capacity(torch.tensor([[0], [0], [1]]), torch.tensor([[0.6], [0.9], [0.5]]), capacity=1).flatten()
    tensor([False,  True,  True])
    """
    index_N = expert_index.flatten()
    order_N = weights.detach().flatten().argsort(descending=True, stable=True)
    order_N = order_N[index_N[order_N].argsort(stable=True)]  # by expert, and by weight within
    counts_E = index_N.bincount()
    starts_N = (counts_E.cumsum(0) - counts_E).repeat_interleave(counts_E)
    rank_N = torch.arange(len(index_N), device=index_N.device) - starts_N
    is_kept_N = torch.empty_like(index_N, dtype=torch.bool)
    is_kept_N[order_N] = rank_N < capacity
    return is_kept_N.reshape(expert_index.shape)
