"""One layer in the hands of four libraries: the same router, the same SwiGLU experts, the same weights.

Each `build` takes ours, which has drawn the weights, and returns the peer's layer with a copy of them. All map
(1, num_tokens, d_model) to the same shape.

Shape letters: D d_model, F d_ff, E experts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moe_autograd import MixtureOfExperts, SwiGLUExpert, TopKRouter


@dataclass(frozen=True)
class Size:
    """Of a layer, and of what it is given."""

    num_experts: int
    top_k: int
    d_model: int
    d_ff: int
    num_tokens: int

    def __str__(self) -> str:
        return (
            f"{self.num_experts} of {self.d_model} x {self.d_ff}, top-{self.top_k}, {self.num_tokens} tokens"
        )


def build_ours(size: Size) -> MixtureOfExperts:
    experts = [SwiGLUExpert(size.d_model, size.d_ff) for _ in range(size.num_experts)]
    return MixtureOfExperts(TopKRouter(size.d_model, size.num_experts, size.top_k), experts)


class PlainLoop(nn.Module):
    """The loop that `MixtureOfExperts` means, written down; it has our modules' own weights."""

    def __init__(self, ours: MixtureOfExperts) -> None:
        super().__init__()
        self.router, self.experts = ours.router, ours.experts

    def forward(self, x: Tensor) -> Tensor:
        routing = self.router(x)
        x_TD = x.reshape(routing.num_tokens, -1)
        y_TD = x_TD.new_zeros(x_TD.shape, dtype=routing.combine_weights.dtype)
        for index, expert in enumerate(self.experts):
            token, place = torch.where(routing.expert_index == index)
            if len(token):
                weight = routing.combine_weights[token, place].unsqueeze(1)
                y_TD = y_TD.index_add(0, token, weight * expert(x_TD[token]))
        return y_TD.to(x.dtype).reshape(x.shape)


def build_transformers(ours: MixtureOfExperts, size: Size, implementation: str) -> nn.Module:
    """Return Mixtral's layer of Hugging Face transformers; `implementation` as its configuration has it."""
    from transformers import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    config = MixtralConfig(
        hidden_size=size.d_model,
        intermediate_size=size.d_ff,
        num_local_experts=size.num_experts,
        num_experts_per_tok=size.top_k,
    )
    config._experts_implementation = implementation
    layer = MixtralSparseMoeBlock(config)
    with torch.no_grad():
        layer.gate.weight.copy_(ours.router.weight)
        layer.experts.gate_up_proj.copy_(
            torch.stack([torch.cat([expert.gate.weight, expert.up.weight]) for expert in ours.experts])
        )
        layer.experts.down_proj.copy_(torch.stack([expert.down.weight for expert in ours.experts]))
    return layer


def build_torchtitan(ours: MixtureOfExperts, size: Size) -> nn.Module:
    """Return torchtitan's layer, whose experts compute in bfloat16, whatever the weights are."""
    from torchtitan.models.common.linear import Linear
    from torchtitan.models.common.moe import GroupedExperts, MoE, RoutedExperts, TokenChoiceTopKRouter
    from torchtitan.models.common.token_dispatcher import LocalTokenDispatcher

    router = TokenChoiceTopKRouter.Config(
        num_experts=size.num_experts,
        gate=Linear.Config(in_features=size.d_model, out_features=size.num_experts),
        top_k=size.top_k,
        score_func="softmax",
        route_norm=True,
    )
    experts = RoutedExperts.Config(
        inner_experts=GroupedExperts.Config(
            dim=size.d_model, hidden_dim=size.d_ff, num_experts=size.num_experts
        ),
        token_dispatcher=LocalTokenDispatcher.Config(num_experts=size.num_experts, top_k=size.top_k),
    )
    layer = MoE(
        MoE.Config(
            num_experts=size.num_experts, routed_experts=experts, router=router, load_balance_coeff=None
        )
    )
    grouped = layer.routed_experts.inner_experts
    with torch.no_grad():
        layer.router.gate.weight.copy_(ours.router.weight)
        grouped.w1_EFD.copy_(torch.stack([expert.gate.weight for expert in ours.experts]))
        grouped.w3_EFD.copy_(torch.stack([expert.up.weight for expert in ours.experts]))
        grouped.w2_EDF.copy_(torch.stack([expert.down.weight for expert in ours.experts]))
    return layer


def _build_loop(ours: MixtureOfExperts, size: Size) -> nn.Module:
    return PlainLoop(ours)


PEERS: dict[str, Callable[[MixtureOfExperts, Size], nn.Module]] = {
    "plain loop": _build_loop,
    "transformers, eager": functools.partial(build_transformers, implementation="eager"),
    "transformers, grouped_mm": functools.partial(build_transformers, implementation="grouped_mm"),
}
PEERS_IN_BFLOAT16: dict[str, Callable[[MixtureOfExperts, Size], nn.Module]] = {
    **PEERS,
    "torchtitan": build_torchtitan,
}
