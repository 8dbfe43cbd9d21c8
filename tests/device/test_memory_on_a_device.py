"""What maps leave behind on a device: no memory. It is compared with what was taken before, without the collector."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function

from moe_autograd import map_with_parallel_backward, parallel_apply
from moe_autograd._streams import MOST_LANES
from tests.support.comparison import natively, one_after_another
from tests.support.devices import DEVICE, HAS_GPU, LONG_CYCLES, hold_up, needs_gpu

pytestmark = pytest.mark.gpu

NUM_CALLS, NUM_MAPS, MIB = 8, 200, 1 << 20
NUM_NUMBERS = 1 << 19  # of 4 bytes: 2 MiB
IMPOSSIBLE = 1 << 50  # bytes
PATIENCE_S = 20.0


class Saves(Function):
    """Saves what it has made; nothing of it is a matrix product, whose workspaces stay."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fails: str = "") -> Tensor:
        made = x.sin()
        ctx.save_for_backward(made)
        ctx.fails = fails
        if fails == "forward":
            raise ValueError("in a forward")
        return made * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        found = ctx.saved_tensors[0] * grad
        if ctx.fails == "backward":
            raise ValueError("in a backward")
        return found * 2, None


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(NUM_NUMBERS))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.weight).sin().exp() * x


def numbers(*shape: int) -> Tensor:
    return torch.ones(shape or (NUM_NUMBERS,), device=DEVICE)


def step_of_functions(apply: Callable[..., Any], fails: str = "") -> None:
    x = numbers().requires_grad_()
    results = apply(Saves, *[(x * i, fails if i == 3 else "") for i in range(NUM_CALLS)])
    torch.stack(results).sum().backward()


def step_of_modules(apply: Callable[..., Any], modules: list[Scaled], **options: Any) -> None:
    x = numbers().requires_grad_()
    torch.stack(list(apply(modules, [(x * 2,) for _ in modules], **options))).sum().backward()
    for module in modules:
        module.weight.grad = None


def settled_bytes() -> int:
    torch.ones(
        1, device=DEVICE, requires_grad=True
    ).sum().backward()  # the engine's thread lets go of the last one
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


STEPS: dict[str, dict[str, Any] | None] = {
    "functions": None,
    "modules": {},
    "recomputed": {"recompute": True},
    "deferred": {"defer_weight_grads": True},
}


@pytest.fixture(params=STEPS)
def step(request: pytest.FixtureRequest) -> Callable[[bool], None]:
    """Does a step of maps, or the same one plainly."""
    options, modules = STEPS[request.param], [Scaled().to(DEVICE) for _ in range(NUM_CALLS)]

    def run(is_plain: bool = False) -> None:
        if options is None:
            step_of_functions(natively if is_plain else map_with_parallel_backward)
        elif is_plain:
            step_of_modules(one_after_another, modules)
        else:
            step_of_modules(parallel_apply, modules, **options)

    return run


@needs_gpu
@pytest.mark.usefixtures("no_gc")
def test_after_a_map_and_its_backward_no_more_memory_is_taken_than_before(step: Callable[..., None]) -> None:
    step()
    before = settled_bytes()
    for _ in range(3):
        step()
        assert settled_bytes() == before


@needs_gpu
@pytest.mark.usefixtures("no_gc")
@pytest.mark.parametrize("settles", [True, False])
def test_many_maps_ask_the_system_for_no_more_memory_than_a_few(
    settles: bool, step: Callable[..., None], record_property: Callable[[str, object], None]
) -> None:
    torch.cuda.empty_cache()
    for _ in range(10):
        step()
    before = torch.cuda.memory_reserved()
    for _ in range(NUM_MAPS):
        step()
        if settles:
            torch.cuda.synchronize()
    after = torch.cuda.memory_reserved()
    record_property("reserved_mib", (before / MIB, after / MIB))
    print(f"reserved: {before / MIB:.0f} MiB, then {after / MIB:.0f} MiB")
    assert after <= 2 * before


@needs_gpu
@pytest.mark.usefixtures("no_gc")
def test_the_peak_of_a_step_is_not_far_above_that_of_the_plain_loop(
    step: Callable[..., None], record_property: Callable[[str, object], None]
) -> None:
    peaks = []
    for is_plain in (True, False):
        step(is_plain)
        before = settled_bytes()
        torch.cuda.reset_peak_memory_stats()
        step(is_plain)
        peaks.append(torch.cuda.max_memory_allocated() - before)
    ratio = peaks[1] / peaks[0]
    record_property("peak_ratio", ratio)
    print(f"peak: {peaks[0] / MIB:.0f} MiB plainly, {peaks[1] / MIB:.0f} MiB in maps, {ratio:.2f} times")
    assert ratio <= 1.5


class Product(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x @ x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        found: Tensor = grad @ x.T + x.T @ grad
        return found


@needs_gpu
def test_matrix_products_leave_no_more_workspaces_than_there_are_lanes_for_each_thread(
    record_property: Callable[[str, object], None],
) -> None:
    """Torch keeps one of some 32 MiB for each handle, of which a thread has one, and stream that they met."""
    num_calls = 16
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    before = settled_bytes()
    for _ in range(60):
        x = numbers(64, 64).requires_grad_()
        torch.stack(
            map_with_parallel_backward(Product, *[(x * i,) for i in range(num_calls)])
        ).sum().backward()
    del x
    grown = settled_bytes() - before
    torch._C._cuda_clearCublasWorkspaces()
    record_property("workspaces_mib", grown / MIB)
    print(f"workspaces: {grown / MIB:.0f} MiB")
    assert grown <= MOST_LANES * (num_calls + 2) * 33 * MIB


@pytest.mark.usefixtures("no_gc")
def test_what_a_call_saved_is_released_as_its_backward_ends_though_others_go_on() -> None:
    saved: list[weakref.ref[Tensor]] = []
    all_released = threading.Event()

    class Watched(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, is_last: bool) -> Tensor:
            made = x * 2
            ctx.save_for_backward(made)
            ctx.is_last = is_last
            if not is_last:
                saved.append(weakref.ref(made, lambda _: all_released.set() if is_over() else None))
            return made * 1

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
            hold_up(LONG_CYCLES // 10)
            if ctx.is_last:
                assert all_released.wait(PATIENCE_S), "the others' tensors live"
            return ctx.saved_tensors[0] * grad, None

    def is_over() -> bool:
        return all(ref() is None for ref in saved)

    x = numbers(16).requires_grad_()
    results = map_with_parallel_backward(Watched, *[(x, i == 0) for i in range(NUM_CALLS)])
    assert [ref() is None for ref in saved] == [False] * (NUM_CALLS - 1)
    torch.stack(results).sum().backward()
    torch.testing.assert_close(x.grad, torch.full_like(x, 2 * NUM_CALLS))


@needs_gpu
@pytest.mark.usefixtures("no_gc")
@pytest.mark.parametrize("fails", ["forward", "backward"])
def test_a_map_that_fails_leaves_no_memory_behind(fails: str) -> None:
    def fail() -> None:
        with contextlib.suppress(ValueError):
            step_of_functions(map_with_parallel_backward, fails)
            pytest.fail("nothing was raised")

    fail()
    before = settled_bytes()
    for _ in range(3):
        fail()
        assert settled_bytes() == before


class TakesTooMuch(Saves):
    """Asks for more memory than there is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, fails: str = "") -> Tensor:
        if fails == "forward":
            torch.empty(IMPOSSIBLE, dtype=torch.uint8, device=x.device)
        ctx.wants = IMPOSSIBLE if fails == "backward" else 1
        return Saves.forward(ctx, x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        torch.empty(ctx.wants, dtype=torch.uint8, device=grad.device)
        return Saves.backward(ctx, grad)


@pytest.mark.parametrize("fails", ["forward", "backward"])
def test_a_call_that_finds_no_memory_is_named_and_the_next_map_works(fails: str) -> None:
    out_of_memory: type[RuntimeError] = torch.OutOfMemoryError if HAS_GPU else RuntimeError
    x = numbers(64).requires_grad_()

    def step(apply: Callable[..., Any], fails: str) -> None:
        results = apply(TakesTooMuch, *[(x * i, fails if i == 3 else "") for i in range(NUM_CALLS)])
        torch.stack(results).sum().backward()

    with pytest.raises(out_of_memory, match="memory") as raised:
        step(map_with_parallel_backward, fails)
    assert any("call 3 (TakesTooMuch)" in note for note in raised.value.__notes__)
    for apply in (natively, map_with_parallel_backward):
        x.grad = None
        step(apply, "")
        torch.testing.assert_close(x.grad, sum(2 * i * (x.detach() * i).sin() for i in range(NUM_CALLS)))


@needs_gpu
def test_a_map_that_exceeds_what_the_process_may_take_raises_and_the_next_fits() -> None:
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + 512 * MIB) / total)
    try:
        for size, fits in ((256 * MIB, False), (MIB, True)):
            x = torch.ones(size // 4, device=DEVICE, requires_grad=True)
            if fits:
                map_with_parallel_backward(Saves, *[(x,)] * NUM_CALLS)
            else:
                with pytest.raises(torch.OutOfMemoryError, match="memory"):
                    map_with_parallel_backward(Saves, *[(x,)] * NUM_CALLS)
            del x
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
