"""Maps on a GPU: the numbers of plain PyTorch, on streams of their own, with random numbers of their own.

They need a CUDA device. Kernels are made slow (`torch.cuda._sleep` holds a stream up), so that a missing order between
streams shows in the numbers.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function

from moe_autograd import map_with_parallel_backward, parallel_apply
from tests.support.comparison import natively, one_after_another

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

NUM_CALLS, WIDTH = 8, 64
LONG_CYCLES = 20_000_000  # some 10 ms


class SlowSquare(Function):
    """Waits on its stream before it reads anything, in both passes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        torch.cuda._sleep(LONG_CYCLES)
        ctx.save_for_backward(x * 1)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        torch.cuda._sleep(LONG_CYCLES)
        return 2 * ctx.saved_tensors[0] * grad


def inputs() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(WIDTH, WIDTH, generator=generator).cuda().requires_grad_() for _ in range(NUM_CALLS)]


def step_of_functions(apply: Any) -> list[Tensor]:
    """The caller's own kernels are slow as well, before, between and after the passes."""
    xs = inputs()
    torch.cuda._sleep(LONG_CYCLES)
    results = apply(SlowSquare, *[(x * 3,) for x in xs])
    loss = torch.stack([y * 2 for y in results]).sum()
    loss.backward()
    return [loss.detach(), *[x.grad * 1 for x in xs if x.grad is not None]]


def experts() -> list[nn.Module]:
    torch.manual_seed(1)
    return [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()).cuda() for _ in range(NUM_CALLS)]


def step_of_modules(apply: Any, **options: Any) -> list[Tensor]:
    xs, modules = inputs(), experts()
    outputs = apply(modules, [(x * 3,) for x in xs], **options)
    torch.stack(list(outputs)).square().sum().backward()
    leaves = [*xs, *[p for module in modules for p in module.parameters()]]
    return [*[y.detach() for y in outputs], *[leaf.grad for leaf in leaves if leaf.grad is not None]]


@pytest.mark.parametrize("on_own_stream", [False, True])
def test_functions_give_the_numbers_of_a_plain_loop(on_own_stream: bool) -> None:
    expected = step_of_functions(natively)
    stream = torch.cuda.Stream() if on_own_stream else torch.cuda.current_stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        got = step_of_functions(map_with_parallel_backward)
    torch.cuda.synchronize()
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("options", [{}, {"recompute": True}, {"defer_weight_grads": True}], ids=str)
def test_modules_give_the_numbers_of_a_plain_loop(options: dict[str, Any]) -> None:
    expected, got = step_of_modules(one_after_another), step_of_modules(parallel_apply, **options)
    torch.testing.assert_close(got, expected)


def test_memory_that_is_given_back_early_is_not_written_over() -> None:
    """Tensors go as soon as the host has queued their last use; the allocator may hand them out at once."""
    for _ in range(20):
        torch.testing.assert_close(step_of_functions(map_with_parallel_backward), step_of_functions(natively))


def test_calls_are_on_other_streams_than_the_caller_and_each_other() -> None:
    streams: list[int] = []

    class Notes(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            streams.append(torch.cuda.current_stream().stream_id)
            return x * 1

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            streams.append(torch.cuda.current_stream().stream_id)
            return grad

    results = map_with_parallel_backward(Notes, *[(x,) for x in inputs()])
    forward, streams[:] = set(streams), []
    torch.stack(results).sum().backward()
    assert forward == set(streams)
    assert len(forward) == NUM_CALLS
    assert torch.cuda.current_stream().stream_id not in forward


def test_a_backward_within_a_backward_comes_to_an_end() -> None:
    class Nested(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            with torch.enable_grad():
                ctx.inner = x.detach().requires_grad_()
                ctx.result = ctx.inner.sin()
            return ctx.result.detach()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return torch.autograd.grad(ctx.result, ctx.inner, grad)[0]

    xs = inputs()
    torch.stack(map_with_parallel_backward(Nested, *[(x,) for x in xs])).sum().backward()
    torch.testing.assert_close([x.grad for x in xs], [x.detach().cos() for x in xs])


def dropped(bound: int | None, *, recompute: bool = False) -> list[Tensor]:
    torch.manual_seed(7)
    xs, modules = (
        inputs(),
        [nn.Sequential(nn.Dropout(0.5), nn.Tanh(), nn.Dropout(0.2)).cuda() for _ in range(NUM_CALLS)],
    )
    outputs = parallel_apply(modules, [(x,) for x in xs], max_concurrency=bound, recompute=recompute)
    torch.stack(outputs).square().sum().backward()
    return [*[y.detach() for y in outputs], *[x.grad for x in xs if x.grad is not None], torch.rand(3)]


@pytest.mark.parametrize("recompute", [False, True])
def test_dropout_is_the_same_with_any_number_of_workers_and_when_recomputed(recompute: bool) -> None:
    expected = dropped(1)
    for bound in (2, None, None):
        torch.testing.assert_close(dropped(bound, recompute=recompute), expected, rtol=0, atol=0)
    assert len({tuple(y.flatten().tolist()) for y in expected[:NUM_CALLS]}) == NUM_CALLS


def test_cuda_and_its_current_device_are_one_stream_of_numbers() -> None:
    def draw(x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.rand(8, device="cuda"), torch.rand_like(x)

    one, other = parallel_apply([draw] * 2, [(torch.ones(8, device="cuda"),)] * 2)
    numbers = [tuple(drawn.tolist()) for drawn in (*one, *other)]
    assert len(set(numbers)) == 4


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_calls_on_several_devices_are_ordered_as_well() -> None:
    def step(apply: Any) -> list[Tensor]:
        xs = [x.detach().to(f"cuda:{i % 2}").requires_grad_() for i, x in enumerate(inputs())]
        results = apply(SlowSquare, *[(x * 3,) for x in xs])
        torch.stack([y.to("cuda:0") for y in results]).sum().backward()
        return [x.grad for x in xs if x.grad is not None]

    torch.testing.assert_close(step(map_with_parallel_backward), step(natively))
