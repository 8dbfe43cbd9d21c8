"""How maps on a GPU end: calls that fail, wait for each other or are interrupted while kernels run."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function

from moe_autograd import map_with_parallel_backward
from tests.support.comparison import natively
from tests.support.devices import DEVICE, HAS_GPU, hold_up, needs_gpu

pytestmark = pytest.mark.gpu

NUM_CALLS, SIZE = 6, 1 << 12
PATIENCE_S = 60.0


class Does(Function):
    """Squares its input, held up, and calls on the way what it is given for the forward and for the backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, in_forward: Any = None, in_backward: Any = None) -> Tensor:
        hold_up()
        ctx.save_for_backward(x * 1)
        if in_forward is not None:
            in_forward()
        ctx.in_backward = in_backward
        return x * x

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        hold_up()
        grad = 2 * ctx.saved_tensors[0] * grads[0]
        if ctx.in_backward is not None:
            ctx.in_backward()
        return (grad, None, None)[: len(ctx.needs_input_grad)]


def nothing() -> None:
    return None


def raising(error: BaseException) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


def inputs(num_calls: int) -> list[Tensor]:
    return [torch.full((SIZE,), i + 1.0, device=DEVICE, requires_grad=True) for i in range(num_calls)]


def step(apply: Any, in_forward: list[Any], in_backward: list[Any]) -> list[Tensor]:
    xs = inputs(len(in_forward))
    hold_up()
    results = apply(
        Does, *[(x * 3, *own) for x, own in zip(xs, zip(in_forward, in_backward, strict=True), strict=True)]
    )
    torch.stack([y * 2 for y in results]).sum().backward()
    return [*[y.detach() for y in results], *[x.grad * 1 for x in xs if x.grad is not None]]


def quiet(num_calls: int = NUM_CALLS) -> list[Any]:
    return [None] * num_calls


def assert_maps_work() -> None:
    got = step(map_with_parallel_backward, quiet(), quiet())
    torch.testing.assert_close(got, step(natively, quiet(), quiet()), rtol=0, atol=0)


@pytest.mark.parametrize("failing", [[0], [5], [1, 2, 4]], ids=str)
@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("kind", [ValueError, SystemExit, BaseException])
def test_the_lowest_failing_call_raises_its_own_error_while_others_are_held_up(
    kind: type[BaseException], phase: str, failing: list[int]
) -> None:
    errors = [raising(kind(i)) if i in failing else nothing for i in range(NUM_CALLS)]
    passes = (errors, quiet()) if phase == "forward" else (quiet(), errors)
    with pytest.raises(kind) as caught:
        step(map_with_parallel_backward, *passes)
    assert type(caught.value) is kind
    assert caught.value.args == (failing[0],)
    notes = "\n".join(caught.value.__notes__)
    assert f"{phase}: raised by call {failing[0]} (Does) of {NUM_CALLS}" in notes
    assert (f"{len(failing) - 1} other call" in notes) == (len(failing) > 1)
    assert_maps_work()


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_ctrl_c_from_within_a_call_interrupts_and_the_next_map_is_right(phase: str) -> None:
    """The engine runs a backward of a device on a thread of its own: there Ctrl-C may come once that is over."""
    has_come = threading.Event()

    def interrupt() -> None:
        os.kill(os.getpid(), signal.SIGINT)
        has_come.set()

    def wait() -> None:
        assert has_come.wait(PATIENCE_S)

    calls = [interrupt if i == 2 else wait for i in range(NUM_CALLS)]

    def run() -> None:
        step(map_with_parallel_backward, *((calls, quiet()) if phase == "forward" else (quiet(), calls)))
        threading.Event().wait(PATIENCE_S)

    with pytest.raises(KeyboardInterrupt):
        run()
    assert_maps_work()


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_hundreds_of_failing_maps_leave_neither_memory_nor_threads(phase: str, no_gc: None) -> None:
    class Fails(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, fails: bool) -> Tensor:
            ctx.save_for_backward(x * 1)
            if fails and phase == "forward":
                raise ValueError("on purpose")
            return x * x

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            grads[0] * ctx.saved_tensors[0]
            raise ValueError("on purpose")

    xs = inputs(NUM_CALLS)

    def fail() -> None:
        results = map_with_parallel_backward(Fails, *[(x, i == 3) for i, x in enumerate(xs)])
        torch.stack(results).sum().backward()

    def memory_after(count: int) -> int:
        for _ in range(count):
            with pytest.raises(ValueError, match="on purpose"):
                fail()
        torch.ones((), device=DEVICE, requires_grad=True).backward()  # the engine lets go of the last one
        if not HAS_GPU:
            return 0
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated()

    before, num_threads = memory_after(20), threading.active_count()
    assert memory_after(250) == before
    assert threading.active_count() <= num_threads + NUM_CALLS


@needs_gpu
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_call_that_finds_no_memory_says_so_and_the_next_map_is_right(phase: str) -> None:
    def demand() -> None:
        torch.empty(1 << 46, dtype=torch.uint8, device=DEVICE)

    calls = [demand if i == 3 else None for i in range(NUM_CALLS)]
    with pytest.raises(torch.OutOfMemoryError) as caught:
        step(map_with_parallel_backward, *((calls, quiet()) if phase == "forward" else (quiet(), calls)))
    assert f"{phase}: raised by call 3" in "\n".join(caught.value.__notes__)
    assert_maps_work()


def test_calls_that_meet_between_their_kernels_all_come_in_both_passes() -> None:
    def meeting() -> list[Any]:
        return [threading.Barrier(8).wait] * 8

    def patiently(waits: list[Any]) -> list[Any]:
        return [lambda wait=wait: wait(PATIENCE_S) for wait in waits]

    got = step(map_with_parallel_backward, patiently(meeting()), patiently(meeting()))
    torch.testing.assert_close(got, step(natively, quiet(8), quiet(8)), rtol=0, atol=0)


@pytest.mark.parametrize("waits_for", [1, -1])
def test_sixty_four_calls_that_each_wait_for_the_next_all_end(waits_for: int) -> None:
    def chain() -> list[Callable[[], None]]:
        events = [threading.Event() for _ in range(64)]

        def call(i: int) -> None:
            if 0 <= i + waits_for < 64:
                assert events[i + waits_for].wait(PATIENCE_S)
            events[i].set()

        return [lambda i=i: call(i) for i in range(64)]  # type: ignore[misc]

    got = step(map_with_parallel_backward, chain(), chain())
    torch.testing.assert_close(got, step(natively, quiet(64), quiet(64)), rtol=0, atol=0)
