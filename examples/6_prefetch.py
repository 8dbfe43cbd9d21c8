"""Hide a slow store: while one layer computes its backward, the experts of the layer below are read.

Four layers share a memory that holds little more than one of them. The store is slowed to 100 MB/s.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor, nn

from moe_autograd import parallel_apply
from moe_autograd.autograd.hooks import at_end_of_backward, before_backward
from moe_autograd.autograd.offload import OffloadedExperts, read_ahead
from moe_autograd.autograd.offload.flat import Layout
from moe_autograd.autograd.offload.stores import RamStore

WIDTH, NUM_LAYERS, NUM_EXPERTS, EXPERT_BYTES = 512, 4, 3, 4 * 512 * 512


class SlowStore(RamStore):
    """Host memory behind a slow link."""

    def read(self, name: str, flat: Tensor) -> None:
        """Read slowly."""
        time.sleep(flat.numel() / 100e6)
        super().read(name, flat)

    def write(self, name: str, layout: Layout, flat: Tensor) -> None:
        """Write slowly."""
        time.sleep(flat.numel() / 100e6)
        super().write(name, layout, flat)


def build() -> list[OffloadedExperts]:
    layers: list[OffloadedExperts] = []
    for _ in range(NUM_LAYERS):
        experts = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_EXPERTS))
        if layers:
            layers.append(OffloadedExperts(experts, torch.optim.SGD, beside=layers[0]))
        else:
            layers.append(
                OffloadedExperts(
                    experts, torch.optim.SGD, max_resident_bytes=8 * EXPERT_BYTES, store=SlowStore()
                )
            )
    return layers


def train(layers: list[OffloadedExperts], x: Tensor, num_steps: int) -> tuple[float, float]:
    begin = time.perf_counter()
    for _ in range(num_steps):
        h = x
        for layer in layers:
            h = h + torch.relu(sum(parallel_apply(list(layer), [(h,)] * NUM_EXPERTS)))
        loss = h.square().mean()
        loss.backward()
        for layer in layers:
            layer.step()
            layer.zero_grad()
    return loss.item(), (time.perf_counter() - begin) / num_steps


def main() -> None:
    x = torch.randn(2048, WIDTH)
    for name in ("alone", "reading ahead"):
        torch.manual_seed(0)
        layers = build()
        if name == "reading ahead":
            read_ahead(*layers)
        with layers[0]:
            train(layers, x, 1)
            loss, took = train(layers, x, 3)
        print(f"{name}: {took * 1e3:.0f} ms a step, loss {loss:.6f}")

    # What `read_ahead` is made of, for your own layers:
    a = torch.ones(2, requires_grad=True)
    b, c = a * 2, a * 3
    before_backward((b, c), lambda: print("the backward is about to reach b and c"))
    before_backward(
        (b, c), lambda: at_end_of_backward(lambda: print("the backward is over, a.grad is", a.grad))
    )
    (b * c).sum().backward()


if __name__ == "__main__":
    main()
