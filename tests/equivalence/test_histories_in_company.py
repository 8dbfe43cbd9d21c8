"""Calls with histories of their own among other things that count, wait or watch: checkpoints, hooks, threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.utils.checkpoint import checkpoint

from moe_autograd import map_with_parallel_backward, parallel_apply
from tests.support.comparison import MapFunction, Raised, assert_same, assert_same_program
from tests.support.functions_context import SavesInput
from tests.support.functions_waiting import Meets
from tests.support.histories import copied, leaf

NUM_CALLS = 4

HISTORIES: dict[str, Callable[[Tensor], Tensor]] = {
    "leaves": lambda x: x,
    "torch's nodes": lambda x: x * 2,
    "functions": copied,
}
every_history = pytest.mark.parametrize("computed", HISTORIES.values(), ids=HISTORIES)


@pytest.mark.parametrize("hook_comes", ["before", "after"])
def test_a_checkpoint_finds_what_was_saved_though_hooks_come_and_go(hook_comes: str) -> None:
    """With a hook the calls are tied apart, and without it together: in the forward or when it is run again."""

    def program(apply: MapFunction) -> Any:
        a, b = leaf(1), leaf(2)
        x, y = a * 2, b * 3
        hook = x.register_hook(lambda grad: grad * 2) if hook_comes == "before" else None
        results = checkpoint(
            lambda x, y: apply(SavesInput, (x,), (y,), (x,), (y,)), x, y, use_reentrant=False
        )
        if hook is None:
            x.register_hook(lambda grad: grad * 2)
        else:
            hook.remove()
        sum((10**i * result).sum() for i, result in enumerate(results)).backward()
        return a.grad, b.grad

    assert not isinstance(assert_same_program(program), Raised)


def test_a_hook_on_what_one_call_takes_does_not_run_for_another_call_alone() -> None:
    def program(apply: MapFunction) -> Any:
        seen: list[tuple[int, Tensor]] = []
        xs = [leaf(i + 1) * 2 for i in range(2)]
        for i, x in enumerate(xs):
            x.register_hook(lambda grad, i=i: seen.append((i, grad)))  # type: ignore[misc]
        apply(SavesInput, *[(x,) for x in xs])[0].sum().backward()
        return seen

    assert not isinstance(assert_same_program(program), Raised)


@every_history
def test_saved_tensor_hooks_see_what_is_saved_in_the_order_of_the_calls(computed: Any) -> None:
    def program(apply: MapFunction) -> Any:
        a, b = leaf(1), leaf(2)
        x, y = computed(a), computed(b)
        seen: list[Tensor] = []
        with saved_tensors_hooks(lambda t: (seen.append(t.detach()), t)[1], lambda t: t):
            results = apply(SavesInput, (x,), (y,), (x,), (y,))
        sum(result.sum() for result in results).backward()
        return seen, a.grad, b.grad

    assert not isinstance(assert_same_program(program), Raised)


@every_history
def test_a_saved_tensor_hook_that_raises_raises(computed: Any) -> None:
    def program(apply: MapFunction) -> Any:
        num_packed = 0

        def pack(tensor: Tensor) -> Tensor:
            nonlocal num_packed
            num_packed += 1
            if num_packed == 3:
                raise RuntimeError("no room")
            return tensor

        inputs = [computed(leaf(i)) for i in range(NUM_CALLS)]
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            apply(SavesInput, *[(x,) for x in inputs])

    assert isinstance(assert_same_program(program), Raised)


@every_history
def test_hooks_after_an_accumulation_run_where_there_was_one(computed: Any) -> None:
    """Also where a gradient of an earlier backward is there, and where such a hook takes it away."""

    def program(apply: MapFunction) -> Any:
        xs = [leaf(i + 1) for i in range(NUM_CALLS)]
        seen: list[list[Any]] = [[] for _ in xs]

        def look(x: Tensor, i: int) -> None:
            seen[i].append(None if x.grad is None else x.grad.clone())

        for i, x in enumerate(xs):
            x.register_post_accumulate_grad_hook(lambda x, i=i: look(x, i))
            if i % 2:
                x.register_post_accumulate_grad_hook(lambda x: setattr(x, "grad", None))
            x.register_post_accumulate_grad_hook(lambda x, i=i: look(x, i))
        for i, x in enumerate(xs):
            results = apply(SavesInput, *[(computed(x),) for x in xs])
            results[i].sum().backward(retain_graph=True)
            (results[1] + results[2]).sum().backward()
            x.sin().sum().backward()
        return seen, [x.grad for x in xs]

    assert not isinstance(assert_same_program(program), Raised)


def test_a_derivative_that_does_not_exist_is_missed_only_where_it_is_needed() -> None:
    def program(apply: MapFunction) -> Any:
        x, y = leaf(1), leaf(2)
        refusing = torch._C._functions.DelayedError("no derivative", 1)(x * 1)  # type: ignore[attr-defined]
        results = apply(SavesInput, (refusing,), (y * 2,))
        results[1].sum().backward()
        return x.grad, y.grad

    assert not isinstance(assert_same_program(program), Raised)


@every_history
def test_two_threads_may_use_one_graph_at_once(computed: Any) -> None:
    """The first backward of the call stays in the middle until the second one is over."""

    class Stays(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, steps: Any) -> Tensor:
            ctx.save_for_backward(x)
            ctx.steps = steps
            return x**3

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
            is_in_middle, may_go_on = ctx.steps
            if not is_in_middle.is_set():
                is_in_middle.set()
                may_go_on.wait(10)
            (x,) = ctx.saved_tensors
            return 3 * grad * x * x, None

    def program(apply: MapFunction) -> Any:
        xs = [leaf(1), leaf(2)]
        steps = threading.Event(), threading.Event()
        loss = sum(result.sum() for result in apply(Stays, *[(computed(x), steps) for x in xs]))
        found: list[Any] = []
        first = threading.Thread(
            target=lambda: found.extend(torch.autograd.grad(loss, xs, retain_graph=True))
        )
        first.start()
        steps[0].wait(10)
        second = torch.autograd.grad(loss, xs, retain_graph=True)
        steps[1].set()
        first.join()
        return found, second

    assert not isinstance(assert_same_program(program), Raised)


@pytest.mark.parametrize("num_maps", [1, 3])
def test_all_backwards_meet_though_another_thread_has_made_what_depends_on_them(num_maps: int) -> None:
    """Each thread numbers its nodes by itself, and the engine goes by numbers: a new thread's come last."""
    xs = [leaf() for _ in range(NUM_CALLS)]
    losses: list[Tensor] = []

    def forward() -> None:
        values = [copied(x) for x in xs]
        for _ in range(1000):
            copied(xs[0])
        for _ in range(num_maps):
            barrier = threading.Barrier(NUM_CALLS)
            values = [copied(y) for y in map_with_parallel_backward(Meets, *[(y, barrier) for y in values])]
        losses.extend(values)

    def backward() -> None:
        copied(xs[0])
        torch.stack([(value * 2).sin() for value in losses]).sum().backward()

    for step in (forward, backward):
        thread = threading.Thread(target=step)
        thread.start()
        thread.join()
    assert all(x.grad is not None for x in xs)


@pytest.mark.parametrize("are_apart", [False, True])
def test_a_backward_of_the_inputs_and_then_of_the_weights_as_in_zero_bubble_pipelines(
    are_apart: bool,
) -> None:
    """The second begins at an inner node. One that nothing has arrived at raises, and gives no weight None."""
    experts = [torch.nn.Linear(4, 4) for _ in range(2)]
    weights = [expert.weight for expert in experts]
    x = torch.randn(3, 4, requires_grad=True)
    y = x * 1
    inputs = [copied(y), copied(x)] if are_apart else [y, y]

    def loss_of(results: list[Tensor]) -> Tensor:
        return results[0].square().sum() + (3 * results[1]).cos().sum()

    natively = loss_of([expert(one) for expert, one in zip(experts, inputs, strict=True)])
    expected = torch.autograd.grad(natively, (x, *weights), retain_graph=True)
    loss = loss_of(parallel_apply(experts, [(one,) for one in inputs]))
    input_grads, groups = stage_backward_input([loss], None, [x], iter(weights))
    assert_same(input_grads, expected[:1])
    if are_apart:
        with pytest.raises(
            RuntimeError, match="parallel_apply: expected a backward that comes by way of the results"
        ):
            stage_backward_weight(iter(weights), groups)
    else:
        stage_backward_weight(iter(weights), groups)
        assert_same([weight.grad for weight in weights], list(expected[1:]))
