"""Train a layer whose experts don't fit into the memory they are given, save it, and go on from there.

The weights, gradients and optimizer state of 16 experts, 34 MB, live in a folder; 8 MB of them are in memory.
"""

from __future__ import annotations

import copy
import tempfile

import torch
from torch import nn
from torch.nn import functional as F

from moe_autograd import MixtureOfExperts, TopKRouter
from moe_autograd.autograd.offload import OffloadedExperts

D_MODEL, D_FF, NUM_EXPERTS, NUM_STEPS = 128, 512, 16, 3


def ffn() -> nn.Module:
    return nn.Sequential(nn.Linear(D_MODEL, D_FF), nn.GELU(), nn.Linear(D_FF, D_MODEL))


def build(folder: str) -> tuple[MixtureOfExperts, OffloadedExperts]:
    torch.manual_seed(0)
    experts = OffloadedExperts(
        (ffn() for _ in range(NUM_EXPERTS)),  # a generator: there is never more than one in memory
        lambda parameters: torch.optim.Adam(parameters, lr=1e-3),
        max_resident_bytes=8_000_000,
        store=folder,
    )
    return MixtureOfExperts(TopKRouter(D_MODEL, NUM_EXPERTS, top_k=2), list(experts)), experts


def train(layer: MixtureOfExperts, experts: OffloadedExperts, steps: range) -> float:
    router_optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(256, D_MODEL, generator=generator)
        loss = F.mse_loss(layer(x), x.roll(1, dims=1))
        loss.backward()
        experts.step()
        router_optimizer.step()
        experts.zero_grad()
        router_optimizer.zero_grad()
    return loss.item()


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        layer, experts = build(folder)
        with experts:
            train(layer, experts, range(NUM_STEPS))
            experts.checkpoint({"step": NUM_STEPS})
            router = copy.deepcopy(layer.state_dict())  # the experts are not in it
            straight = train(layer, experts, range(NUM_STEPS, 2 * NUM_STEPS))
            print(f"in memory now: {experts.resident_bytes / 1e6:.1f} MB")

        layer, experts = build(folder)
        with experts:
            layer.load_state_dict(router)
            step = experts.restore()["step"]
            again = train(layer, experts, range(step, 2 * NUM_STEPS))
    print(f"loss after {2 * NUM_STEPS} steps: {straight:.6f}, and {again:.6f} with a stop after {step}")


if __name__ == "__main__":
    main()
