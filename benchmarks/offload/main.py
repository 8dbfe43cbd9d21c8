"""Train 4 GB of experts with 512 MB of them in memory, and again with all of them: throughput and peak memory.

Each kind runs in a process of its own, so that its peak is its own. Steps alternate (A B A B): a kind's process
waits for its turn. The memory is the kernel's count of the process (`VmHWM`, resident pages at most).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable

import torch
from torch import nn

from benchmarks.measure import Times, print_table
from benchmarks.memory import resident_bytes
from moe_autograd.autograd.offload import OffloadedExperts, return_freed_memory_at_once

# 33.6 MB of weights each, 100.8 MB with the state of Adam.
D_MODEL, D_FF, NUM_EXPERTS, NUM_TOKENS = 1024, 4096, 40, 512
LIMIT_BYTES = 512 * 10**6


def ffn() -> nn.Module:
    return nn.Sequential(nn.Linear(D_MODEL, D_FF), nn.GELU(), nn.Linear(D_FF, D_MODEL))


def adam(parameters: object) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-4, fused=True)


def offloaded(folder: str) -> Callable[[], float]:
    experts = OffloadedExperts(
        (ffn() for _ in range(NUM_EXPERTS)),
        adam,
        max_resident_bytes=LIMIT_BYTES,
        store=folder,
        num_microbatches=1,  # activations leave memory too
    )

    def step() -> float:
        loss = run(list(experts), lambda modules, xs: experts.call_together(modules, xs, [{}] * len(xs)))
        experts.step()
        experts.zero_grad()
        return loss

    return step


def all_resident(_: str) -> Callable[[], float]:
    experts = [ffn() for _ in range(NUM_EXPERTS)]
    optimizers = [adam(list(expert.parameters())) for expert in experts]

    def step() -> float:
        loss = run(experts, lambda modules, xs: [module(*x) for module, x in zip(modules, xs, strict=True)])
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        return loss

    return step


def run(experts: list[nn.Module], call: Callable[..., list[torch.Tensor]]) -> float:
    """A layer in which every expert gets as many tokens; its loss is a mean over them."""
    torch.manual_seed(1)
    loss = 0.0
    x = torch.randn(NUM_TOKENS, D_MODEL)
    results = call(experts, [(x,)] * len(experts))
    total = sum(result.square().mean() for result in results)
    total.backward()
    return loss + float(total.detach())


def serve(kind: str, folder: str) -> None:
    """Run a step for every line of input, and answer with what it took."""
    return_freed_memory_at_once()
    torch.manual_seed(0)
    step = {"offloaded": offloaded, "all resident": all_resident}[kind](folder)
    for _ in sys.stdin:
        begin = time.perf_counter()
        loss = step()
        print(json.dumps([time.perf_counter() - begin, resident_bytes("VmHWM"), loss]), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kind")
    parser.add_argument("--folder", default="")
    parser.add_argument(
        "--steps", type=int, default=2, help="timed steps of each kind, after one that is not"
    )
    options = parser.parse_args()
    if options.kind:
        serve(options.kind, options.folder)
        return
    with tempfile.TemporaryDirectory() as folder:
        kinds = ("all resident", "offloaded")
        processes = {
            kind: subprocess.Popen(
                [sys.executable, "-m", "benchmarks.offload.main", "--kind", kind, "--folder", folder],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for kind in kinds
        }
        rows: dict[str, list[tuple[float, int, float]]] = {kind: [] for kind in kinds}
        for _ in range(1 + options.steps):
            for kind, process in processes.items():
                process.stdin.write("step\n")
                process.stdin.flush()
                rows[kind].append(tuple(json.loads(process.stdout.readline())))
        for process in processes.values():
            process.communicate()
    losses = [[row[2] for row in rows[kind]] for kind in kinds]
    torch.testing.assert_close(torch.tensor(losses[0]), torch.tensor(losses[1]), rtol=1e-5, atol=0)
    report(rows)


def report(rows: dict[str, list[tuple[float, int, float]]]) -> None:
    num_bytes = 3 * 4 * NUM_EXPERTS * sum(p.numel() for p in ffn().parameters())
    print(
        f"{NUM_EXPERTS} experts, weights and Adam state {num_bytes / 1e9:.2f} GB, limit {LIMIT_BYTES / 1e9:.2f} GB,"
    )
    print(
        f"{NUM_TOKENS} tokens for each expert, {len(rows['offloaded']) - 1} timed steps of each kind, in turn\n"
    )
    times = {kind: Times([row[0] for row in measured[1:]]) for kind, measured in rows.items()}
    table = []
    for kind, measured in rows.items():
        rate = NUM_TOKENS * NUM_EXPERTS / times[kind].median_ms * 1e3
        peak = f"{max(row[1] for row in measured) / 1e9:.2f} GB"
        took = f"{times[kind].median_ms / 1e3:.2f}"
        table.append([kind, took, f"{rate:,.0f}", times["all resident"].ratio_to(times[kind]), peak])
    print_table(("experts", "s a step", "tokens a second", "throughput", "peak memory of the process"), table)


if __name__ == "__main__":
    main()
