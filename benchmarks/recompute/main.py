"""What recomputing costs in time and saves in memory: a layer of experts, plain and recomputed, in a loop and as a map.

Memory is what the process had resident at most during a step (the kernel's `VmHWM`, set back before each step), less
what it had before.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.measure import print_table, stopwatch, take_turns
from benchmarks.memory import peak_beyond_now
from moe_autograd import parallel_apply

NUM_EXPERTS, WIDTH, NUM_TOKENS, NUM_ROUNDS = 8, 512, 2048, 7
Layer = Callable[[list[nn.Module], Tensor], list[Tensor]]


def expert() -> nn.Module:
    return nn.Sequential(
        nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Dropout(0.1), nn.Linear(4 * WIDTH, WIDTH), nn.Tanh()
    )


def in_a_loop(experts: list[nn.Module], x: Tensor) -> list[Tensor]:
    return [module(x) for module in experts]


def checkpointed_in_a_loop(experts: list[nn.Module], x: Tensor) -> list[Tensor]:
    return [checkpoint(module, x, use_reentrant=False) for module in experts]


def as_a_map(experts: list[nn.Module], x: Tensor, *, recompute: bool) -> list[Tensor]:
    return parallel_apply(experts, [(x,)] * len(experts), recompute=recompute)


KINDS: dict[str, Layer] = {
    "loop": in_a_loop,
    "loop, torch.utils.checkpoint": checkpointed_in_a_loop,
    "parallel_apply": partial(as_a_map, recompute=False),
    "parallel_apply, recompute": partial(as_a_map, recompute=True),
}


def step(layer: Layer, experts: list[nn.Module], x: Tensor) -> dict[str, float]:
    """Return seconds, and bytes beside them."""
    for module in experts:
        module.zero_grad(set_to_none=False)
    took_s: list[float] = []

    def run() -> None:
        took_s.append(stopwatch(lambda: torch.stack(layer(experts, x)).square().mean().backward()))

    return {"bytes": peak_beyond_now(run), "step": took_s[0]}


def main() -> None:
    torch.manual_seed(0)
    experts = [expert() for _ in range(NUM_EXPERTS)]
    x = torch.randn(NUM_TOKENS, WIDTH)
    variants = {kind: partial(step, layer, copy.deepcopy(experts), x) for kind, layer in KINDS.items()}
    took = take_turns(variants, rounds=NUM_ROUNDS)
    plain = took["loop"]
    rows = []
    for kind, one in took.items():
        held = f"{sorted(one['bytes'].rounds_s)[NUM_ROUNDS // 2] / 1e6:.0f} MB"
        ratios = [one[part].ratio_to(plain[part]) for part in ("step", "bytes")]
        rows.append([kind, f"{one['step'].median_ms:.0f} ms", ratios[0], held, ratios[1]])
    print(f"{NUM_EXPERTS} experts of {WIDTH} x {4 * WIDTH}, {NUM_TOKENS} tokens each\n")
    print_table(("experts", "step", "to a loop", "memory at most", "to a loop"), rows)


if __name__ == "__main__":
    main()
