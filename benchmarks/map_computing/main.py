"""Experts that compute: `parallel_apply` against the plain loop that uses all cores inside each operator.

Feed-forward experts of four sizes, tiny ones of other kinds, and experts of many small operators, float32. A step is
a forward and a backward (no optimizer: it would take the same time on both sides). Peak memory is what the process
holds at most beyond what it held before the first step, each kind in a process of its own, by the kernel's count
(`VmHWM`): once as things are, and once with pages of its own for every tensor, so that none is counted that the C
library keeps of freed ones.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.measure import print_table, stopwatch, take_turns
from benchmarks.memory import peak_beyond_now
from moe_autograd import parallel_apply


@dataclass(frozen=True)
class Way:
    """How steps differ from those of experts with weights and inputs of their own.

    Args:
        adds_up: the gradients of each step are added to those of the last.
        shares: all calls are of one expert, with one batch.
    """

    adds_up: bool = False
    shares: bool = False

    def options(self) -> list[str]:
        return ["--adds-up"] * self.adds_up + ["--shares"] * self.shares


def feed_forward(d_model: int, d_ff: int) -> nn.Module:
    return nn.Sequential(nn.Linear(d_model, d_ff), nn.GELU(), nn.Linear(d_ff, d_model))


def transformer(d_model: int, d_ff: int) -> nn.Module:
    return nn.TransformerEncoderLayer(d_model, 4, d_ff, dropout=0.0, batch_first=True)


class Gated(nn.Module):
    """A class of a user's."""

    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.gate, self.up, self.down = (
            nn.Linear(*shape, bias=False) for shape in ((d_model, d_ff), (d_model, d_ff), (d_ff, d_model))
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Layered(nn.Module):
    """A class of a user's with a loop, a method and a dropout."""

    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(d_model, d_ff), nn.Linear(d_ff, d_model)])
        self.dropout = nn.Dropout(0.1)

    def activate(self, x: Tensor) -> Tensor:
        return self.dropout(F.gelu(x))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.activate(layer(x))
        return x


class Asking(nn.Module):
    """A class of a user's that asks for its kind, a weight's dtype, and its layers by their numbers."""

    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(d_model, d_ff), nn.Linear(d_ff, d_model)])
        self.out, self.kind = nn.Linear(d_model, d_model), "gelu"

    def activate(self, x: Tensor) -> Tensor:
        if self.kind == "relu":
            return F.relu(x)
        if self.kind in ("gelu", "gelu_new"):
            return F.gelu(x)
        raise ValueError(f"expected relu or gelu, got {self.kind!r}")

    def forward(self, x: Tensor) -> Tensor:
        for i in range(len(self.layers)):
            x = self.activate(self.layers[i](x))
        if isinstance(self.out.weight, Tensor) and x.dtype != self.out.weight.dtype != torch.int8:
            x = x.to(self.out.weight.dtype)
        return self.out(x)


class Adapted(nn.Linear):
    """A class of a user's that calls its base: a layer with an adapter of low rank."""

    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__(d_model, d_model)
        self.down, self.up = nn.Linear(d_model, 8, bias=False), nn.Linear(8, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.up(self.down(x)) * 0.5


class Recurrent(nn.Module):
    """One operator for each token of a sequence, after the one before."""

    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.gru, self.out = nn.GRU(d_model, d_ff, batch_first=True), nn.Linear(d_ff, d_model)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.gru(x)[0])


class Weights(nn.Module):
    """What a function computes with; a slice, mostly, of the weights of all experts."""

    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.up, self.down = (
            nn.Parameter(torch.randn(d_ff, d_model)),
            nn.Parameter(torch.randn(d_model, d_ff)),
        )


def of_slices(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return F.linear(F.silu(F.linear(x, up)), down)


# What is called, with what.
Calls = tuple[list[Callable[..., Any]], list[tuple[Tensor, ...]]]


def modules(experts: Sequence[nn.Module], xs: Sequence[Tensor]) -> Calls:
    return [*experts], [(x,) for x in xs]


def lambdas(experts: Sequence[nn.Module], xs: Sequence[Tensor]) -> Calls:
    return [lambda x, expert=expert: expert(x) for expert in experts], [(x,) for x in xs]


def functions(experts: Sequence[Any], xs: Sequence[Tensor]) -> Calls:
    return [of_slices] * len(experts), [(x, one.up, one.down) for one, x in zip(experts, xs, strict=True)]


NUM_CLASSES = 10


def convolutions(num_channels: int, width: int) -> nn.Module:
    return nn.Sequential(
        *(nn.Conv2d(num_channels, width, 3, padding=1, bias=False), nn.BatchNorm2d(width)),
        *(nn.ReLU(inplace=True), nn.MaxPool2d(2), nn.Conv2d(width, width, 3, padding=1, bias=False)),
        *(nn.BatchNorm2d(width), nn.ReLU(inplace=True), nn.AdaptiveAvgPool2d(1), nn.Flatten()),
        nn.Linear(width, NUM_CLASSES),
    )


@dataclass(frozen=True)
class Size:
    num_experts: int
    tokens: tuple[int, ...]  # a batch of them, or of sequences of them
    d_model: int
    d_ff: int
    repeats: int = 1
    make: Callable[[int, int], nn.Module] = feed_forward
    calls: Callable[[Sequence[Any], Sequence[Tensor]], Calls] = modules
    image: tuple[int, ...] = ()  # its height and width; then tokens are images, and `d_model` their channels

    @property
    def shape(self) -> tuple[int, ...]:
        return (*self.tokens, self.d_model, *self.image)

    @property
    def shape_of_outputs(self) -> tuple[int, ...]:
        return (*self.tokens, NUM_CLASSES) if self.image else self.shape

    def __str__(self) -> str:
        what = f"images of {' x '.join(map(str, self.image))}" if self.image else "tokens"
        return (
            f"{self.num_experts} x ({' x '.join(map(str, self.tokens))} {what}, {self.d_model}, {self.d_ff})"
        )


OWN_PAGES = {"MALLOC_MMAP_THRESHOLD_": "131072"}  # bytes; by itself glibc raises it as tensors are freed
SIZES = {
    "tiny": Size(32, (8,), 32, 64, repeats=20),
    "small": Size(16, (64,), 128, 512, repeats=10),
    "middling": Size(8, (256,), 512, 2048),
    "large": Size(4, (1024,), 1024, 4096),
    "tiny, own class": Size(32, (8,), 32, 64, repeats=20, make=Gated),
    "tiny, layers": Size(32, (8,), 32, 64, repeats=20, make=Layered),
    "tiny, asking": Size(32, (8,), 32, 64, repeats=20, make=Asking),
    "tiny, adapted": Size(32, (8,), 32, 64, repeats=20, make=Adapted),
    "tiny, cells": Size(32, (8,), 32, 32, repeats=20, make=nn.GRUCell),
    "tiny, lambdas": Size(32, (8,), 32, 64, repeats=20, calls=lambdas),
    "tiny, functions": Size(32, (8,), 32, 64, repeats=20, make=Weights, calls=functions),
    "tiny, attending": Size(8, (2, 16), 64, 256, repeats=5, make=transformer),
    "tiny images": Size(16, (2,), 4, 8, repeats=10, make=convolutions, image=(8, 8)),
    "small images": Size(8, (4,), 8, 16, repeats=10, make=convolutions, image=(16, 16)),
    "images": Size(8, (8,), 16, 32, repeats=3, make=convolutions, image=(32, 32)),
    "transformer": Size(8, (8, 64), 128, 512, make=transformer),
    "recurrent": Size(8, (8, 64), 256, 256, make=Recurrent),
}


def plain_loop(calls: Sequence[Callable[..., Any]], inputs: Sequence[Any]) -> list[Any]:
    return [call(*args) for call, args in zip(calls, inputs, strict=True)]


KINDS: dict[str, Callable[..., list[Any]]] = {"loop": plain_loop, "map": parallel_apply}


def steps(apply: Callable[..., list[Any]], size: Size, way: Way) -> Callable[[], Mapping[str, float]]:
    """Return what makes steps."""
    torch.manual_seed(0)
    experts = [size.make(size.d_model, size.d_ff) for _ in range(size.num_experts)]
    xs = [torch.randn(size.shape, requires_grad=True) for _ in experts]
    if way.shares:
        experts, xs = experts[:1] * size.num_experts, xs[:1] * size.num_experts
    ones = [torch.ones(size.shape_of_outputs) for _ in xs]
    called, args = size.calls(experts, xs)
    tensors = [*xs, *(p for expert in experts for p in expert.parameters())]

    def run() -> Mapping[str, float]:
        outputs: list[Any] = []

        def forward() -> None:
            outputs[:] = apply(called, args)

        forward_s = backward_s = 0.0
        for _ in range(size.repeats):
            for tensor in () if way.adds_up else tensors:
                tensor.grad = None
            forward_s += stopwatch(forward)
            backward_s += stopwatch(lambda: torch.autograd.backward(outputs, ones))
            outputs.clear()
        return {
            "forward": forward_s / size.repeats,
            "backward": backward_s / size.repeats,
            "step": (forward_s + backward_s) / size.repeats,
        }

    return run


@contextlib.contextmanager
def resting_teams(count: int) -> Iterator[None]:
    """Keep so many threads that have used their teams of intra-op threads once, and rest."""
    is_over, are_made = threading.Event(), threading.Barrier(count + 1)

    def rest() -> None:
        torch.ones(1 << 20).add_(1)
        are_made.wait()
        is_over.wait()

    threads = [threading.Thread(target=rest) for _ in range(count)]
    for thread in threads:
        thread.start()
    are_made.wait()
    yield
    is_over.set()
    for thread in threads:
        thread.join()


def peak_bytes(kind: str, name: str, way: Way, allocator: Mapping[str, str]) -> int:
    """Return the peak of a process that runs ten steps of one kind and nothing else."""
    command = [sys.executable, "-m", "benchmarks.map_computing.main", "--peak-of", kind, name]
    command += way.options()
    environment = {**os.environ, **allocator}
    return int(subprocess.run(command, capture_output=True, check=True, text=True, env=environment).stdout)


def median_peaks(name: str, way: Way, allocator: Mapping[str, str]) -> tuple[float, float, float]:
    """Return the median peaks of both kinds in MB, taken in turns, and their ratio."""
    rounds = [[peak_bytes(kind, name, way, allocator) / 1e6 for kind in KINDS] for _ in range(5)]
    loop, mapped = [statistics.median(peaks) for peaks in zip(*rounds, strict=True)]
    return loop, mapped, mapped / loop


def print_peak(kind: str, name: str, way: Way) -> None:
    run = steps(KINDS[kind], SIZES[name], way)
    print(peak_beyond_now(lambda: [run() for _ in range(10)]))


def print_times(rounds: int, names: Sequence[str], way: Way) -> None:
    rows = []
    for name in names:
        size = SIZES[name]
        taken = take_turns({kind: steps(apply, size, way) for kind, apply in KINDS.items()}, rounds=rounds)
        for part in ("forward", "backward", "step"):
            loop, mapped = taken["loop"][part], taken["map"][part]
            rows.append((name, part, loop.median_ms, mapped.median_ms, loop.ratio_to(mapped)))
    print_table(("experts", "pass", "loop, ms", "map, ms", "times as fast"), rows)


def print_peaks(names: Sequence[str], way: Way) -> None:
    print_table(
        ("experts", "size", "loop, peak MB", "map", "map / loop", "own pages: loop", "map", "map / loop"),
        [
            (name, SIZES[name], *median_peaks(name, way, {}), *median_peaks(name, way, OWN_PAGES))
            for name in names
        ],
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--adds-up", action="store_true", help="add gradients to those of the last step")
    parser.add_argument("--shares", action="store_true", help="call one expert with one batch, each time")
    parser.add_argument(
        "--beside-teams", action="store_true", help="beside threads whose teams rest; times alone"
    )
    parser.add_argument("--peak-of", nargs=2, metavar=("KIND", "SIZE"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    chosen = Way(arguments.adds_up, arguments.shares)
    if arguments.peak_of:
        print_peak(*arguments.peak_of, chosen)
    elif arguments.beside_teams:
        with resting_teams(2):
            print_times(arguments.rounds, arguments.sizes, chosen)
    else:
        print_times(arguments.rounds, arguments.sizes, chosen)
        print()
        print_peaks(arguments.sizes, chosen)
