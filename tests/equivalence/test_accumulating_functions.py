"""Weights that functions take as arguments, in several micro-batches: each call adds its gradients when it is done."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import get_gradient_edge

from moe_autograd import map_with_parallel_backward
from moe_autograd.autograd.joining import accumulating
from tests.support.accumulating import WAYS_TO_ASK, ask_for_some
from tests.support.comparison import MapFunction, assert_same, assert_same_program, loss_of, natively
from tests.support.functions import CATALOGUE, Case, Leaves
from tests.support.module_programs import leaves
from tests.support.servers import wait_until
from tests.support.subprocesses import assert_prints


@pytest.fixture(autouse=True)
def no_leaf_is_too_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accumulating, "LEAST_ADDED", 1)


@pytest.mark.parametrize("case", CATALOGUE, ids=str)
def test_a_function_says_the_same_where_there_are_gradients_before(case: Case) -> None:
    def program(apply: MapFunction) -> Any:
        make, found = Leaves(), []
        args_per_call = [case.args(make) for _ in range(3)]
        for leaf in make.made:
            leaf.grad = torch.full_like(leaf, 0.25) if leaf.requires_grad else None
        loss = loss_of(apply(case.func, *args_per_call))
        for _ in range(2):
            if loss.requires_grad:
                loss.backward(retain_graph=True)
            found.append([None if leaf.grad is None else leaf.grad.clone() for leaf in make.made])
        return found

    assert_same_program(program)


class Times(Function):
    """`x @ weight`; it calls `look`, if there is one, before it computes gradients, and remembers the weight's."""

    seen: list[weakref.ref[Tensor]]

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, look: Callable[[], None] | None = None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.look = look
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight = ctx.saved_tensors
        if ctx.look is not None:
            ctx.look()
        of_weight = x.t() @ grad
        Times.seen.append(weakref.ref(of_weight))
        return grad @ weight.t(), of_weight, None


@pytest.fixture(autouse=True)
def nothing_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Times, "seen", [], raising=False)


def weights(count: int = 4) -> list[Tensor]:
    made = leaves(count, 4, 4)
    for weight in made:
        weight.grad = torch.full_like(weight, 0.5)
    return made


def test_a_weight_has_its_gradient_when_its_call_is_done_and_the_new_one_is_gone() -> None:
    own = weights()
    num_alive: list[int] = []
    num_done: list[int] = []

    def look() -> None:
        num_alive.append(sum(grad() is not None for grad in Times.seen))
        num_done.append(sum(bool((w.grad != 0.5).any()) for w in own if w.grad is not None))

    args = [(x, weight, look) for x, weight in zip(leaves(), own, strict=True)]
    loss = loss_of(map_with_parallel_backward(Times, *args, max_concurrency=1))
    loss.backward(retain_graph=True)
    assert num_done == [0, 1, 2, 3]
    loss.backward()  # by the same nodes
    assert num_alive == [0, 0, 0, 0] * 2


@pytest.mark.parametrize("max_concurrency", [1, 2, None])
def test_micro_batches_add_up_to_the_same_bits(max_concurrency: int | None) -> None:
    def program(apply: MapFunction) -> Any:
        own = weights()
        before = [w.grad for w in own]
        for factor in (1.0, 2.0, 3.0):
            args = [(factor * x, weight) for x, weight in zip(leaves(), own, strict=True)]
            loss_of(apply(Times, *args, max_concurrency=max_concurrency)).backward()
        return [w.grad for w in own], [w.grad is grad for w, grad in zip(own, before, strict=True)]

    assert_same_program(program)


def shared_by_two_calls(apply: MapFunction, own: list[Tensor], xs: list[Tensor]) -> Any:
    return apply(Times, *[(x, own[i // 2]) for i, x in enumerate(xs)])


def shared_with_others(apply: MapFunction, own: list[Tensor], xs: list[Tensor]) -> Any:
    return [*apply(Times, *zip(xs, own, strict=True)), own[0].sin(), own[2] @ own[3]]


def taken_twice(apply: MapFunction, own: list[Tensor], xs: list[Tensor]) -> Any:
    return apply(Times, *[(weight, weight) for weight in own])


def of_different_pasts(apply: MapFunction, own: list[Tensor], xs: list[Tensor]) -> Any:
    """Their calls are tied apart."""
    past = [Times.apply(x, torch.eye(4, dtype=x.dtype)) for x in xs]  # type: ignore[no-untyped-call]
    return apply(Times, *[(x, own[i // 2]) for i, x in enumerate(past)])


@pytest.mark.parametrize(
    ("calls", "tolerance"),
    [
        (shared_by_two_calls, 0.0),
        (shared_with_others, 1e-12),  # nobody knows of the others when the call adds its gradient
        (taken_twice, 0.0),
        (of_different_pasts, 0.0),
    ],
)
def test_a_weight_of_several_gets_the_sum_of_a_loop_in_the_same_bits_each_time(
    calls: Callable[[MapFunction, list[Tensor], list[Tensor]], Any], tolerance: float
) -> None:
    def run(apply: MapFunction) -> Any:
        own, xs = weights(), leaves()
        for _ in range(2):
            loss_of(calls(apply, own, xs)).backward()
        return [w.grad for w in own], [x.grad for x in xs]

    first = run(map_with_parallel_backward)
    assert_same(run(natively), first, tolerance=tolerance)
    for _ in range(5):
        assert_same(first, run(map_with_parallel_backward), tolerance=0.0)


def hook(own: list[Tensor], seen: list[Any]) -> Any:
    own[0].register_hook(lambda grad: 2 * grad)
    own[1].register_hook(lambda grad: seen.append(grad.clone()))


def hook_afterwards(own: list[Tensor], seen: list[Any]) -> Any:
    def step(weight: Tensor) -> None:
        assert weight.grad is not None
        seen.append(weight.grad.clone())
        weight.grad = None

    own[0].register_post_accumulate_grad_hook(step)


def hook_of_several(own: list[Tensor], seen: list[Any]) -> Any:
    torch.autograd.graph.register_multi_grad_hook(
        own, lambda grads: seen.append([None if grad is None else grad.clone() for grad in grads])
    )


def hook_before_the_node(own: list[Tensor], seen: list[Any]) -> Any:
    nodes = [get_gradient_edge(weight).node for weight in own]
    nodes[0].register_prehook(lambda grads: tuple(grad / 2 for grad in grads))  # type: ignore[misc]
    return nodes


def hook_after_the_node(own: list[Tensor], seen: list[Any]) -> Any:
    nodes = [get_gradient_edge(weight).node for weight in own]
    nodes[1].register_hook(lambda _, grads: seen.append([grad.clone() for grad in grads]))
    return nodes


@pytest.mark.parametrize(
    "prepare", [hook, hook_afterwards, hook_of_several, hook_before_the_node, hook_after_the_node]
)
def test_hooks_get_whole_gradients_once(prepare: Callable[[list[Tensor], list[Any]], Any]) -> None:
    def program(apply: MapFunction) -> Any:
        own, seen = weights(), list[Any]()
        kept = prepare(own, seen)
        for _ in range(2):
            loss_of(apply(Times, *zip(leaves(), own, strict=True))).backward()
        del kept
        return seen, [w.grad for w in own]

    assert_same_program(program)


def test_a_hook_that_comes_while_its_call_goes_backward_gets_the_gradient() -> None:
    def program(apply: MapFunction) -> Any:
        own = weights()
        args = [
            (x, weight, lambda weight=weight: weight.register_hook(lambda grad: 2 * grad))
            for x, weight in zip(leaves(), own, strict=True)
        ]
        loss_of(apply(Times, *args)).backward()
        return [w.grad for w in own]

    assert_same_program(program)


def test_ctrl_c_waits_for_whoever_is_in_the_midst_of_adding(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accumulating, "_REST_S", 3600.0)
    at_once, is_adding, added = accumulating.AtOnce(), threading.Event(), list[Tensor]()

    def node(grad: Tensor) -> None:
        is_adding.set()
        wait_until(lambda: at_once._is_over)
        added.append(grad)

    thread = threading.Thread(target=at_once.add, args=(node, torch.ones(2)))
    thread.start()
    assert is_adding.wait(60)
    at_once.end()
    assert len(added) == 1
    thread.join(60)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
@pytest.mark.parametrize("way", WAYS_TO_ASK)
def test_only_who_is_asked_for_a_gradient_gets_one(way: str) -> None:
    def program(apply: MapFunction) -> Any:
        own, xs = weights(), leaves()
        loss = loss_of(apply(Times, *zip(xs, own, strict=True)))
        return ask_for_some(way, loss, own, xs)

    assert_same_program(program, tolerance=1e-12)


class Odd(Function):
    """Returns a gradient that the engine has to make fit, or refuse."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, kind: str) -> Tensor:
        ctx.kind = kind
        return weight.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None]:
        if ctx.kind == "wide":
            return grad.expand(5, *grad.shape), None
        if ctx.kind == "single":
            return grad.float(), None
        if ctx.kind == "nan":
            return grad * torch.nan, None
        return (None, None) if ctx.kind == "none" else (grad[:1], None)


@pytest.mark.filterwarnings("ignore:Error detected in")
@pytest.mark.parametrize("detects_anomalies", [False, True])
@pytest.mark.parametrize("kind", ["wide", "single", "none", "wrong", "nan"])
def test_gradients_that_do_not_fit_are_made_to_or_refused(kind: str, detects_anomalies: bool) -> None:
    def program(apply: MapFunction) -> Any:
        own = weights(2)
        with torch.autograd.set_detect_anomaly(detects_anomalies):
            loss_of(apply(Odd, *[(weight, kind) for weight in own])).backward()
        return [w.grad for w in own]

    assert_same_program(program)


def test_after_ctrl_c_a_call_that_is_left_to_end_by_itself_adds_nothing() -> None:
    assert_prints(
        """
    import torch
    from moe_autograd import map_with_parallel_backward
    from tests.equivalence.test_accumulating_functions import Times, weights
    from tests.support.accumulating import InterruptedBackward

    Times.seen, interrupted, own = [], InterruptedBackward(), weights(2)
    args = [(torch.ones(2, 4).double(), weight, interrupted.look) for weight in own]
    print(interrupted.run(map_with_parallel_backward(Times, *args)))
    print(all(bool((weight.grad == 0.5).all()) for weight in own))
    """,
        "True True",
    )
