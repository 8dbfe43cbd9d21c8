"""How long calls that wait take when all wait at once: 50 ms each, forward and backward.

The first line of each size is the first map of the process: its threads have yet to be made. The others reuse them.
A plain loop over 64 calls takes its turn too, to show what is saved.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from benchmarks.measure import print_table, stopwatch
from moe_autograd import map_with_parallel_backward

WAIT_S = 0.05


class Waits(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        time.sleep(WAIT_S)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        time.sleep(WAIT_S)
        return grad * 2


def plain_loop(func: type[Function], *args_per_call: Any) -> tuple[Any, ...]:
    return tuple(func.apply(*args) for args in args_per_call)


def one_round(apply: Any, num_calls: int) -> Mapping[str, float]:
    inputs = [torch.ones(8, requires_grad=True) for _ in range(num_calls)]
    ones = [torch.ones(8) for _ in inputs]
    results: list[Any] = []

    def forward() -> None:
        results[:] = apply(Waits, *[(x,) for x in inputs])

    return {
        "forward": stopwatch(forward),
        "backward": stopwatch(lambda: torch.autograd.backward(results, ones)),
    }


def main(rounds: int) -> None:
    one_round(plain_loop, 1)  # torch imports a part of itself at the first backward with given gradients
    rows: list[tuple[object, ...]] = []
    for num_calls in (64, 256, 1024):
        taken = [one_round(map_with_parallel_backward, num_calls) for _ in range(1 + rounds)]
        for part in ("forward", "backward"):
            first_ms, *others_ms = (times[part] * 1e3 for times in taken)
            rows.append(("map", num_calls, part, first_ms, statistics.median(others_ms), max(others_ms)))
    loop = one_round(plain_loop, 64)
    rows += [("loop", 64, part, seconds * 1e3, "", "") for part, seconds in loop.items()]
    print_table(("how", "calls of 50 ms", "pass", "first, ms", "median, ms", "worst, ms"), rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    main(parser.parse_args().rounds)
