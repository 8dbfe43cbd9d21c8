"""docs/limits.md on backwards, hooks and checkpoints: what it says is what happens."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import register_multi_grad_hook
from torch.utils.checkpoint import checkpoint

from moe_autograd import map_with_parallel_backward, parallel_apply
from tests.support.functions_waiting import PATIENCE_S
from tests.support.limits_page import Doubles, in_call, in_loop, leaf, of

pytestmark = pytest.mark.usefixtures("nothing_is_small")


class ReturnsNone(Doubles):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return None


@of("**Two backwards, each through some results of one map**")
def test_two_backwards() -> None:
    for make, retain_graph in ((leaf, False), (lambda: leaf() * 2, True), (lambda: leaf().exp(), False)):
        a, b = map_with_parallel_backward(Doubles, (make(),), (make(),))
        assert a.grad_fn is b.grad_fn
        a.sum().backward(retain_graph=retain_graph)
        if make is leaf or retain_graph:
            b.sum().backward()
            continue
        with pytest.raises(RuntimeError, match="a second time"):
            b.sum().backward()


class AppliesWaiting(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, barrier: threading.Barrier) -> Tensor:
        ctx.save_for_backward(x)
        ctx.barrier = barrier
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return Waits.apply(grad * ctx.saved_tensors[0], ctx.barrier), None


class Waits(Doubles):
    @staticmethod
    def forward(ctx: Any, x: Tensor, barrier: threading.Barrier) -> Tensor:
        ctx.barrier = barrier
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.barrier.wait()
        return 2 * grad, None


@of("run one after the other in the backward that comes next, and cannot wait for each other there")
def test_functions_that_a_backward_applies() -> None:
    xs = [leaf(), leaf()]

    def differentiate(timeout_s: float, call: Callable[[Any], Any]) -> None:
        barrier = threading.Barrier(2, timeout=timeout_s)
        results = call([(x, barrier) for x in xs])
        grads = torch.autograd.grad(sum(results).sum(), xs, create_graph=True)
        torch.autograd.grad(sum(grads).sum(), xs)

    with pytest.raises(threading.BrokenBarrierError):
        differentiate(0.1, lambda calls: map_with_parallel_backward(AppliesWaiting, *calls))
    differentiate(60, lambda calls: parallel_apply([AppliesWaiting.apply] * 2, calls))


class Clears(Doubles):
    clear_saved_tensors_on_access = True

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad * ctx.saved_tensors[0]  # type: ignore[no-any-return]


@of("which has the tensors again; PyTorch allows one access in all")
def test_saved_tensors_that_are_cleared() -> None:
    x = leaf()
    for y in (Clears.apply(x), *map_with_parallel_backward(Clears, (x,), (x,))):
        torch.autograd.grad(y.sum(), x, retain_graph=True)
        if isinstance(y.grad_fn, Clears._backward_cls):
            with pytest.raises(RuntimeError, match="only be accessed once"):
                torch.autograd.grad(y.sum(), x)
        else:
            assert torch.equal(torch.autograd.grad(y.sum(), x, retain_graph=True)[0], 2 * x)


@of("nor do hooks on its results, which PyTorch calls with `None`")
def test_gradients_that_are_none() -> None:
    for call, expected in ((parallel_apply, []), (in_loop, [None])):
        seen: list[Any] = []
        (result,) = call([torch.sin], [(leaf(),)])
        result.register_hook(seen.append)
        ReturnsNone.apply(result).sum().backward()
        assert seen == expected


@of("or on what it is a view of, put there after the map, or `retain_grad` at any time: **no error**")
def test_what_a_changed_view_is_a_view_of() -> None:
    for call, expected in ((parallel_apply, [0.0, 1.0]), (in_loop, [3.0, 1.0])):
        base = leaf() * 1
        base.retain_grad()
        (result,) = call([lambda t: t.mul_(2) * 3], [(base[:1],)])
        (result.sum() + base[1:].sum()).backward()
        assert base.grad is not None
        assert base.grad.tolist() == expected


@of("an autograd function of yours, a module's full backward hook, compiled code or an expert")
def test_results_of_each_other() -> None:
    a, b = in_call(lambda x: (y := x * 2, Doubles.apply(y)), leaf())
    with pytest.raises(RuntimeError, match="expected a result that is asked for by name to lead to others"):
        torch.autograd.grad(b.sum(), a, allow_unused=True)


@of("Nor where the call changes an")
def test_results_of_each_other_of_a_call_that_changes_an_input() -> None:
    ((a, b),) = parallel_apply([lambda x: (y := x.add_(1) * 2, y * 3)], [(leaf().clone(),)])
    assert torch.autograd.grad(b.sum(), a, allow_unused=True) == (None,)


@of("in one that is asked by name otherwise than by torch's functions in Python")
def test_results_of_each_other_that_the_engine_itself_is_asked_for() -> None:
    for call, expected in ((parallel_apply, 1.0), (in_loop, 4.0)):
        ((a, b), _) = call([lambda x: (y := x * 2, y * 3)] * 2, [(leaf(),), (leaf(),)])
        arguments = ((a + b).sum(),), (torch.tensor(1.0),), False, False, (a,)
        (grad,) = torch.autograd.Variable._execution_engine.run_backward(
            *arguments, allow_unreachable=True, accumulate_grad=False
        )
        assert grad.tolist() == [expected] * 2


@of("hooks of the call run twice there (**no error** if they do something else the second time)")
def test_between_results_of_each_other() -> None:
    for call, expected in ((parallel_apply, 2), (in_loop, 1)):
        seen: list[Tensor] = []

        def compute(x: Tensor, seen: list[Tensor] = seen) -> tuple[Tensor, Tensor]:
            y = x * 2
            z = y * 3
            z.register_hook(seen.append)
            return y, z * 4

        ((a, b),) = call([compute], [(x := leaf(),)])
        a.retain_grad()
        b.sum().backward()
        assert a.grad is not None
        assert x.grad is not None
        assert (a.grad.tolist(), x.grad.tolist()) == ([12.0, 12.0], [24.0, 24.0])
        assert len(seen) == expected


@of(
    "as does `torch.autograd.grad` for that result: **no error**, where a plain loop has what they made of it"
)
def test_hooks_of_the_call_on_its_result() -> None:
    for call, expected in ((parallel_apply, 1.0), (in_loop, 3.0)):

        def hooked(x: Tensor) -> Tensor:
            y = x * 2
            y.register_hook(lambda grad: grad * 3)
            return y

        seen: list[Tensor] = []
        y, _ = call([hooked, hooked], [(leaf(),), (leaf(),)])
        y.register_hook(seen.append)
        assert torch.autograd.grad(y.sum(), y)[0].tolist() == [expected] * 2
        assert seen[0].tolist() == [expected] * 2


def shared_trunk(call: Callable[..., Any]) -> tuple[Tensor, Tensor, Callable[[], Tensor]]:
    """Return a leaf, what was computed from it, and what makes a loss by a call that holds what its weight has made."""
    x, weight = leaf(), leaf()
    middle = x.sin()
    trunk = Doubles.apply(middle * weight)
    return (
        x,
        middle,
        lambda: call([lambda v: v * weight + trunk.sin(), torch.sin], [(leaf(),), (leaf(),)])[0].sum(),
    )


@of("and so do `torch.autograd.grad` and `backward(inputs=)` for what it was computed from, but for leaves")
def test_what_a_tensor_in_a_closure_was_computed_from() -> None:
    found = []
    for call in (parallel_apply, in_loop):
        x, middle, make = shared_trunk(call)
        loss = make() + middle.sum()
        found.append([torch.autograd.grad(loss, one, retain_graph=True)[0] for one in (x, middle)])
    (of_x, of_middle), expected = found
    torch.testing.assert_close(of_x, expected[0])
    assert of_middle.tolist() == [1.0, 1.0] != expected[1].tolist()


@of(
    "a backward through a map that was made on another thread than that tensor, may say that the graph is freed"
)
def test_a_map_on_another_thread_than_a_tensor_in_a_closure() -> None:
    for is_other in (False, True):
        _, middle, make = shared_trunk(parallel_apply)
        with ThreadPoolExecutor(1) as other:
            loss = other.submit(make).result() if is_other else make()
        with pytest.raises(RuntimeError, match="a second time") if is_other else nullcontext():
            (loss + middle.sin().sum()).backward()


@of("**A backward that a call starts itself** ends at the call's inputs")
def test_backwards_within() -> None:
    weight = leaf()
    assert in_call(lambda x: torch.autograd.grad(x.sum(), weight, allow_unused=True)[0], weight * 2) is None


@of("inputs together with what was computed from them raise")
def test_hooks_on_several() -> None:
    def hooks(x: Tensor) -> Tensor:
        y = x * 2
        register_multi_grad_hook((x, y), lambda grads: None, mode="all")
        return y

    with pytest.raises(RuntimeError, match="Register one hook on the inputs and another on the rest"):
        in_call(hooks, leaf())


@of("**`torch.utils.checkpoint(use_reentrant=True)` inside a call of `parallel_apply`** raises")
def test_reentrant_checkpoints() -> None:
    output = in_call(lambda x: checkpoint(torch.sin, x, use_reentrant=True), leaf())
    with pytest.raises(RuntimeError, match="you can either set use_reentrant=False"):
        output.sum().backward()


@of("its second run makes these as well, and what they add to running statistics comes twice")
@pytest.mark.parametrize(("call", "expected"), [(parallel_apply, [2, 2, 2]), (in_loop, [2, 1, 1])])
def test_checkpoints_around_calls_that_save_nothing(call: Callable[..., Any], expected: list[int]) -> None:
    norms = [nn.BatchNorm1d(2), *[nn.BatchNorm1d(2).requires_grad_(False) for _ in range(2)]]

    def make_all(x: Tensor) -> Tensor:
        return torch.stack(call(norms, [(x,)] * 3))

    checkpoint(make_all, torch.ones(3, 2), use_reentrant=False).sum().backward()
    assert [int(norm.num_batches_tracked) for norm in norms] == expected


@of("hooks run in the order in which results got their first one, in a loop those of the last result first")
@pytest.mark.parametrize(("call", "expected"), [(parallel_apply, [0, 1, 2]), (in_loop, [2, 1, 0])])
def test_the_order_of_hooks_on_several_results(call: Callable[..., Any], expected: list[int]) -> None:
    seen: list[int] = []
    results = call([torch.sin] * 3, [(leaf(),)] * 3)
    for i, result in enumerate(results):
        result.register_hook(lambda _, i=i: seen.append(i))
    sum(result.sum() for result in results).backward()
    assert seen == expected


@of(
    "take turns, as PyTorch adds to it without a lock, and cannot wait for each other. → Pass it as an argument."
)
def test_backwards_that_end_at_a_retained_gradient() -> None:
    tensor = leaf() * 2
    tensor.retain_grad()
    meet, nobody_comes = threading.Barrier(2, timeout=PATIENCE_S), threading.Barrier(2, timeout=0.1)
    total = sum(parallel_apply([lambda x: Waits.apply(x, meet)] * 2, [(tensor,)] * 2))
    total.sum().backward(retain_graph=True)
    assert tensor.grad is not None
    assert tensor.grad.tolist() == [4, 4]
    total = sum(parallel_apply([lambda x: Waits.apply(tensor, nobody_comes) * x] * 2, [(leaf(),)] * 2))
    with pytest.raises(threading.BrokenBarrierError):
        total.sum().backward()
