"""Hand back the gradients of the inputs at once, and compute those of the weights while nobody waits.

First by hand: a worker runs one stage of a pipeline. What is upstream waits for the stage's input gradients only, so
the worker sends them first. Then by an option: layers whose backward goes on upstream while idle workers compute the
gradients of the weights. The results are those of one backward.
"""

from __future__ import annotations

import copy
import queue
import threading
import time

import torch
from torch import Tensor, nn

from moe_autograd import parallel_apply, split_backward

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


def pipeline_stage() -> None:
    """Split a backward by hand."""
    module = stage()
    twin = copy.deepcopy(module)
    for round_ in range(4):
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
        if round_ > 0:  # the first one warms up
            print(
                f"round {round_}: reply after {replied * 1e3:.1f} ms, weight gradients after {done * 1e3:.1f} ms"
            )


def gradients(layers: list[list[nn.Sequential]], x: Tensor, *, defers: bool) -> list[Tensor]:
    h = x
    for experts in layers:
        outputs = parallel_apply(experts, [(h,)] * len(experts), defer_weight_grads=defers)
        h = torch.stack(outputs).mean(0)
    weights = [parameter for experts in layers for expert in experts for parameter in expert.parameters()]
    return list(torch.autograd.grad(h.square().mean(), weights))


def stack_of_layers() -> None:
    """Let the library do it."""
    layers = [[stage() for _ in range(2)] for _ in range(3)]
    x = torch.randn(NUM_TOKENS, D_MODEL)
    torch.testing.assert_close(gradients(layers, x, defers=True), gradients(layers, x, defers=False))
    print("three layers of two experts: deferred, and all there when the backward returned")


def main() -> None:
    torch.manual_seed(0)
    pipeline_stage()
    stack_of_layers()


if __name__ == "__main__":
    main()
