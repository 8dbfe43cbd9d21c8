"""Hand back the gradients of the inputs at once, and compute those of the weights while nobody waits.

A worker runs one stage of a pipeline. What is upstream waits for the stage's input gradients only, so the worker
sends them first. The result is that of one backward.
"""

from __future__ import annotations

import copy
import queue
import threading
import time

import torch
from torch import Tensor, nn

from moe_autograd.autograd.split_backward import split_backward

D_MODEL, NUM_TOKENS = 512, 512


def stage() -> nn.Sequential:
    return nn.Sequential(nn.Linear(D_MODEL, D_MODEL), nn.GELU(), nn.Linear(D_MODEL, D_MODEL))


def serve(
    y: Tensor, x: Tensor, module: nn.Module, grads: queue.Queue[Tensor], replies: queue.Queue[Tensor]
) -> None:
    """The worker: one backward."""
    (grad_x,), pending = split_backward(y, grads.get(), x, module.parameters())
    replies.put(grad_x)  # whoever waits goes on from here
    for parameter, grad in zip(module.parameters(), pending.run(), strict=True):
        parameter.grad = grad


def main() -> None:
    torch.manual_seed(0)
    module = stage()
    twin = copy.deepcopy(module)
    for round_ in range(3):
        x = torch.randn(NUM_TOKENS, D_MODEL, requires_grad=True)
        y, grad = module(x), torch.randn(NUM_TOKENS, D_MODEL)
        grads: queue.Queue[Tensor] = queue.Queue()
        replies: queue.Queue[Tensor] = queue.Queue()
        worker = threading.Thread(target=serve, args=(y, x, module, grads, replies))
        worker.start()

        begin = time.perf_counter()
        grads.put(grad)
        grad_x = replies.get()
        replied = time.perf_counter() - begin
        worker.join()
        done = time.perf_counter() - begin

        twin.zero_grad()
        want = torch.autograd.grad(twin(x), x, grad, retain_graph=True)[0]
        twin(x).backward(grad)
        torch.testing.assert_close(grad_x, want)
        for one, other in zip(module.parameters(), twin.parameters(), strict=True):
            torch.testing.assert_close(one.grad, other.grad)
        print(
            f"round {round_ + 1}: reply after {replied * 1e3:.1f} ms, weight gradients after {done * 1e3:.1f} ms"
        )


if __name__ == "__main__":
    main()
