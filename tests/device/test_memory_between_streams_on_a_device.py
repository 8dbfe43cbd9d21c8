"""Memory that kernels of other streams still use: the allocator hands it out to nobody.

Where it could be given back too early, other kernels ask for as much and fill it with NaN while the first ones wait.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function

from moe_autograd import map_with_parallel_backward, parallel_apply
from tests.support.comparison import one_after_another
from tests.support.devices import DEVICE, HAS_GPU, LONG_CYCLES, hold_up
from tests.support.functions_held_up import (
    NUM_CALLS,
    PATIENCE_S,
    WIDTH,
    assert_same_bits,
    inputs,
    on_own_stream,
    synchronize,
)

pytestmark = pytest.mark.gpu

LARGE = 1 << 22  # elements; of the allocator's segments each has one of its own
NAN = float("nan")


def forget_free_memory() -> None:
    """What is asked for next is what is given back next."""
    synchronize()
    if HAS_GPU:
        torch.cuda.empty_cache()


class Returns(Function):
    """What the second argument makes of a new tensor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, pack: Callable[[Tensor], Any]) -> Any:
        return pack(x * 2)


class FillsWithNaN(Function):
    """Takes what the allocator has for a call, without regard to who reads it."""

    @staticmethod
    def forward(ctx: Any, size: int) -> None:
        for dtype in (torch.float32, torch.float64, torch.complex64):
            [torch.full((size,), NAN, dtype=dtype, device=DEVICE) for _ in range(2)]


def coo(x: Tensor) -> Tensor:
    places = torch.arange(len(x), device=x.device)[None] * 1
    return torch.sparse_coo_tensor(places, x, (len(x),), is_coalesced=True, check_invariants=False)


def jagged(x: Tensor) -> Tensor:
    offsets = torch.arange(len(x) + 1, device=x.device)
    return torch.nested.nested_tensor_from_jagged(x[:, None], offsets, min_seqlen=1, max_seqlen=1)


PACKED: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "tensor": (lambda x: x, lambda y: y),
    "list": (lambda x: [x], lambda y: y[0]),
    "coo_values": (coo, lambda y: y._values()),
    "coo_indices": (coo, lambda y: y._indices()[0]),
    "jagged_values": (jagged, lambda y: y.values()[:, 0]),
    "jagged_offsets": (jagged, lambda y: y.offsets()),
    "conjugate": (lambda x: torch.complex(x, x).conj(), lambda y: y),
}


@pytest.mark.parametrize("kind", PACKED)
def test_results_are_not_written_over_while_their_caller_still_reads_them(kind: str) -> None:
    """The next map's caller is on a stream that waits for none of the reads."""
    pack, unpack = PACKED[kind]
    xs = [torch.full((LARGE,), float(i), device=DEVICE) for i in range(3)]
    expected = [unpack(pack(x * 2)).clone() for x in xs]
    seen = [torch.empty_like(y) for y in expected]
    FillsWithNaN.apply(8)  # type: ignore[no-untyped-call]  # the first launch of a kernel may wait for others
    for own, x in zip(seen, xs, strict=True):
        own.copy_(unpack(pack(x * 2))).zero_()
    forget_free_memory()
    with on_own_stream():
        results = list(map_with_parallel_backward(Returns, *[(x, pack) for x in xs]))
        hold_up(5 * LONG_CYCLES)
        for own in seen:
            own.copy_(unpack(results.pop(0)))
    with on_own_stream():
        map_with_parallel_backward(FillsWithNaN, *[(len(seen[0]),)] * 3)
    assert_same_bits(seen, expected)


class KeepsAside(Function):
    """Keeps a tensor as a free attribute; call 2, held up, lets go of it before call 3 asks for as much memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, number: int, barrier: threading.Barrier) -> Tensor:
        ctx.aside, ctx.number, ctx.barrier = x * 3, number, barrier
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        aside, ctx.aside = ctx.aside, None
        found = torch.empty_like(grad)
        ctx.barrier.wait(PATIENCE_S)
        if ctx.number == 2:
            hold_up(5 * LONG_CYCLES)
        torch.mul(aside, grad, out=found)
        del aside
        ctx.barrier.wait(PATIENCE_S)
        if ctx.number == 3:
            torch.full_like(grad, NAN)
        return found, None, None


@pytest.mark.parametrize("first", [0, 1])
def test_what_a_call_keeps_is_not_written_over_by_another_one_in_a_backward_of_all_or_some(
    first: int,
) -> None:
    xs = [torch.full((LARGE,), float(i + 1), device=DEVICE, requires_grad=True) for i in range(5)]
    expected = [x.detach() * torch.full_like(x, 6.0) for x in xs[first:]]
    forget_free_memory()
    barrier = threading.Barrier(5 - first)
    results = map_with_parallel_backward(KeepsAside, *[(x, i, barrier) for i, x in enumerate(xs)])
    found = torch.autograd.grad(results[first:], xs[first:], [torch.full_like(x, 2.0) for x in xs[first:]])
    assert_same_bits([*found], expected)


def test_inputs_and_weights_may_go_or_change_right_after_the_map() -> None:
    weights = [torch.full((LARGE,), float(i), device=DEVICE) for i in range(NUM_CALLS)]
    expected = [w * 5 for w in weights]

    def call(weight: Tensor) -> Callable[[Tensor], Tensor]:
        def multiply(x: Tensor) -> Tensor:
            hold_up()
            return weight * x

        return multiply

    xs = [torch.full((LARGE,), 5.0, device=DEVICE) for _ in weights]
    results = parallel_apply([call(weight) for weight in weights], [(x,) for x in xs])
    for weight in weights:
        weight.fill_(NAN)
    del weights, xs, weight
    filled = [torch.full((LARGE,), NAN, device=DEVICE) for _ in range(2 * NUM_CALLS)]
    assert_same_bits(results, expected)
    assert len(filled) == 2 * NUM_CALLS


class Attached(nn.Module):
    """A layer whose calls are made on threads: it may do anything."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.note: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        hold_up()
        self.note.append(threading.get_ident())
        y: Tensor = self.inner(x).tanh()
        return y


def train(apply: Any) -> list[Tensor]:
    """Three steps, each of two maps whose gradients add up, with an optimizer that is held up as well."""
    torch.manual_seed(3)
    layers = [Attached().to(DEVICE, torch.float64) for _ in range(NUM_CALLS)]
    weights = [weight for layer in layers for weight in layer.parameters()]
    optimizer = torch.optim.SGD(weights, lr=0.1, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        for scale in (1, 2):
            outputs = apply(layers, [(x.detach().double() * scale,) for x in inputs()])
            torch.stack([y.square().sum() for y in outputs]).sum().backward()
        hold_up()
        optimizer.step()
    return [weight.detach() for weight in weights]


def test_training_modules_whose_gradients_add_up_gives_the_weights_of_a_loop() -> None:
    """PyTorch warns, which is an error here, if a leaf was first met on another stream than its gradient comes from."""
    torch.testing.assert_close(train(parallel_apply), train(one_after_another), rtol=1e-9, atol=1e-12)
