"""How long calls that wait take when all wait at once: 50 ms each, forward and backward.

Calls that make one torch operation besides, and calls that only wait and return what they got. Beside them, in turns,
bare threads (`bare`) that do the same: what the machine allows. The first map of each size has threads yet to make; the
others reuse them. A plain loop over 64 calls shows what is saved.
"""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from benchmarks.map_waiting.bare import WAIT_S, WAITS, bare_threads
from benchmarks.measure import Times, print_table, stopwatch
from moe_autograd import map_with_parallel_backward


class Waits(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        time.sleep(WAIT_S)
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        time.sleep(WAIT_S)
        return grad * 2


class OnlyWaits(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        time.sleep(WAIT_S)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        time.sleep(WAIT_S)
        return grad


FUNCTIONS: dict[str, type[Function]] = {WAITS: Waits, "wait": OnlyWaits}


def plain_loop(func: type[Function], *args_per_call: Any) -> tuple[Any, ...]:
    return tuple(func.apply(*args) for args in args_per_call)


def one_round(apply: Any, func: type[Function], num_calls: int) -> Mapping[str, float]:
    inputs = [torch.ones(8, requires_grad=True) for _ in range(num_calls)]
    ones = [torch.ones(8) for _ in inputs]
    results: list[Any] = []

    def forward() -> None:
        results[:] = apply(func, *[(x,) for x in inputs])

    return {
        "forward": stopwatch(forward),
        "backward": stopwatch(lambda: torch.autograd.backward(results, ones)),
    }


def rows_of(num_calls: int, rounds: int) -> Iterator[tuple[object, ...]]:
    """Return the rows of one size; its variants take turns."""
    taken: dict[tuple[str, str, str], list[float]] = {}
    with contextlib.ExitStack() as stack:
        kinds = {
            what: (func, stack.enter_context(bare_threads(num_calls, what)))
            for what, func in FUNCTIONS.items()
        }
        for _ in range(1 + rounds):
            for what, (func, bare) in kinds.items():
                taken.setdefault(("bare threads", what, "either"), []).append(bare())
                for part, seconds in one_round(map_with_parallel_backward, func, num_calls).items():
                    taken.setdefault(("map", what, part), []).append(seconds)
    for (how, what, part), (first_s, *others_s) in taken.items():
        others, floor = Times(others_s), Times(taken["bare threads", what, "either"][1:])
        first_ms: object = first_s * 1e3 if how == "map" else ""
        ratio = others.ratio_to(floor)
        yield how, what, num_calls, part, first_ms, others.median_ms, max(others_s) * 1e3, ratio


def main(rounds: int) -> None:
    one_round(plain_loop, Waits, 1)  # torch imports a part of itself at the first such backward
    rows = [row for num_calls in (64, 256, 1024) for row in rows_of(num_calls, rounds)]
    loop = one_round(plain_loop, Waits, 64)
    rows += [("loop", WAITS, 64, part, seconds * 1e3, "", "", "") for part, seconds in loop.items()]
    heads = (
        "how",
        "what each does",
        "calls of 50 ms",
        "pass",
        "first, ms",
        "median, ms",
        "worst, ms",
        "times the bare threads",
    )
    print_table(heads, rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    main(parser.parse_args().rounds)
