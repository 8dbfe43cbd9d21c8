"""Every call can wait for every other one, at any depth, and a bound is a bound; nothing ever deadlocks.

A barrier across N calls passes only if all N run at once. One that is not met raises after a minute.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function

from moe_autograd import map_with_parallel_backward, parallel_apply
from tests.support.functions_waiting import PATIENCE_S, Calls, Counts, Crowd, Meets


def ones(num_calls: int) -> list[Tensor]:
    return [torch.ones(2, requires_grad=True) for _ in range(num_calls)]


def backward_of_sum(results: Any) -> None:
    torch.stack(list(results)).sum().backward()


def assert_doubled(inputs: list[Tensor]) -> None:
    assert all(x.grad is not None and x.grad.tolist() == [2.0, 2.0] for x in inputs)


@pytest.mark.parametrize("num_calls", [1, 2, 3, 8, 64, 256])
def test_all_calls_meet_in_forward_and_in_backward(num_calls: int) -> None:
    barrier = threading.Barrier(num_calls)
    inputs = ones(num_calls)
    backward_of_sum(map_with_parallel_backward(Meets, *[(x, barrier) for x in inputs]))
    assert_doubled(inputs)


@pytest.mark.parametrize("num_calls", [8, 64])
def test_all_calls_meet_when_each_of_two_halves_has_its_own_barrier(num_calls: int) -> None:
    """The first calls to be started are not the ones that can go on: 0, 2, 4, ... wait for 1, 3, 5, ..."""
    barriers = [threading.Barrier(num_calls // 2) for _ in range(2)]
    inputs = ones(num_calls)
    backward_of_sum(
        map_with_parallel_backward(Meets, *[(x, barriers[2 * i // num_calls]) for i, x in enumerate(inputs)])
    )
    assert_doubled(inputs)


def test_the_first_call_can_wait_for_the_last_and_the_last_for_the_first() -> None:
    """Neither order of starting calls one after another could end."""
    events = [threading.Event() for _ in range(2)]

    def meet(mine: int) -> None:
        events[mine].set()
        assert events[1 - mine].wait(PATIENCE_S)

    inputs = ones(20)
    calls: list[Any] = [(x,) for x in inputs]
    calls[0] = (inputs[0], lambda: meet(0), None)
    calls[-1] = (inputs[-1], lambda: meet(1), None)
    backward_of_sum(map_with_parallel_backward(Calls, *calls))
    assert_doubled(inputs)


class Nests(Function):
    """Doubles its input; at depth 0 by meeting everyone else, above by a map over two calls one depth down."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, depth: int, leaf_func: Any, leaf_arg: Any, bound: int | None) -> Tensor:
        with torch.enable_grad():
            ctx.inner = x.detach().requires_grad_()
            if depth == 0:
                results = map_with_parallel_backward(leaf_func, (ctx.inner, leaf_arg), max_concurrency=bound)
            else:
                call = (ctx.inner, depth - 1, leaf_func, leaf_arg, bound)
                results = map_with_parallel_backward(Nests, call, call, max_concurrency=bound)
            ctx.result = torch.stack(results).mean(0)
        return ctx.result.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None, None]:
        return torch.autograd.grad(ctx.result, ctx.inner, grad)[0], None, None, None, None


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_the_innermost_calls_of_nested_maps_all_meet(depth: int) -> None:
    barrier = threading.Barrier(2 ** (depth + 1))
    inputs = ones(2)
    calls = [(x, depth, Meets, barrier, None) for x in inputs]
    backward_of_sum(map_with_parallel_backward(Nests, *calls))
    assert_doubled(inputs)


@pytest.mark.parametrize("bound", [1, 2, 3])
def test_maps_nested_four_deep_with_a_bound_come_to_an_end(bound: int) -> None:
    crowd = Crowd()
    inputs = ones(3)
    calls = [(x, 3, Counts, crowd, bound) for x in inputs]
    backward_of_sum(map_with_parallel_backward(Nests, *calls, max_concurrency=bound))
    assert_doubled(inputs)
    assert crowd.most <= bound**4
    assert crowd.inside == 0


def test_maps_nested_four_deep_run_one_call_at_a_time_when_each_is_bound_to_one() -> None:
    crowd = Crowd()
    x = torch.ones(2, requires_grad=True)
    backward_of_sum(map_with_parallel_backward(Nests, (x, 3, Counts, crowd, 1), max_concurrency=1))
    assert crowd.most == 1


@pytest.mark.parametrize("bound", [1, 2, 5, 100])
def test_a_bound_is_kept_in_forward_and_in_backward(bound: int) -> None:
    forward_and_backward = [Crowd(), Crowd()]
    inputs = ones(12)
    results = map_with_parallel_backward(
        Counts, *[(x, forward_and_backward[0]) for x in inputs], max_concurrency=bound
    )
    assert 1 <= forward_and_backward[0].most <= bound
    forward_and_backward[0].most = 0
    backward_of_sum(results)
    assert 1 <= forward_and_backward[0].most <= bound
    assert_doubled(inputs)


@pytest.mark.parametrize("bound", [2, 7])
def test_as_many_calls_as_the_bound_allows_can_wait_for_each_other(bound: int) -> None:
    barrier = threading.Barrier(bound)
    inputs = ones(bound * 3)
    calls = [(x, barrier) for x in inputs]
    backward_of_sum(map_with_parallel_backward(Meets, *calls, max_concurrency=bound))
    assert_doubled(inputs)


def test_maps_called_by_several_foreign_threads_meet_each_other() -> None:
    barrier = threading.Barrier(4 * 8)

    def run(_: int) -> list[Tensor]:
        inputs = ones(8)
        backward_of_sum(map_with_parallel_backward(Meets, *[(x, barrier) for x in inputs]))
        return inputs

    with ThreadPoolExecutor(4) as foreign:
        for inputs in foreign.map(run, range(4)):
            assert_doubled(inputs)


def test_maps_inside_every_worker_of_a_full_foreign_pool_come_to_an_end() -> None:
    def run(_: int) -> list[Tensor]:
        inputs = ones(4)
        calls = [(x, 1, Calls, None, 1) for x in inputs]
        backward_of_sum(map_with_parallel_backward(Nests, *calls, max_concurrency=2))
        return inputs

    with ThreadPoolExecutor(2) as foreign:
        for inputs in foreign.map(run, range(20)):
            assert_doubled(inputs)


@pytest.mark.parametrize("where", ["tensor hook", "node hook", "post-accumulate hook", "engine callback"])
@pytest.mark.parametrize("bound", [None, 1])
def test_a_map_in_a_backward_hook_comes_to_an_end(where: str, bound: int | None) -> None:
    inside = ones(3)

    def hook(*_: Any) -> None:
        if inside[0].grad is None:
            barrier = threading.Barrier(1 if bound else 3)
            calls = [(x, barrier) for x in inside]
            with torch.enable_grad():
                backward_of_sum(map_with_parallel_backward(Meets, *calls, max_concurrency=bound))

    inputs = ones(3)
    results = map_with_parallel_backward(Calls, *[(x,) for x in inputs], max_concurrency=bound)
    if where == "tensor hook":
        results[1].register_hook(hook)
    elif where == "node hook":
        assert results[1].grad_fn is not None
        results[1].grad_fn.register_hook(hook)
    elif where == "post-accumulate hook":
        inputs[1].register_post_accumulate_grad_hook(hook)
    else:
        queue = torch.autograd.Variable._execution_engine.queue_callback  # type: ignore[attr-defined]
        results[1].register_hook(lambda grad: queue(hook))
    backward_of_sum(results)
    assert_doubled(inputs)
    assert_doubled(inside)


def test_a_map_inside_a_calls_backward_meets_the_maps_in_the_other_backwards() -> None:
    barrier = threading.Barrier(3 * 4)

    def map_inside() -> None:
        with torch.enable_grad():
            inside = ones(4)
            backward_of_sum(map_with_parallel_backward(Meets, *[(x, barrier) for x in inside]))
            assert_doubled(inside)

    inputs = ones(3)
    backward_of_sum(map_with_parallel_backward(Calls, *[(x, None, map_inside) for x in inputs]))
    assert_doubled(inputs)


def test_one_backward_over_two_maps_in_a_row_waits_for_neither_in_vain() -> None:
    inputs = ones(8)
    barriers = [threading.Barrier(8) for _ in range(2)]
    middle = map_with_parallel_backward(Meets, *[(x, barriers[0]) for x in inputs])
    results = map_with_parallel_backward(Meets, *[(x, barriers[1]) for x in middle])
    backward_of_sum(results)
    assert all(x.grad is not None and x.grad.tolist() == [4.0, 4.0] for x in inputs)


@pytest.mark.stress
def test_a_thousand_small_maps_from_eight_threads_at_once_give_right_gradients() -> None:
    def run(_: int) -> list[Tensor]:
        inputs = ones(3)
        backward_of_sum(map_with_parallel_backward(Calls, *[(x,) for x in inputs]))
        return inputs

    with ThreadPoolExecutor(8) as foreign:
        for inputs in foreign.map(run, range(1000)):
            assert_doubled(inputs)


def test_waiting_calls_are_not_starved_by_another_threads_tiny_maps() -> None:
    stop = threading.Event()

    def map_tiny_calls() -> None:
        while not stop.is_set():
            map_with_parallel_backward(Calls, *[(torch.ones(2),)] * 2)

    others = [threading.Thread(target=map_tiny_calls) for _ in range(2)]
    for other in others:
        other.start()
    try:
        for _ in range(5):
            barrier = threading.Barrier(6)
            inputs = ones(6)
            backward_of_sum(map_with_parallel_backward(Meets, *[(x, barrier) for x in inputs]))
            assert_doubled(inputs)
    finally:
        stop.set()
        for other in others:
            other.join()


@pytest.mark.parametrize("num_calls", [2, 5])
def test_a_call_can_wait_by_spinning_for_the_last_one(num_calls: int) -> None:
    """It looks as if it computed, and it holds the interpreter lock most of the time."""
    last_has_run = threading.Event()

    def spin() -> None:
        for _ in range(1_000_000_000):
            if last_has_run.is_set():
                return
        raise TimeoutError

    inputs = ones(num_calls)
    calls = [(x, last_has_run.set if i == num_calls - 1 else spin) for i, x in enumerate(inputs)]
    map_with_parallel_backward(Calls, *calls)
    assert last_has_run.is_set()


class MeetsInside(nn.Module):
    """A module around `Meets`, with a parameter."""

    def __init__(self, barrier: threading.Barrier) -> None:
        super().__init__()
        self.barrier = barrier
        self.scale = nn.Parameter(torch.ones(2))

    def forward(self, x: Tensor) -> Any:
        return Meets.apply(x, self.barrier) * self.scale


@pytest.mark.parametrize("num_calls", [2, 8, 64])
@pytest.mark.parametrize("recompute", [False, True])
def test_all_modules_meet_in_forward_and_in_backward(num_calls: int, recompute: bool) -> None:
    """When they recompute, they meet once more, in the backward's forward."""
    barrier = threading.Barrier(num_calls)
    modules, inputs = [MeetsInside(barrier) for _ in range(num_calls)], ones(num_calls)
    backward_of_sum(parallel_apply(modules, [(x,) for x in inputs], recompute=recompute))
    assert_doubled(inputs)
    assert_doubled([module.scale for module in modules])


def test_modules_of_nested_maps_all_meet_in_forward_and_in_backward() -> None:
    barrier = threading.Barrier(3 * 4)
    modules, inputs = [MeetsInside(barrier) for _ in range(4)], ones(3)

    def inner(x: Tensor) -> Tensor:
        return torch.stack(parallel_apply(modules, [(x,)] * 4)).mean(0)

    backward_of_sum(parallel_apply([inner] * 3, [(x,) for x in inputs]))
    assert_doubled(inputs)


def test_gradients_of_gradients_are_computed_concurrently() -> None:
    barrier = threading.Barrier(5)

    class MeetsTwice(Function):
        """Its backward is a function that meets, too, in forward and in backward."""

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            barrier.wait(PATIENCE_S)
            ctx.save_for_backward(x)
            return x**3

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            (x,) = ctx.saved_tensors
            return grad * 3 * MeetsAgain.apply(x)

    class MeetsAgain(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            barrier.wait(PATIENCE_S)
            ctx.save_for_backward(x)
            return x**2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            barrier.wait(PATIENCE_S)
            return grad * 2 * x

    inputs = ones(5)
    outputs = parallel_apply([lambda x: MeetsTwice.apply(x)] * 5, [(x,) for x in inputs])
    grads = torch.autograd.grad(torch.stack(outputs).sum(), inputs, create_graph=True)
    backward_of_sum(grads)
    assert all(x.grad is not None and x.grad.tolist() == [6.0, 6.0] for x in inputs)
