"""What the map costs and gains on a GPU, against a plain loop: time, and what the allocator has taken at most.

All kernels have ended when a time is taken, and before it begins. Without a GPU the same runs on the CPU, to try the
program.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from benchmarks.measure import Times, print_table, stopwatch, take_turns
from moe_autograd import FeedForwardExpert, map_with_parallel_backward, parallel_apply

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

Apply = Callable[..., Sequence[Any]]
Step = Callable[[Apply], Mapping[str, float]]


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


class Looks(nn.Module):
    """Asks the GPU for a number in the midst, as a sampler, a check for NaN or a data-dependent shape does."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(depth)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
            if x.sum().item() == 0:
                raise ValueError("expected numbers, got zeros alone")
        return x


class Recurrent(nn.Module):
    """Many small kernels, one after the other."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(width, width, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.lstm(x)[0]
        return result


def loop_of_functions(func: type[Function], *args_per_call: Any) -> tuple[Any, ...]:
    return tuple(func.apply(*args) for args in args_per_call)


def loop_of_modules(modules: Sequence[nn.Module], inputs: Sequence[Tensor]) -> list[Any]:
    return [module(x) for module, x in zip(modules, inputs, strict=True)]


def finish() -> None:
    """Wait until all kernels have ended."""
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def timed(
    forward: Callable[[], Sequence[Tensor]], grads: Sequence[Tensor], repeats: int
) -> Mapping[str, float]:
    forward_s = backward_s = 0.0
    for _ in range(repeats):
        results: list[Tensor] = []

        def run_forward(results: list[Tensor] = results) -> None:
            results += forward()
            finish()

        def run_backward(results: list[Tensor] = results) -> None:
            torch.autograd.backward(results, grads)
            finish()

        forward_s += stopwatch(run_forward)
        backward_s += stopwatch(run_backward)
    return {
        "forward": forward_s / repeats,
        "backward": backward_s / repeats,
        "both": (forward_s + backward_s) / repeats,
    }


def functions(num_calls: int, repeats: int) -> Step:
    """Return a step of trivial functions."""
    inputs = [torch.ones(8, device=DEVICE, requires_grad=True) for _ in range(num_calls)]
    calls, ones = [(x,) for x in inputs], [torch.ones(8, device=DEVICE) for _ in inputs]

    def step(apply: Apply) -> Mapping[str, float]:
        for x in inputs:
            x.grad = None
        return timed(lambda: apply(Squares, *calls), ones, repeats)

    return step


def experts(
    build: Callable[[], nn.Module],
    num_experts: int,
    shape: Sequence[int],
    dtype: torch.dtype = torch.float32,
    repeats: int = 1,
) -> Step:
    """Return a step of experts, each with an input of `shape`, whose gradients are dropped first."""
    torch.manual_seed(0)
    modules = [build().to(DEVICE, dtype) for _ in range(num_experts)]
    inputs = [torch.randn(*shape, device=DEVICE, dtype=dtype, requires_grad=True) for _ in modules]
    grads = [torch.randn_like(x) for x in inputs]
    leaves = [*inputs, *[p for module in modules for p in module.parameters()]]

    def step(apply: Apply) -> Mapping[str, float]:
        for leaf in leaves:
            leaf.grad = None
        return timed(lambda: apply(modules, inputs), grads, repeats)

    return step


def stacked(num_layers: int, num_experts: int, width: int, rows: int) -> Step:
    """Return a step of a deep model: each layer's experts take what those of the layer before have given."""
    torch.manual_seed(0)
    layers = [[FeedForwardExpert(width).to(DEVICE) for _ in range(num_experts)] for _ in range(num_layers)]
    inputs = [torch.randn(rows, width, device=DEVICE, requires_grad=True) for _ in range(num_experts)]
    grads = [torch.randn_like(x) for x in inputs]
    leaves = [*inputs, *[p for layer in layers for expert in layer for p in expert.parameters()]]

    def step(apply: Apply) -> Mapping[str, float]:
        for leaf in leaves:
            leaf.grad = None

        def forward() -> Sequence[Tensor]:
            x: Sequence[Tensor] = inputs
            for layer in layers:
                mixed = torch.stack(list(apply(layer, x))).mean(0)
                x = [mixed + own for own in x]
            return x

        return timed(forward, grads, 1)

    return step


STEPS: dict[str, tuple[Callable[[], Step], Apply, Apply]] = {
    name: (build, loop_of_functions, map_with_parallel_backward)
    for name, build in {
        "64 trivial functions": lambda: functions(64, 5),
        "1 trivial function": lambda: functions(1, 100),
    }.items()
} | {
    name: (build, loop_of_modules, parallel_apply)
    for name, build in {
        "64 tiny feed-forward experts, 64 x 32": lambda: experts(lambda: FeedForwardExpert(64), 64, (32, 64)),
        "8 middling feed-forward, 512 x 512": lambda: experts(
            lambda: FeedForwardExpert(512), 8, (512, 512), repeats=5
        ),
        "8 large feed-forward, 2,048 x 4,096, bfloat16": lambda: experts(
            lambda: FeedForwardExpert(2048), 8, (4096, 2048), torch.bfloat16
        ),
        "8 large feed-forward, 2,048 x 4,096": lambda: experts(
            lambda: FeedForwardExpert(2048), 8, (4096, 2048)
        ),
        "8 LSTMs of 256, 16 x 64 steps": lambda: experts(lambda: Recurrent(256), 8, (16, 64, 256)),
        "16 that ask for a number, 512 x 512": lambda: experts(lambda: Looks(512, 4), 16, (512, 512)),
        "8 layers of 8 middling feed-forward": lambda: stacked(8, 8, 512, 512),
        "4 layers of 8 large feed-forward": lambda: stacked(4, 8, 2048, 2048),
    }.items()
}


def peak_bytes(step: Step, apply: Apply) -> tuple[int, int]:
    """Return what two steps have allocated at most beyond what they began with, and what was reserved for them."""
    if DEVICE != "cuda":
        return 1, 1
    step(apply)
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    for _ in range(2):
        step(apply)
    return torch.cuda.max_memory_allocated() - before, torch.cuda.max_memory_reserved() - reserved


def row_of(name: str, rounds: int) -> Sequence[object]:
    build, loop, the_map = STEPS[name]
    step = build()
    taken = take_turns({"loop": lambda: step(loop), "map": lambda: step(the_map)}, rounds=rounds)
    of_loop, of_map = taken["loop"], taken["map"]

    def ratio(part: str) -> float:
        times: Times = of_map[part]
        return times.ratio_to(of_loop[part])

    loop_peak, map_peak = peak_bytes(step, loop), peak_bytes(step, the_map)
    return (
        name,
        of_loop["both"].median_ms,
        of_map["both"].median_ms,
        ratio("forward"),
        ratio("backward"),
        ratio("both"),
        map_peak[0] / max(loop_peak[0], 1),
        map_peak[1] / max(loop_peak[1], 1),
    )


def main(names: Sequence[str], rounds: int) -> None:
    where = torch.cuda.get_device_name() if DEVICE == "cuda" else "the CPU: this only tries the program"
    print(f"On {where}, torch {torch.__version__}; {rounds} rounds.\n")
    rows = [row_of(name, rounds) for name in names]
    heads = ("step", "loop, ms", "map, ms", "forward", "backward", "both", "allocated", "reserved")
    print_table(heads, rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--of", nargs="+", choices=STEPS, default=list(STEPS))
    arguments = parser.parse_args()
    main(arguments.of, arguments.rounds)
