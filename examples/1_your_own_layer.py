"""Use the parallel map in a layer of your own: sixteen slow functions, forwards and backwards in 50 ms each.

`map_with_parallel_backward(func, *args_per_call)` means ``tuple(func.apply(*args) for args in args_per_call)``,
with the same values and gradients; only all calls wait at the same time, in the forward and in the backward.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor, nn

from moe_autograd import map_with_parallel_backward

DELAY_S = 0.05


class SlowScale(torch.autograd.Function):
    """Stands for anything that waits: a machine far away, a disk, a simulator, a lock."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        """Multiply, after a while."""
        ctx.save_for_backward(x, weight)
        time.sleep(DELAY_S)
        return x * weight

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, Tensor]:
        """Return both gradients, after a while."""
        x, weight = ctx.saved_tensors
        time.sleep(DELAY_S)
        return grad_output * weight, grad_output * x


class SumOfScales(nn.Module):
    """Your own layer: as many calls as there are rows in its weight."""

    def __init__(self, num_calls: int, width: int) -> None:
        super().__init__()
        self.weights = nn.Parameter(torch.randn(num_calls, width))

    def forward(self, x: Tensor) -> Tensor:
        """Make all calls at once."""
        return torch.stack(map_with_parallel_backward(SlowScale, *((x, w) for w in self.weights))).sum(0)

    def plain(self, x: Tensor) -> Tensor:
        """Make one call after the other, as plain PyTorch does."""
        return torch.stack([SlowScale.apply(x, w) for w in self.weights]).sum(0)


def timed_step(function: Any, x: Tensor) -> tuple[Tensor, float]:
    """Return the gradient of x and the time of a forward and a backward."""
    x = x.clone().requires_grad_()
    started_s = time.perf_counter()
    function(x).sum().backward()
    assert x.grad is not None
    return x.grad, time.perf_counter() - started_s


def main() -> None:
    torch.manual_seed(0)
    layer, x = SumOfScales(num_calls=16, width=8), torch.randn(4, 8)
    grad, parallel_s = timed_step(layer, x)
    expected, plain_s = timed_step(layer.plain, x)
    torch.testing.assert_close(grad, expected)
    print(f"16 calls of {DELAY_S * 1e3:.0f} ms, forward and backward, with the same gradients:")
    print(f"  one after the other  {plain_s * 1e3:6.0f} ms")
    print(f"  all at once          {parallel_s * 1e3:6.0f} ms")


if __name__ == "__main__":
    main()
