"""A layer whose experts are all here: `MixtureOfExperts` against the layers that people know, and a plain loop.

The same weights, the same tokens, forward and backward, in turns in one process; before anything is timed the
results and the gradients are compared. See the README for the interpreter with the peers in it.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor, nn

from benchmarks.local_layer.peers import PEERS, PEERS_IN_BFLOAT16, Size, build_ours
from benchmarks.measure import print_table, stopwatch, take_turns
from benchmarks.memory import peak_beyond_now

SIZES = {
    "few": Size(num_experts=64, top_k=8, d_model=256, d_ff=512, num_tokens=8),
    "tiny": Size(num_experts=64, top_k=4, d_model=64, d_ff=128, num_tokens=512),
    "small": Size(num_experts=8, top_k=2, d_model=256, d_ff=512, num_tokens=512),
    "middling": Size(num_experts=8, top_k=2, d_model=512, d_ff=1792, num_tokens=1024),
    "many": Size(num_experts=64, top_k=2, d_model=512, d_ff=512, num_tokens=2048),
    "large": Size(num_experts=8, top_k=2, d_model=1024, d_ff=3584, num_tokens=2048),
}
# Of the norm of the difference, in parts of the norm. In bfloat16 torchtitan orders probabilities of bfloat16, and
# sends some tokens to other experts than those who order them in float32.
LIMITS = {torch.float32: 1e-5, torch.bfloat16: 0.1}


def layers_of(size: Size, dtype: torch.dtype) -> dict[str, nn.Module]:
    """Return ours and the peers that are installed, with the same weights."""
    torch.manual_seed(0)
    ours = build_ours(size)
    builders = PEERS if dtype is torch.float32 else PEERS_IN_BFLOAT16
    installed = {name: build for name, build in builders.items() if is_installed(name.split(",")[0])}
    layers: dict[str, nn.Module] = {"ours": ours}
    layers |= {name: build(ours, size) for name, build in installed.items()}
    return {name: layer.to(dtype) for name, layer in layers.items()}


def is_installed(name: str) -> bool:
    return name == "plain loop" or importlib.util.find_spec(name) is not None


def passes(layer: nn.Module, x: Tensor, grad: Tensor) -> Callable[[], Mapping[str, float]]:
    """Return what makes a forward and a backward; the gradients of the last ones are dropped first."""
    parameters = list(layer.parameters())

    def run() -> Mapping[str, float]:
        for tensor in (x, *parameters):
            tensor.grad = None
        outputs: list[Tensor] = []
        forward_s = stopwatch(lambda: outputs.append(layer(x)))
        backward_s = stopwatch(lambda: outputs[0].backward(grad))
        return {"forward": forward_s, "backward": backward_s, "both": forward_s + backward_s}

    return run


def forwards(layer: nn.Module, x: Tensor) -> Callable[[], Mapping[str, float]]:
    """Return what makes a forward without gradients."""

    @torch.no_grad()
    def run() -> Mapping[str, float]:
        return {"forward": stopwatch(lambda: layer(x))}

    return run


def run_of(
    layer: nn.Module, x: Tensor, grad: Tensor, *, only_forward: bool
) -> Callable[[], Mapping[str, float]]:
    """Return what makes one round of a layer."""
    return forwards(layer, x) if only_forward else passes(layer, x, grad)


def check_equal(layers: Mapping[str, nn.Module], x: Tensor, grad: Tensor) -> None:
    """Compare each layer's result and the gradient of its tokens with ours.

    Raises:
        AssertionError: they differ by more than `LIMITS`.
    """
    found: dict[str, tuple[Tensor, Tensor]] = {}
    for name, layer in layers.items():
        x.grad = None
        y = layer(x)
        y.backward(grad)
        assert x.grad is not None
        found[name] = y.detach(), x.grad
    for name, theirs in found.items():
        for own, other in zip(found["ours"], theirs, strict=True):
            difference = float((own - other).norm() / own.norm())
            assert difference < LIMITS[x.dtype], f"{name} differs from ours by {difference:.1e}"


def rows_of(name: str, rounds: int, dtype: torch.dtype, *, only_forward: bool) -> Sequence[Sequence[object]]:
    size = SIZES[name]
    layers = layers_of(size, dtype)
    x = torch.randn(1, size.num_tokens, size.d_model, dtype=dtype, requires_grad=True)
    grad = torch.randn_like(x)
    check_equal(layers, x, grad)
    runs = {of: run_of(layer, x, grad, only_forward=only_forward) for of, layer in layers.items()}
    taken = take_turns(runs, rounds=rounds)
    whole = "forward" if only_forward else "both"
    ours = taken["ours"][whole]
    return [
        (name, of, *[times.median_ms for times in parts.values()], parts[whole].ratio_to(ours))
        for of, parts in taken.items()
    ]


def print_peak(name: str, of: str, dtype: torch.dtype, *, only_forward: bool) -> None:
    """Print what five rounds of one layer have resident at most, beyond its weights, and `x` and its gradient."""
    size = SIZES[name]
    layer = layers_of(size, dtype)[of]
    x = torch.randn(1, size.num_tokens, size.d_model, dtype=dtype, requires_grad=True)
    run = run_of(layer, x, torch.randn_like(x), only_forward=only_forward)
    print(peak_beyond_now(lambda: [run() for _ in range(5)]))


def peak_rows(
    name: str, rounds: int, dtype: torch.dtype, *, only_forward: bool
) -> Sequence[Sequence[object]]:
    """Measure each layer in processes of its own, in turns: where the allocator puts things differs by a tenth."""
    program = [sys.executable, "-W", "ignore", "-m", "benchmarks.local_layer.main", "--dtype", str(dtype)[6:]]
    program += ["--inference"] if only_forward else []

    def peak_mb(of: str) -> float:
        command = [*program, "--peak-of", name, of]
        return int(subprocess.run(command, capture_output=True, check=True, text=True).stdout) / 1e6

    names = list(layers_of(SIZES[name], dtype))
    taken = [[peak_mb(of) for of in names] for _ in range(rounds)]
    medians = {
        of: statistics.median(peaks) for of, peaks in zip(names, zip(*taken, strict=True), strict=True)
    }
    return [(name, of, peak, peak / medians["ours"]) for of, peak in medians.items()]


def main(
    rounds: int, names: Sequence[str], dtype: torch.dtype, *, counts_memory: bool, only_forward: bool
) -> None:
    missing = [peer for peer in ("transformers", "torchtitan") if not is_installed(peer)]
    if missing:
        print(f"{' and '.join(missing)}: not installed, not measured (see the README)\n")
    for name in names:
        print(f"{name}: {SIZES[name]}, {dtype}")
    if counts_memory:
        rows = [row for name in names for row in peak_rows(name, rounds, dtype, only_forward=only_forward)]
        print_table(("layer", "whose", "peak, MB", "times ours"), rows)
        return
    rows = [row for name in names for row in rows_of(name, rounds, dtype, only_forward=only_forward)]
    parts = ("forward, ms",) if only_forward else ("forward, ms", "backward, ms", "both, ms")
    print_table(("layer", "whose", *parts, "times ours"), rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument(
        "--memory", action="store_true", help="count memory, each layer in processes of its own"
    )
    parser.add_argument("--inference", action="store_true", help="forwards without gradients")
    parser.add_argument("--peak-of", nargs=2, metavar=("SIZE", "LAYER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    chosen_dtype = getattr(torch, arguments.dtype)
    if arguments.peak_of:
        print_peak(*arguments.peak_of, chosen_dtype, only_forward=arguments.inference)
    else:
        main(
            arguments.rounds,
            arguments.sizes,
            chosen_dtype,
            counts_memory=arguments.memory,
            only_forward=arguments.inference,
        )
