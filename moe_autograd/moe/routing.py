"""`Routing`: what a router decided for a batch of tokens, frozen.

A router returns it, dispatch and combine read it, the caller gets it back with ``return_routing=True``.
The layer keeps nothing of it, so a layer may run in several threads and its losses are never those of
another batch.

Shape letters: T tokens, E experts, K top-k.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from moe_autograd.moe import losses
from moe_autograd.moe.failures import ExpertFailure


@dataclass(frozen=True, eq=False, repr=False)
class Routing:
    """Say which experts each token goes to, and with which weights they are combined.

    Args:
        logits: (T, E), floating, what the router's weight made of the tokens.
        probabilities: (T, E), float32 or float64, each row sums to one.
        expert_index: (T, K), int64, the experts of each token, most probable first, none of them twice.
        combine_weights: (T, K), float32 or float64, the weight of each of these experts' outputs.
        is_kept: (T, K), bool, which choices are computed; the others are dropped, and their weights are zero. `None`:
            all are.
        failures: the experts that a layer with ``on_failure="drop"`` went on without, in its forward and, as they are
            found, in its backwards. Nothing else here changes with them: it is what the router decided.

    Autograd: all but `expert_index` carry gradients to the router and to the tokens.

    Threads: immutable but for `failures`, which grows; read it from anywhere.
    """

    logits: Tensor
    probabilities: Tensor
    expert_index: Tensor
    combine_weights: Tensor
    is_kept: Tensor | None = None
    failures: list[ExpertFailure] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        """T, the number of tokens."""
        return self.expert_index.shape[0]

    @property
    def num_experts(self) -> int:
        """E, the number of experts there were to choose from."""
        return self.probabilities.shape[1]

    @property
    def top_k(self) -> int:
        """K, the number of experts chosen for each token."""
        return self.expert_index.shape[1]

    @property
    def tokens_per_expert(self) -> Tensor:
        """How many tokens chose each expert, before any are dropped: (E,), int64, summing to T * K."""
        return torch.bincount(self.expert_index.flatten(), minlength=self.num_experts)

    @property
    def num_dropped(self) -> int:
        """How many of the T * K choices are not computed."""
        return 0 if self.is_kept is None else int((~self.is_kept).sum())

    @property
    def load_balancing_loss(self) -> Tensor:
        """`losses.load_balancing_loss` of this decision: a scalar that is `top_k` when the load is even."""
        return losses.load_balancing_loss(self.probabilities, self.tokens_per_expert)

    @property
    def z_loss(self) -> Tensor:
        """`losses.z_loss` of the logits: a scalar that is small when they are."""
        return losses.z_loss(self.logits)

    def __repr__(self) -> str:
        return (
            f"Routing(num_tokens={self.num_tokens}, num_experts={self.num_experts}, top_k={self.top_k}, "
            f"tokens_per_expert={self.tokens_per_expert.tolist()})"
        )


def checked_loads(routing: Any, num_tokens: int, num_experts: int) -> Tensor:
    """Return `tokens_per_expert` of what a router has returned, if that fits the layer.

    Raises:
        TypeError: it is not a `Routing`, what it holds is no tensor, or its choices are not whole numbers.
        ValueError: a tensor has another shape than the tokens and experts ask for, or an expert does not exist.
    """
    if not isinstance(routing, Routing):
        raise TypeError(
            f"MixtureOfExperts: expected the router to return a Routing, got {type(routing).__name__}. "
            "See TopKRouter.forward for one."
        )
    index = routing.expert_index
    _check_is_tensor("expert_index", index)
    if index.dtype not in (torch.int64, torch.int32):
        raise TypeError(
            f"Routing: expected expert_index of int64, got {index.dtype}. Pass what torch.topk returns as indices."
        )
    top_k = index.shape[1] if index.dim() == 2 else "top_k"
    row = "A token's choices are a row, also where it has one."
    each_choice = "One for each choice in expert_index, of the same shape."
    each_expert = (
        f"One for each expert: the layer needs as many as the router chooses from, and has {num_experts}."
    )
    _check_shape("expert_index", index, (num_tokens, top_k), row)
    _check_shape("combine_weights", routing.combine_weights, (num_tokens, top_k), each_choice)
    _check_shape("probabilities", routing.probabilities, (num_tokens, num_experts), each_expert)
    if routing.is_kept is not None:
        _check_shape("is_kept", routing.is_kept, (num_tokens, top_k), each_choice)
        if routing.is_kept.dtype is not torch.bool:
            raise TypeError(
                f"Routing: expected is_kept of bool, got {routing.is_kept.dtype}. Compare, as in w > 0."
            )
    advice = f"Choose from 0 to {num_experts - 1}; is_kept says which choices are left out."
    try:
        loads = routing.tokens_per_expert
    except RuntimeError as error:
        if "non-negative" not in str(error):  # a tensor without numbers, such as one of device "meta"
            raise
        raise ValueError(
            f"Routing: expected experts that exist in expert_index, got a negative one. {advice}"
        ) from error
    if len(loads) != num_experts:
        raise ValueError(
            f"Routing: expected experts that exist in expert_index, got {len(loads) - 1} "
            f"(num_experts={num_experts}). {advice}"
        )
    return loads


def _check_shape(name: str, tensor: Tensor, shape: tuple[int | str, ...], columns: str) -> None:
    """Raise unless `tensor` is one and has this shape; `columns` is the advice where its rows are the tokens."""
    _check_is_tensor(name, tensor)
    if tuple(tensor.shape) != shape:
        has_rows = tensor.dim() < 3 and tensor.shape[:1] == shape[:1]
        advice = columns if has_rows else "A router flattens the leading dimensions of x into one of tokens."
        raise ValueError(
            f"Routing: expected {name} of shape ({', '.join(map(str, shape))}), got {tuple(tensor.shape)}. {advice}"
        )


def _check_is_tensor(name: str, value: Any) -> None:
    if not isinstance(value, Tensor):
        raise TypeError(
            f"Routing: expected {name} to be a tensor, got {type(value).__name__}. Pass one with a row for each token."
        )
