"""How soon the gradients of the inputs are there, with a backward in two parts, and what the whole then costs."""

from __future__ import annotations

import time

import torch
from torch import nn

from benchmarks.measure import Times, print_table, take_turns
from moe_autograd.autograd.split_backward import split_backward

NUM_ROUNDS = 15
SIZES = ((2, 1024, 1024), (3, 1024, 1024), (2, 256, 256), (3, 256, 256), (2, 64, 16))  # layers, width, tokens


def expert(num_layers: int, width: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for _ in range(num_layers):
        layers += [nn.Linear(width, width), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def measure(num_layers: int, width: int, num_tokens: int) -> tuple[Times, Times, Times]:
    """Return the times of a backward at once, of the first part, and of both parts."""
    module, x = expert(num_layers, width), torch.randn(num_tokens, width, requires_grad=True)
    weights = list(module.parameters())

    def at_once() -> dict[str, float]:
        y = module(x)
        begun_s = time.perf_counter()
        torch.autograd.grad(y, [x, *weights], torch.ones_like(y))
        return {"all": time.perf_counter() - begun_s}

    def in_two_parts() -> dict[str, float]:
        y = module(x)
        begun_s = time.perf_counter()
        _, pending = split_backward(y, torch.ones_like(y), x, weights)
        inputs_s = time.perf_counter() - begun_s
        pending.run()
        return {"inputs": inputs_s, "all": time.perf_counter() - begun_s}

    took = take_turns({"at once": at_once, "in two parts": in_two_parts}, rounds=NUM_ROUNDS)
    return took["at once"]["all"], took["in two parts"]["inputs"], took["in two parts"]["all"]


def main() -> None:
    rows = []
    for num_layers, width, num_tokens in SIZES:
        whole, inputs, both = measure(num_layers, width, num_tokens)
        times = [f"{one.median_ms:.2f} ms" for one in (whole, inputs, both)]
        rows.append([num_layers, width, num_tokens, *times, inputs.ratio_to(whole), both.ratio_to(whole)])
    heads = ("linear layers", "width", "tokens", "at once", "inputs are there", "both parts")
    print_table((*heads, "inputs / at once", "both / at once"), rows)


if __name__ == "__main__":
    main()
