"""Run local experts in threads: no server, the same layer. Good for tests, and for CPUs with several cores.

The layer equals a plain loop over its experts to the last digits; this trains one both ways and compares.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor
from torch.nn import functional as F

from moe_autograd import FeedForwardExpert, MixtureOfExperts, TopKRouter

D_MODEL, NUM_EXPERTS, NUM_STEPS = 256, 8, 30


def plain_loop(layer: MixtureOfExperts, x: Tensor) -> Tensor:
    """What the layer means: one expert after the other."""
    routing = layer.router(x)
    y = torch.zeros_like(x)
    for index, expert in enumerate(layer.experts):
        tokens, choice = (routing.expert_index == index).nonzero(as_tuple=True)
        if len(tokens):
            y = y.index_add(0, tokens, routing.combine_weights[tokens, choice, None] * expert(x[tokens]))
    return y


def main() -> None:
    torch.manual_seed(0)
    experts = [FeedForwardExpert(D_MODEL) for _ in range(NUM_EXPERTS)]
    layer = MixtureOfExperts(TopKRouter(D_MODEL, NUM_EXPERTS, top_k=2), experts)
    twin = copy.deepcopy(layer)
    x, target = torch.randn(256, D_MODEL), torch.randn(256, D_MODEL)

    optimizers = [torch.optim.Adam(module.parameters(), lr=1e-3) for module in (layer, twin)]
    for step in range(NUM_STEPS):
        losses = [F.mse_loss(layer(x), target), F.mse_loss(plain_loop(twin, x), target)]
        for optimizer, loss in zip(optimizers, losses, strict=True):
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        if step % 10 == 9:
            print(
                f"step {step + 1}: loss {losses[0].item():.6f} in threads, {losses[1].item():.6f} in a loop"
            )
    torch.testing.assert_close(layer(x), plain_loop(twin, x), rtol=1e-3, atol=1e-4)

    y, routing = layer(x, return_routing=True)
    print(f"tokens per expert: {routing.tokens_per_expert.tolist()}")
    print(
        f"load balancing loss {routing.load_balancing_loss.item():.3f} (2 would be even), output {tuple(y.shape)}"
    )


if __name__ == "__main__":
    main()
