"""A step of four layers whose experts lie in a store of 100 MB/s: with and without reading ahead.

Three kinds take turns (A B C A B C): nothing is read ahead; each layer reads its own next expert ahead; and layers
also read their neighbours' experts ahead (`read_ahead`), which is what the backward hooks are for. All that twice:
experts are updated in the backward, or by `step`. The number of tokens is chosen so that a step computes for about as
long as it reads.
"""

from __future__ import annotations

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
LIMIT_BYTES = 6 * EXPERT_BYTES  # of 12 experts' weights and as much of gradients
BYTES_PER_S = 100e6
UPDATES = ("on_backward", "on_step")
KINDS = ("nothing", "within a layer", "within and across layers")


class SlowStore(RamStore):
    """Host memory behind a link of 100 MB/s in each direction."""

    def write(self, name: str, layout: Layout, flat: torch.Tensor) -> None:
        time.sleep(flat.numel() / BYTES_PER_S)
        super().write(name, layout, flat)

    def read(self, name: str, flat: torch.Tensor) -> None:
        time.sleep(flat.numel() / BYTES_PER_S)
        super().read(name, flat)


def build(kind: str, update: str) -> list[OffloadedExperts]:
    torch.manual_seed(0)
    layers: list[OffloadedExperts] = []
    for _ in range(NUM_LAYERS):
        shared = (
            {"beside": layers[0]} if layers else {"max_resident_bytes": LIMIT_BYTES, "store": SlowStore()}
        )
        experts = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_EXPERTS))
        layers.append(
            OffloadedExperts(
                experts, lambda parameters: torch.optim.SGD(parameters, lr=1e-3), update=update, **shared
            )
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
    """Return how many tokens keep a step computing for one and a half times as long as all weights take to read.

    They are read in the forward and in the backward, but for those that still are in memory, about half of them.
    """
    layers = [[nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_EXPERTS)] for _ in range(NUM_LAYERS)]
    x = torch.randn(1024, WIDTH)

    def compute() -> None:
        h = x
        for layer in layers:
            h = torch.stack([expert(h) for expert in layer]).mean(0).relu() + h
        h.square().mean().backward()

    took_s = min(stopwatch(compute) for _ in range(8))
    wanted_s = 1.5 * NUM_LAYERS * NUM_EXPERTS * EXPERT_BYTES / BYTES_PER_S
    return round(1024 * wanted_s / took_s / 64) * 64


def measure(update: str, x: torch.Tensor) -> list[list[str]]:
    models = {kind: build(kind, update) for kind in KINDS}
    took = take_turns({kind: partial(step, models[kind], x) for kind in KINDS}, rounds=5, warmup=1)
    weights = [[layer.state_dict(0)["weight"] for layer in models[kind]] for kind in KINDS]
    torch.testing.assert_close(weights[0], weights[2])
    for layers in models.values():
        layers[0].close()

    def cells(times: dict[str, Times]) -> list[str]:
        base = took["nothing"]
        return [
            cell
            for part in times
            for cell in (f"{times[part].median_ms:.0f} ms", faster(base[part], times[part]))
        ]

    return [[update, kind, *cells(took[kind])] for kind in KINDS]


def main() -> None:
    x = torch.randn(balanced_num_tokens(), WIDTH)
    rows = [row for update in UPDATES for row in measure(update, x)]
    print(
        f"{NUM_LAYERS} layers of {NUM_EXPERTS} experts of {EXPERT_BYTES / 1e6:.1f} MB (and gradients), memory for"
    )
    print(f"{LIMIT_BYTES / 1e6:.1f} MB in all, {len(x)} tokens, a store of {BYTES_PER_S / 1e6:.0f} MB/s\n")
    heads = ("update", "read ahead", "forward and backward", "times as fast", "whole step", "times as fast")
    print_table(heads, rows)


def faster(base: Times, other: Times) -> str:
    return f"{base.ratio_to(other):.2f}"


if __name__ == "__main__":
    main()
