"""A step of four layers whose experts lie in a store of 100 MB/s: with and without reading ahead.

Three kinds take turns (A B C A B C): nothing is read ahead; each layer reads its own next expert ahead; and layers
also read their neighbours' experts ahead (`read_ahead`), which is what the backward hooks are for. The number of tokens
is chosen so that an expert computes for about as long as its weights take to read.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from functools import partial

import torch
from torch import nn

from benchmarks.measure import Times, print_table, stopwatch, take_turns
from moe_autograd.autograd.offload import OffloadedExperts, read_ahead
from moe_autograd.autograd.offload.flat import Layout
from moe_autograd.autograd.offload.stores import RamStore

WIDTH, NUM_LAYERS, NUM_EXPERTS = 1024, 4, 3
EXPERT_BYTES = 4 * WIDTH * WIDTH
LIMIT_BYTES = 8 * EXPERT_BYTES  # of 12 experts' weights and as much of gradients
BYTES_PER_S = 100e6
KINDS = ("nothing", "within a layer", "within and across layers")


class SlowStore(RamStore):
    """Host memory behind a link of 100 MB/s in each direction."""

    def write(self, name: str, layout: Layout, flat: torch.Tensor) -> None:
        time.sleep(flat.numel() / BYTES_PER_S)
        super().write(name, layout, flat)

    def read(self, name: str, flat: torch.Tensor) -> None:
        time.sleep(flat.numel() / BYTES_PER_S)
        super().read(name, flat)


def build(kind: str) -> list[OffloadedExperts]:
    torch.manual_seed(0)
    layers: list[OffloadedExperts] = []
    for _ in range(NUM_LAYERS):
        shared = (
            {"beside": layers[0]} if layers else {"max_resident_bytes": LIMIT_BYTES, "store": SlowStore()}
        )
        experts = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_EXPERTS))
        layers.append(
            OffloadedExperts(experts, lambda parameters: torch.optim.SGD(parameters, lr=1e-3), **shared)
        )
    if kind == "nothing":
        layers[0].residency.prefetch = lambda parts: None
    elif kind == "within and across layers":
        read_ahead(*layers)
    return layers


def step(layers: Sequence[OffloadedExperts], x: torch.Tensor) -> dict[str, float]:
    """Each expert gets all rows, so that every expert is needed; the results are added."""
    begun_s = time.perf_counter()
    h = x
    for layer in layers:
        h = (
            torch.stack(layer.call_together(list(layer), [(h,)] * len(layer), [{}] * len(layer)))
            .mean(0)
            .relu()
            + h
        )
    h.square().mean().backward()
    passes_s = time.perf_counter() - begun_s
    for layer in layers:
        layer.step()
    for layer in layers:
        layer.zero_grad()
    return {"passes": passes_s, "step": time.perf_counter() - begun_s}


def balanced_num_tokens() -> int:
    """Return how many tokens keep an expert computing for as long as its weights take to read, three times a step."""
    expert = nn.Linear(WIDTH, WIDTH, bias=False)
    x = torch.randn(1024, WIDTH, requires_grad=True)
    took_s = statistics.median(stopwatch(lambda: expert(x).sum().backward()) for _ in range(15))
    return round(1024 * 3 * EXPERT_BYTES / BYTES_PER_S / took_s / 64) * 64


def main() -> None:
    models = {kind: build(kind) for kind in KINDS}
    num_tokens = balanced_num_tokens()
    x = torch.randn(num_tokens, WIDTH)
    took = take_turns({kind: partial(step, models[kind], x) for kind in KINDS}, rounds=5, warmup=1)
    weights = [[layer.state_dict(0)["weight"] for layer in models[kind]] for kind in KINDS]
    torch.testing.assert_close(weights[0], weights[2])

    print(
        f"{NUM_LAYERS} layers of {NUM_EXPERTS} experts of {EXPERT_BYTES / 1e6:.1f} MB (and gradients), memory for"
    )
    print(
        f"{LIMIT_BYTES / 1e6:.1f} MB in all, {num_tokens} tokens, a store of {BYTES_PER_S / 1e6:.0f} MB/s\n"
    )

    def cells(times: dict[str, Times]) -> list[str]:
        base = took["nothing"]
        return [
            cell
            for part in times
            for cell in (f"{times[part].median_ms:.0f} ms", faster(base[part], times[part]))
        ]

    heads = ("read ahead", "forward and backward", "times as fast", "whole step", "times as fast")
    print_table(heads, [[kind, *cells(took[kind])] for kind in KINDS])
    for layers in models.values():
        layers[0].close()


def faster(base: Times, other: Times) -> str:
    return f"{base.ratio_to(other):.2f}"


if __name__ == "__main__":
    main()
