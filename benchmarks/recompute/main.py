"""What recomputing costs in time and saves in memory: a layer of experts, plain and recomputed, in a loop and as a map.

Memory is what the process had resident at most during a step (the kernel's `VmHWM`, set back before each step), less
what it had before.
"""

from __future__ import annotations

import copy
import gc
import re
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from benchmarks.measure import print_table, take_turns
from moe_autograd import parallel_apply
from moe_autograd.autograd.offload.freed_memory import give_back_freed_memory

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


def resident_bytes(field: str) -> int:
    match = re.search(rf"{field}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert match is not None
    return int(match[1]) * 1024


def step(layer: Layer, experts: list[nn.Module], x: Tensor) -> dict[str, float]:
    """Return seconds, and bytes beside them."""
    for module in experts:
        module.zero_grad(set_to_none=False)
    gc.collect()
    give_back_freed_memory()
    Path("/proc/self/clear_refs").write_text("5")  # sets VmHWM back
    before, begun_s = resident_bytes("VmRSS"), time.perf_counter()
    torch.stack(layer(experts, x)).square().mean().backward()
    took_s = time.perf_counter() - begun_s
    return {"step": took_s, "bytes": resident_bytes("VmHWM") - before}


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
