"""How soon the gradients of the inputs are there, with a backward in two parts, and what the whole then costs.

Three tables: split by hand, in a server, and in a stack of layers that defers.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.measure import Times, print_table, take_turns
from experts_server import ExpertsServer
from experts_server.configuration.config import MemoryConfig, ServingConfig
from moe_autograd import parallel_apply
from moe_autograd.autograd.split_backward import split_backward
from moe_autograd.remote import RemoteOptimizer, connect

NUM_ROUNDS = 15
SIZES = ((2, 1024, 1024), (3, 1024, 1024), (2, 256, 256), (3, 256, 256), (2, 64, 16))  # layers, width, tokens
SERVER_SIZES = (  # experts, layers, width, tokens
    *((1, 2, 1024, 1024), (1, 3, 1024, 1024), (1, 2, 1024, 256), (1, 3, 1024, 256)),
    *((4, 2, 1024, 256), (4, 3, 2048, 256)),
)
NUM_LAYERS, NUM_EXPERTS = 6, 4
# Width, tokens, waits in seconds.
STACKS = ((256, 256, 0.0), (256, 256, 0.05), (1024, 512, 0.0), (1024, 512, 0.05))


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


def print_by_hand() -> None:
    rows = []
    for num_layers, width, num_tokens in SIZES:
        whole, inputs, both = measure(num_layers, width, num_tokens)
        times = [f"{one.median_ms:.2f} ms" for one in (whole, inputs, both)]
        rows.append([num_layers, width, num_tokens, *times, inputs.ratio_to(whole), both.ratio_to(whole)])
    heads = ("linear layers", "width", "tokens", "at once", "inputs are there", "both parts")
    print_table((*heads, "inputs / at once", "both / at once"), rows)


# ---- in a server


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1e-4)


def serve(num_experts: int, num_layers: int, width: int, *, split: bool) -> ExpertsServer:
    config = ServingConfig(memory=MemoryConfig(split_backward=split))
    hosted = {f"e.{i}": expert(num_layers, width) for i in range(num_experts)}
    return ExpertsServer(hosted, optimizer=sgd, config=config)


def measure_server(
    num_experts: int, num_layers: int, width: int, num_tokens: int
) -> dict[str, dict[str, Times]]:
    """Return the times until a client has the input gradients of all experts, and of its backward and step."""
    with (
        serve(num_experts, num_layers, width, split=False) as whole,
        serve(num_experts, num_layers, width, split=True) as split,
        connect(whole.address) as experts,
        connect(split.address) as experts_split,
    ):
        x = torch.randn(num_tokens, width, requires_grad=True)

        def train(experts: Any) -> dict[str, float]:
            optimizer = RemoteOptimizer(experts)
            optimizer.zero_grad()
            y = torch.stack(parallel_apply(list(experts.values()), [(x,)] * num_experts))
            grad = torch.ones_like(y) / y.numel()
            begun_s = time.perf_counter()
            torch.autograd.backward(y, grad)
            inputs_s = time.perf_counter() - begun_s
            optimizer.step()
            return {"inputs": inputs_s, "all": time.perf_counter() - begun_s}

        variants = {"whole": lambda: train(experts), "split": lambda: train(experts_split)}
        return take_turns(variants, rounds=NUM_ROUNDS)


def print_in_a_server() -> None:
    rows = []
    for size in SERVER_SIZES:
        took = measure_server(*size)
        whole, split = took["whole"], took["split"]
        times = [
            f"{took[v][part].median_ms:.1f} ms" for part in ("inputs", "all") for v in ("whole", "split")
        ]
        ratios = [split[part].ratio_to(whole[part]) for part in ("inputs", "all")]
        rows.append([*size, *times, *ratios])
    heads = ("experts", "linear layers", "width", "tokens", "inputs: whole", "inputs: split")
    print_table((*heads, "with step: whole", "with step: split", "inputs: ratio", "with step: ratio"), rows)


# ---- in a stack of layers


class Waits(torch.autograd.Function):
    """The identity, between layers; its backward waits, as one does for another machine."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, wait_s: float) -> Tensor:
        ctx.wait_s = wait_s
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.wait_s)
        return grad, None


def measure_stack(width: int, num_tokens: int, wait_s: float) -> dict[str, dict[str, Times]]:
    """Return the time of a whole backward through layers of experts, with something that waits before each."""
    layers = [[expert(2, width) for _ in range(NUM_EXPERTS)] for _ in range(NUM_LAYERS)]

    def backward(defers: bool) -> dict[str, float]:
        h: Tensor = torch.randn(num_tokens, width, requires_grad=True)
        for experts in layers:
            inputs = [(Waits.apply(h, wait_s),)] * NUM_EXPERTS  # type: ignore[no-untyped-call]
            h = torch.stack(parallel_apply(experts, inputs, defer_weight_grads=defers)).mean(0)
        loss = h.square().mean()
        begun_s = time.perf_counter()
        loss.backward()
        return {"all": time.perf_counter() - begun_s}

    return take_turns(
        {"at once": lambda: backward(False), "defers": lambda: backward(True)}, rounds=NUM_ROUNDS
    )


def print_in_a_stack() -> None:
    rows = []
    for width, num_tokens, wait_s in STACKS:
        took = measure_stack(width, num_tokens, wait_s)
        at_once, defers = took["at once"]["all"], took["defers"]["all"]
        times = [f"{one.median_ms:.0f} ms" for one in (at_once, defers)]
        rows.append([width, num_tokens, f"{1000 * wait_s:.0f} ms", *times, defers.ratio_to(at_once)])
    heads = ("width", "tokens", "waits at each layer", "at once", "deferring", "deferring / at once")
    print_table(heads, rows)


def main() -> None:
    print_by_hand()
    print()
    print_in_a_server()
    print()
    print_in_a_stack()


if __name__ == "__main__":
    main()
