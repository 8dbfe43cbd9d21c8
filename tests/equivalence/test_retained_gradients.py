"""PyTorch adds to what `retain_grad` keeps without a lock: backwards of calls that would do so at once take turns."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function

from moe_autograd import parallel_apply
from tests.support.comparison import assert_same, one_after_another
from tests.support.functions_waiting import Meets

Apply = Callable[..., Any]
NUM_CALLS = 3


class Crowd:
    """Counts how many backwards are under way at most."""

    def __init__(self, wait_s: float = 0.02) -> None:
        self._lock, self._nobody_comes, self._wait_s = threading.Lock(), threading.Event(), wait_s
        self._num_there = self.most = 0

    def __enter__(self) -> None:
        with self._lock:
            self._num_there += 1
            self.most = max(self.most, self._num_there)
        self._nobody_comes.wait(self._wait_s)

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._num_there -= 1


class Counted(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, crowd: Crowd) -> Tensor:
        ctx.crowd = crowd
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        with ctx.crowd:
            return grad, None


def counted(x: Tensor, crowd: Crowd) -> Tensor:
    return Counted.apply(x, crowd)  # type: ignore[no-any-return, no-untyped-call]


def retaining(tensor: Tensor) -> Tensor:
    tensor.retain_grad()
    return tensor


def leaf() -> Tensor:
    return torch.randn(3, 3, dtype=torch.float64, requires_grad=True)


def held(apply: Apply, crowd: Crowd) -> list[Tensor]:
    m = retaining(leaf() * 2)
    sum(apply([lambda x: counted(m, crowd) * x] * NUM_CALLS, [(leaf(),)] * NUM_CALLS)).sum().backward()
    return [m]


def retained_by_calls(apply: Apply, crowd: Crowd) -> list[Tensor]:
    m = leaf() * 2
    sum(
        apply([lambda x: counted(retaining(x), crowd).sin()] * NUM_CALLS, [(m,)] * NUM_CALLS)
    ).sum().backward()
    return [m]


def held_by_calls_within(apply: Apply, crowd: Crowd) -> list[Tensor]:
    m = leaf() * 2

    def outer(x: Tensor) -> Tensor:
        retaining(x)
        ones = torch.ones(3, 3, dtype=torch.float64)
        return sum(apply([lambda z: counted(x, crowd) * z] * NUM_CALLS, [(ones,)] * NUM_CALLS))  # type: ignore[no-any-return]

    sum(apply([outer] * 2, [(m,)] * 2)).sum().backward()
    return [m]


@pytest.mark.parametrize("program", [held, retained_by_calls, held_by_calls_within])
def test_backwards_that_add_to_one_tensor_take_turns(program: Callable[[Apply, Crowd], list[Tensor]]) -> None:
    grads = []
    for apply in (one_after_another, parallel_apply):
        torch.manual_seed(0)
        crowd = Crowd()
        grads.append([tensor.grad for tensor in program(apply, crowd)])
        assert crowd.most == 1
    assert_same(*grads, tolerance=1e-12)


def test_so_do_those_that_walk_what_lies_above_a_held_tensor() -> None:
    w, crowd = leaf(), Crowd()
    m = retaining((w * 2).tanh())
    y = m.sin()
    calls = [lambda x: counted(x @ w, crowd).tanh() @ y] * NUM_CALLS
    sum(parallel_apply(calls, [(leaf(),)] * NUM_CALLS)).sum().backward()
    assert crowd.most == 1


def test_what_calls_take_as_an_argument_may_retain_its_gradient() -> None:
    m, barrier = retaining(leaf() * 2), threading.Barrier(NUM_CALLS)
    sum(parallel_apply([lambda x: Meets.apply(x, barrier)] * NUM_CALLS, [(m,)] * NUM_CALLS)).sum().backward()
    assert m.grad is not None
    assert m.grad.eq(2 * NUM_CALLS).all()


def test_a_hook_of_a_call_on_its_input_runs_once_where_calls_within_hold_that() -> None:
    def program(apply: Apply) -> Any:
        torch.manual_seed(0)
        seen: list[Tensor] = []

        def outer(x: Tensor) -> Tensor:
            x.register_hook(lambda grad: (seen.append(grad), grad * 2)[1])
            ones = torch.ones(3, 3, dtype=torch.float64)
            y = sum(apply([lambda z: x.tanh() * x * z] * NUM_CALLS, [(ones,)] * NUM_CALLS))
            (grad,) = torch.autograd.grad(y.sum(), x, retain_graph=True)
            return y + grad.detach()

        x = leaf()
        (result,) = apply([outer], [(x * 2,)])
        result.sum().backward()
        return result, x.grad, seen

    assert_same(program(one_after_another), program(parallel_apply), tolerance=1e-12)


@pytest.fixture
def threads_switch_often() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.stress
@pytest.mark.usefixtures("threads_switch_often")
def test_turns_are_those_of_one_backward() -> None:
    """Calls of the second map walk the first one's join at once: the other's turns are none of theirs."""
    weights, others, crowd = [leaf() for _ in range(4)], [leaf() for _ in range(3)], Crowd(0.002)

    def program(apply: Apply, seed: int) -> Any:
        torch.manual_seed(seed)
        x = leaf()
        z = retaining(x.tanh())
        y = sum(apply([lambda v, w=w: counted((v @ w * z).tanh(), crowd) for w in weights], [(x,)] * 4))
        calls = [lambda v, o=o: (o @ y).tanh() + sum((v @ w).tanh() for w in weights) for o in others]
        sum(apply(calls, [(leaf(),)] * 3)).sum().backward()
        return x.grad

    for seed in range(15):
        assert_same(program(one_after_another, seed), program(parallel_apply, seed), tolerance=1e-9)
