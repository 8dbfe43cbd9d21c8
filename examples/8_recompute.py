"""Keep the inputs of experts instead of their activations, and run their forwards again in the backward.

First by the library, for whole experts; then by the experts' own `torch.utils.checkpoint`, for a part of each. Dropout
draws the same masks in both runs, though all experts run at once. The gradients are those of a run that keeps all.
"""

from __future__ import annotations

import gc
import weakref

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from moe_autograd import parallel_apply

D_MODEL, D_FF, NUM_EXPERTS, NUM_TOKENS = 128, 512, 4, 256
activations: list[weakref.ref[Tensor]] = []


class Expert(nn.Module):
    """A feed-forward expert; it may recompute its own inside."""

    def __init__(self, checkpoints: bool = False) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D_MODEL, D_FF), nn.Linear(D_FF, D_MODEL)
        self.dropout = nn.Dropout(0.2)
        self.checkpoints = checkpoints

    def inside(self, x: Tensor) -> Tensor:
        """What takes memory."""
        h = self.dropout(torch.nn.functional.gelu(self.up(x)))
        activations.append(weakref.ref(h))
        return self.down(h)

    def forward(self, x: Tensor) -> Tensor:
        """Transform `x`, (tokens, D_MODEL)."""
        return checkpoint(self.inside, x, use_reentrant=False) if self.checkpoints else self.inside(x)


def train(experts: list[Expert], *, recompute: bool) -> list[Tensor]:
    """Return the weights' gradients; say how many activations waited for the backward."""
    torch.manual_seed(1)
    activations.clear()
    x = torch.randn(NUM_TOKENS, D_MODEL, requires_grad=True)
    outputs = parallel_apply(experts, [(x,)] * NUM_EXPERTS, recompute=recompute)
    gc.collect()
    num_kept = sum(one() is not None for one in activations)
    torch.stack(outputs).square().mean().backward()
    print(f"kept {num_kept} of {NUM_EXPERTS} activations, {len(activations)} forwards in all")
    return [parameter.grad for expert in experts for parameter in expert.parameters()]


def fresh(checkpoints: bool = False) -> list[Expert]:
    """Return the same experts each time."""
    torch.manual_seed(0)
    return [Expert(checkpoints) for _ in range(NUM_EXPERTS)]


def main() -> None:
    """Train one step in three ways."""
    plain = train(fresh(), recompute=False)
    for grads in (train(fresh(), recompute=True), train(fresh(checkpoints=True), recompute=False)):
        for one, other in zip(grads, plain, strict=True):
            torch.testing.assert_close(one, other)
    print("the same gradients, with the same dropout")


if __name__ == "__main__":
    main()
