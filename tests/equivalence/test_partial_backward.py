"""A backward for some of the inputs runs the calls that it needs, and no others, as nodes of their own would run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import register_multi_grad_hook

from moe_autograd import map_with_parallel_backward, parallel_apply
from moe_autograd.autograd.split_backward import split_backward
from tests.support.comparison import MapFunction, assert_same, natively, one_after_another
from tests.support.histories import copied

NUM_CALLS = 7


class Scales(Function):
    """Notes whose backward runs; those of `fails` raise."""

    ran: ClassVar[list[int]] = []
    fails: ClassVar[set[int]] = set()

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, index: int) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.index = index
        return x * w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        Scales.ran.append(ctx.index)
        if ctx.index in Scales.fails:
            raise ValueError("nobody asked for it")
        x, w = ctx.saved_tensors
        return grad * w, grad * x, None


def called(apply: MapFunction, *, are_leaves: bool) -> tuple[list[Tensor], list[Tensor], Tensor]:
    Scales.ran.clear()
    xs = [torch.full((2,), float(i), requires_grad=True) for i in range(NUM_CALLS)]
    ws = [torch.full((2,), 2.0 + i, requires_grad=True) for i in range(NUM_CALLS)]
    if not are_leaves:
        xs, ws = [x * 1 for x in xs], [w * 1 for w in ws]
    outputs = apply(Scales, *((x, w, i) for i, (x, w) in enumerate(zip(xs, ws, strict=True))))
    return xs, ws, torch.stack(outputs).square().sum()


@pytest.mark.parametrize("are_leaves", [True, False], ids=["leaves", "with history"])
@pytest.mark.parametrize("asked", [(0,), (2, 1), (0, 1, 2, 3)], ids=str)
def test_grad_runs_the_calls_it_needs_and_a_failure_elsewhere_is_nobodys(
    monkeypatch: pytest.MonkeyPatch, are_leaves: bool, asked: tuple[int, ...]
) -> None:
    monkeypatch.setattr(Scales, "fails", set(range(NUM_CALLS)) - set(asked))
    found = {}
    for apply in (natively, map_with_parallel_backward):
        xs, ws, loss = called(apply, are_leaves=are_leaves)
        wanted = [xs[i] if i % 2 else ws[i] for i in asked]
        found[apply] = torch.autograd.grad(loss, wanted), sorted(Scales.ran)
    (native, native_ran), (mapped, mapped_ran) = found.values()
    assert mapped_ran == native_ran == sorted(asked)
    assert all(torch.equal(a, b) for a, b in zip(native, mapped, strict=True))


@pytest.mark.parametrize("asked", [(3,), tuple(range(NUM_CALLS))], ids=["one", "all"])
def test_backward_with_inputs_runs_the_calls_it_needs(asked: tuple[int, ...]) -> None:
    found = []
    for apply in (natively, map_with_parallel_backward):
        xs, ws, loss = called(apply, are_leaves=True)
        loss.backward(inputs=[xs[i] for i in asked])
        assert sorted(Scales.ran) == sorted(asked)
        assert all(w.grad is None for w in ws)
        found.append([x.grad for x in xs])
    for native, mapped in zip(*found, strict=True):
        assert (native is None and mapped is None) or torch.equal(native, mapped)


def test_many_leaves_get_their_gradients_at_once() -> None:
    xs, ws, loss = called(map_with_parallel_backward, are_leaves=True)
    grads = torch.autograd.grad(loss, [*xs, *ws])
    assert sorted(Scales.ran) == list(range(NUM_CALLS))
    expected = [2 * x * w * w for x, w in zip(xs, ws, strict=True)]
    expected += [2 * x * w * x for x, w in zip(xs, ws, strict=True)]
    assert all(torch.equal(grad, good) for grad, good in zip(grads, expected, strict=True))


def test_the_first_part_of_a_split_backward_runs_all_that_the_second_part_needs() -> None:
    xs, ws, loss = called(map_with_parallel_backward, are_leaves=True)
    (grad,), pending = split_backward([loss], [torch.tensor(1.0)], xs[1:2], ws)
    assert torch.equal(grad, 2 * xs[1] * ws[1] * ws[1])
    weights = pending.run()
    assert all(torch.equal(g, 2 * x * w * x) for g, x, w in zip(weights, xs, ws, strict=True))


def test_a_second_derivative_of_some_inputs_is_the_native_one() -> None:
    found = []
    for apply in (natively, map_with_parallel_backward):
        xs, ws, loss = called(apply, are_leaves=True)
        (first,) = torch.autograd.grad(loss, ws[2:3], create_graph=True)
        found.append(torch.autograd.grad(first.sum(), [xs[2], ws[2]]))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def of_functions(apply: MapFunction, xs: list[Tensor]) -> Any:
    return apply(Scales, *[(x, x.detach(), i) for i, x in enumerate(xs)])


def of_modules(apply: MapFunction, xs: list[Tensor]) -> Any:
    return apply([lambda x: x.sin() * 2] * len(xs), [(x,) for x in xs])


@pytest.mark.parametrize(
    ("native", "mapped", "call_all"),
    [(natively, map_with_parallel_backward, of_functions), (one_after_another, parallel_apply, of_modules)],
)
@pytest.mark.parametrize("is_apart", [False, True])
def test_hooks_on_results_run_where_a_gradient_flows(
    native: MapFunction,
    mapped: MapFunction,
    call_all: Callable[[MapFunction, list[Tensor]], Any],
    is_apart: bool,
) -> None:
    def program(apply: MapFunction) -> Any:
        xs = [torch.full((2,), float(i), requires_grad=True) for i in range(4)]
        results = call_all(apply, [copied(x) for x in xs] if is_apart else xs)
        seen: list[Any] = []

        def note(grad: Tensor) -> Tensor:
            seen.append(grad.clone())
            return 3 * grad

        handles = [y.register_hook(note) for y in results]
        handles[1].remove()
        register_multi_grad_hook(results, lambda grads: seen.append(list(grads)))
        register_multi_grad_hook(results, lambda grad: seen.append(grad is None), mode="any")
        (results[0].sum() + results[1].sum()).backward()
        return [x.grad for x in xs], sorted(map(str, seen))

    assert_same(program(native), program(mapped))


def test_a_call_that_saved_nothing_goes_backward_again_where_one_that_saved_cannot() -> None:
    class Saves(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, saves: bool) -> Tensor:
            if saves:
                ctx.save_for_backward(x)
            ctx.saves = saves
            return 2 * x

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
            return (grad * 2 * ctx.saved_tensors[0] if ctx.saves else grad * 2), None

    def run(apply: MapFunction) -> Any:
        xs = [torch.ones(2, requires_grad=True) for _ in range(3)]
        outputs = apply(Saves, *[(x, i == 1) for i, x in enumerate(xs)])
        torch.stack(list(outputs)).sum().backward()
        for again in (outputs[0], outputs[2]):
            again.sum().backward()
        with pytest.raises(RuntimeError, match="Trying to backward through the graph a second time"):
            outputs[1].sum().backward()
        return [x.grad for x in xs]

    assert_same(run(natively), run(map_with_parallel_backward))
