"""What the map costs when there is nothing to gain: trivial functions, against a plain loop of `apply`.

Two trivial functions: one that saves nothing, and one that saves its input. Eight numbers a tensor. The backward
starts at all results with ready-made gradients, so that neither side is diluted by a loss.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from benchmarks.measure import print_table, stopwatch, take_turns
from moe_autograd import map_with_parallel_backward


class Doubles(Function):
    """Saves nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


class Squares(Function):
    """Saves its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * x


def plain_loop(func: type[Function], *args_per_call: Any) -> tuple[Any, ...]:
    return tuple(func.apply(*args) for args in args_per_call)


def passes(
    apply: Callable[..., Any], func: type[Function], num_calls: int, repeats: int
) -> Callable[[], Mapping[str, float]]:
    inputs = [torch.ones(8, requires_grad=True) for _ in range(num_calls)]
    calls = [(x,) for x in inputs]
    ones = [torch.ones(8) for _ in inputs]

    def run() -> Mapping[str, float]:
        results: list[Any] = []

        def forward() -> None:
            results[:] = apply(func, *calls)

        forward_s = backward_s = 0.0
        for _ in range(repeats):
            for x in inputs:
                x.grad = None
            forward_s += stopwatch(forward)
            backward_s += stopwatch(lambda: torch.autograd.backward(results, ones))
        return {
            "forward": forward_s / repeats,
            "backward": backward_s / repeats,
            "both": (forward_s + backward_s) / repeats,
        }

    return run


def main(rounds: int) -> None:
    rows = []
    for func in (Doubles, Squares):
        for num_calls in (1, 8, 64, 256):
            repeats = max(1, 640 // num_calls)
            variants = {
                "loop": passes(plain_loop, func, num_calls, repeats),
                "map": passes(map_with_parallel_backward, func, num_calls, repeats),
            }
            taken = take_turns(variants, rounds=rounds)
            for part in ("forward", "backward", "both"):
                loop, mapped = taken["loop"][part], taken["map"][part]
                each = [times.median_ms * 1e3 / num_calls for times in (loop, mapped)]
                rows.append((func.__name__, num_calls, part, *each, mapped.ratio_to(loop)))
    print_table(("function", "calls", "pass", "loop, us a call", "map, us a call", "map / loop"), rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=41)
    main(parser.parse_args().rounds)
