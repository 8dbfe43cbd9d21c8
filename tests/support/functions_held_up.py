"""Autograd functions whose kernels are held up on a GPU, in many ways of using streams, and programs of them."""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from moe_autograd import map_with_parallel_backward
from tests.support.devices import DEVICE, HAS_GPU, hold_up

NUM_CALLS, WIDTH = 6, 64
PATIENCE_S = 60.0


def inputs(num_calls: int = NUM_CALLS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(WIDTH, WIDTH, generator=generator).to(DEVICE).requires_grad_() for _ in range(num_calls)
    ]


def grads_of(leaves: list[Tensor]) -> list[Tensor]:
    return [leaf.grad.clone() for leaf in leaves if leaf.grad is not None]


def synchronize() -> None:
    if HAS_GPU:
        torch.cuda.synchronize()


def on_own_stream() -> contextlib.AbstractContextManager[Any]:
    """A stream that goes on after the current one."""
    if not HAS_GPU:
        return contextlib.nullcontext()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    return torch.cuda.stream(stream)


def assert_same_bits(got: Any, expected: Any) -> None:
    synchronize()
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


class Slow(Function):
    """Waits on its stream before it reads anything, in both passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *_: Any) -> Any:
        hold_up()
        ctx.save_for_backward(x * 1)
        return x * x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        hold_up()
        return (2 * ctx.saved_tensors[0] * grads[0], *(None,) * (len(ctx.needs_input_grad) - 1))


class Synchronizes(Slow):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *_: Any) -> Any:
        hold_up()
        ctx.save_for_backward(x.cpu().to(DEVICE))
        return x * x.sum().item()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return ctx.saved_tensors[0].sum().item() * grads[0].cpu().to(DEVICE)


class HasItsOwnStream(Slow):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *_: Any) -> Any:
        with on_own_stream():
            hold_up()
            result = x * x
            if HAS_GPU:
                side = torch.cuda.current_stream()
                x.record_stream(side)
        if HAS_GPU:
            torch.cuda.current_stream().wait_stream(side)
            result.record_stream(torch.cuda.current_stream())
        ctx.save_for_backward(x * 1)
        return result


class LeavesAnotherStreamCurrent(Slow):
    """What follows it natively is queued on that stream."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *_: Any) -> Any:
        on_own_stream().__enter__()
        return Slow.forward(ctx, x)


class Nested(Slow):
    """Maps within maps, to the depth that the second argument says."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, depth: int = 3, apply: Any = map_with_parallel_backward) -> Any:
        if depth == 0:
            return Slow.forward(ctx, x)
        with torch.enable_grad():
            inner = x.detach().requires_grad_()
            halves = apply(Nested, (inner * 2, depth - 1, apply), (inner * 3, depth - 1, apply))
            ctx.inner, ctx.result = inner, halves[0] + halves[1]
        ctx.depth = depth
        return ctx.result.detach()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        if not hasattr(ctx, "depth"):
            return Slow.backward(ctx, *grads)
        (grad,) = torch.autograd.grad(ctx.result, ctx.inner, grads[0])
        return (grad, *(None,) * (len(ctx.needs_input_grad) - 1))


class MapsInItsBackward(Slow):
    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        with torch.enable_grad():
            leaf = ctx.saved_tensors[0].detach().requires_grad_()
            halves = map_with_parallel_backward(Slow, (leaf,), (leaf * 2,))
            (grad,) = torch.autograd.grad(halves[0] + halves[1], leaf, grads[0])
        return grad


class ReturnsItsInput(Slow):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *_: Any) -> Any:
        hold_up()
        return x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return grads[0] * 3


class ReturnsAView(ReturnsItsInput):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *_: Any) -> Any:
        return x.view(-1, WIDTH)


class ChangesInPlace(ReturnsItsInput):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *_: Any) -> Any:
        hold_up()
        ctx.mark_dirty(x)
        return x.mul_(3)


class ComputesOnTheCPU(Slow):
    """Its input and its result are on the device."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *_: Any) -> Any:
        hold_up()
        ctx.save_for_backward(x.cpu())
        return (x.cpu() * x.cpu()).to(DEVICE)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return (2 * ctx.saved_tensors[0] * grads[0].cpu()).to(DEVICE)


class GivesAZeroTensor(Slow):
    """Of those that hold no memory, and may not be written to."""

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return torch._efficientzerotensor(grads[0].shape, device=DEVICE)


class ReturnsAConjugate(Slow):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *_: Any) -> Any:
        hold_up()
        ctx.save_for_backward(torch.complex(x, x).conj())
        return torch.complex(x, 2 * x).conj()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        return (grads[0] * ctx.saved_tensors[0]).imag * 1


def step(apply: Any, func: type[Function], num_calls: int = NUM_CALLS) -> list[Tensor]:
    """The caller's kernels are held up as well, before, between and after the passes."""
    xs = inputs(num_calls)
    with on_own_stream():  # which puts the stream back that a call replaced
        hold_up()
        depth = (3, apply) if func is Nested else ()
        results = apply(func, *[(x * 3, *depth) for x in xs])
        hold_up()
        loss = torch.stack([(y * 2).abs().sum() for y in results]).sum()
        loss.backward()
        hold_up()
        seen = [*[y.detach() * 1 for y in results], *grads_of(xs)]
        synchronize()
    return seen
