"""The lowest failing call's exception comes out as it was raised, after all calls have come to rest.

It keeps its type, identity, cause and traceback and gains a note that names the call and counts the other
failures; afterwards no tensor is held and the next map works.
"""

from __future__ import annotations

import asyncio
import gc
import queue
import signal
import threading
import traceback
import weakref
from collections.abc import Callable
from concurrent import futures
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function

from moe_autograd import map_with_parallel_backward, parallel_apply
from moe_autograd.autograd.joining.boxed import UnlessCompiled
from tests.support.functions_context import SavesInput
from tests.support.functions_waiting import PATIENCE_S, Calls, Crowd

PASSES = ["forward", "backward"]


class Odd(BaseException):
    """Neither an `Exception` nor anything that Python knows."""


class NeedsTwoArguments(Exception):
    def __init__(self, first: int, second: int) -> None:
        super().__init__(first, second)


def run(actions: list[Callable[[], None] | None], where: str) -> list[Tensor]:
    """Run a map over one call for each action, taken in the forward or in the backward."""
    inputs = [torch.ones(2, requires_grad=True) for _ in actions]
    in_forward = where == "forward"
    calls = [
        (x, action, None) if in_forward else (x, None, action)
        for x, action in zip(inputs, actions, strict=True)
    ]
    torch.stack(map_with_parallel_backward(Calls, *calls)).sum().backward()
    return inputs


def assert_still_works() -> None:
    assert [x.grad.tolist() for x in run([None] * 8, "forward") if x.grad is not None] == [[2.0, 2.0]] * 8


def raising(error: BaseException) -> Callable[[], None]:
    def action() -> None:
        raise error

    return action


@dataclass(frozen=True, eq=False)
class Frozen(Exception):
    """Refuses attributes."""

    code: int


class WithNotesOfItsOwn(Exception):
    __notes__ = ("its own",)  # type: ignore[assignment]  # a list, where there are any


@pytest.mark.parametrize("where", PASSES)
@pytest.mark.parametrize(
    "error",
    [
        ValueError("broken"),
        StopIteration(3),
        StopAsyncIteration(),
        GeneratorExit(),
        asyncio.CancelledError(),
        queue.Empty(),
        TimeoutError(),
        threading.BrokenBarrierError(),
        KeyError("key"),
        NeedsTwoArguments(1, 2),
        SystemExit(3),
        KeyboardInterrupt(),
        Odd("odd"),
        MemoryError(),
        ExceptionGroup("group", [ValueError("inner")]),
        Frozen(3),
        WithNotesOfItsOwn(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_whatever_a_call_raises_comes_out_itself(error: BaseException, where: str) -> None:
    barrier = threading.Barrier(4)  # so that no call runs before or after another, on one thread

    def action(mine: int) -> None:
        barrier.wait(PATIENCE_S)
        if mine == 2:
            raise error

    with pytest.raises(type(error)) as caught:
        run([lambda i=i: action(i) for i in range(4)], where)  # type: ignore[misc]  # mypy can't type the default
    assert caught.value is error
    assert any("call 2" in note for note in caught.value.__notes__)
    assert_still_works()


class AddsNoNotes(Exception):
    __notes__ = None  # type: ignore[assignment]

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(name)


def test_an_exception_to_which_nothing_can_be_added_comes_out_itself() -> None:
    error = AddsNoNotes()
    with pytest.raises(AddsNoNotes) as caught:
        run([None, raising(error)], "forward")
    assert caught.value is error
    with pytest.raises(AddsNoNotes) as caught:
        parallel_apply([raising(error)], [()])
    assert caught.value is error


@pytest.mark.parametrize("where", PASSES)
@pytest.mark.parametrize(
    ("failing", "others"), [((2, 7), "; 1 other call failed"), ((2, 3, 7), "; 2 other calls failed")]
)
def test_the_lowest_of_several_failures_is_raised_and_the_others_are_counted(
    where: str, failing: tuple[int, ...], others: str
) -> None:
    barrier = threading.Barrier(8)
    last_first = [threading.Event() for _ in range(9)]
    last_first[8].set()

    def action(mine: int) -> None:
        barrier.wait(PATIENCE_S)
        last_first[mine + 1].wait(PATIENCE_S)  # the highest call fails first
        last_first[mine].set()
        if mine in failing:
            raise LookupError(mine)

    with pytest.raises(LookupError) as caught:
        run([lambda i=i: action(i) for i in range(8)], where)  # type: ignore[misc]  # mypy can't type the default
    assert caught.value.args == (2,)
    (note,) = caught.value.__notes__
    assert "call 2" in note
    assert where in note
    assert others in note


@pytest.mark.parametrize("where", PASSES)
def test_a_single_failure_counts_no_others(where: str) -> None:
    with pytest.raises(LookupError) as caught:
        run([None, raising(LookupError()), None], where)
    (note,) = caught.value.__notes__
    assert "call 1" in note
    assert "other" not in note or "0 other" in note or "no other" in note


@pytest.mark.parametrize("makes_inputs", [False, True])
def test_a_backward_through_some_results_counts_all_calls_of_the_map(makes_inputs: bool) -> None:
    def action() -> None:
        raise LookupError

    inputs = [torch.ones(2, requires_grad=True) for _ in range(4)]
    if makes_inputs:  # histories that lie apart
        inputs = [SavesInput.apply(x) for x in inputs]  # type: ignore[no-untyped-call]
    outputs = map_with_parallel_backward(Calls, *[(x, None, action) for x in inputs])
    with pytest.raises(LookupError) as caught:
        outputs[2].sum().backward()
    assert "raised by call 2 (Calls) of 4." in caught.value.__notes__[0]


@pytest.mark.parametrize("where", PASSES)
def test_all_calls_have_come_to_rest_before_the_failure_is_raised(where: str) -> None:
    barrier, failed = threading.Barrier(8), threading.Event()
    crowd = Crowd()
    ended: list[int] = []

    def action(mine: int) -> None:
        with crowd.enter():
            barrier.wait(PATIENCE_S)
            if mine == 3:
                failed.set()
                raise LookupError(mine)
            assert failed.wait(PATIENCE_S)
            for _ in range(100):
                torch.ones(100).sum()  # still at work after the failure
            ended.append(mine)

    with pytest.raises(LookupError):
        run([lambda i=i: action(i) for i in range(8)], where)  # type: ignore[misc]  # mypy can't type the default
    assert crowd.inside == 0
    assert sorted(ended) == [0, 1, 2, 4, 5, 6, 7]


@pytest.mark.parametrize("where", PASSES)
def test_the_traceback_leads_to_the_line_that_raised_and_the_cause_stays(where: str) -> None:
    cause = OSError("cause")

    def the_line_that_raised() -> None:
        raise LookupError("effect") from cause

    with pytest.raises(LookupError) as caught:
        run([None, the_line_that_raised, None], where)
    names = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert names[-1] == "the_line_that_raised"
    assert where in names
    assert caught.value.__cause__ is cause


@pytest.mark.parametrize("max_concurrency", [1, 2])
def test_an_exception_that_several_calls_raise_shows_how_it_came_to_the_first(max_concurrency: int) -> None:
    third_has_begun = threading.Event()

    def the_line_that_raised() -> None:
        raise LookupError("shared")

    def call(index: int, x: Tensor) -> Tensor:
        if index == 2:
            third_has_begun.set()
        if index == 1 and max_concurrency == 2:  # so the first has ended, and neither of the others
            assert third_has_begun.wait(PATIENCE_S)
        return x * shared.result(PATIENCE_S)

    with futures.ThreadPoolExecutor(1) as pool:
        shared = pool.submit(the_line_that_raised)
        with pytest.raises(LookupError) as caught:
            parallel_apply(
                [call] * 3, [(i, torch.ones(2)) for i in range(3)], max_concurrency=max_concurrency
            )
    names = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert names.count("call") == 1
    assert names[-1] == "the_line_that_raised"
    assert any("call 0" in note and "2 other calls" in note for note in caught.value.__notes__)


def test_a_failure_in_a_nested_map_is_noted_once_by_each_map() -> None:
    with pytest.raises(LookupError) as caught:
        run([None, None, lambda: void(run([None, raising(LookupError())], "forward"))], "forward")
    inner, outer = caught.value.__notes__
    assert "call 1" in inner
    assert "call 2" in outer


def void(_: Any) -> None:
    """Turn an expression into an action."""


@pytest.mark.parametrize("where", PASSES)
def test_a_bounded_map_fails_as_an_unbounded_one(where: str) -> None:
    inputs = [torch.ones(2, requires_grad=True) for _ in range(5)]
    fails = raising(LookupError(1))
    calls = [(x, fails, None) if where == "forward" else (x, None, fails) for x in inputs]
    with pytest.raises(LookupError) as caught:
        torch.stack(map_with_parallel_backward(Calls, *calls, max_concurrency=2)).sum().backward()
    assert any("call 0" in note for note in caught.value.__notes__)
    assert_still_works()


@pytest.mark.parametrize("where", PASSES)
def test_after_a_failure_no_tensor_is_held(where: str) -> None:
    def fail() -> list[weakref.ref[Tensor]]:
        inputs = [torch.ones(2, requires_grad=True) for _ in range(8)]
        products = [x * 2 for x in inputs]
        fails = raising(LookupError())
        calls: list[Any] = [(x, None, None) for x in products]
        calls[4] = (products[4], fails, None) if where == "forward" else (products[4], None, fails)
        try:
            torch.stack(map_with_parallel_backward(Calls, *calls)).sum().backward()
        except LookupError as error:
            error.__traceback__ = None
        return [weakref.ref(x) for x in inputs + products]

    fail()  # whatever is made once
    gc.collect()
    gc.disable()
    try:
        assert [ref() for ref in fail()] == [None] * 16
    finally:
        gc.enable()


def test_a_failed_backward_leaves_the_gradients_of_earlier_ones_alone() -> None:
    x = torch.ones(2, requires_grad=True)
    x.grad = torch.full((2,), 7.0)
    fails = raising(LookupError())
    results = map_with_parallel_backward(Calls, (x,), (x, None, fails), (x,))
    with pytest.raises(LookupError):
        torch.stack(results).sum().backward()
    assert x.grad.tolist() == [7.0, 7.0]


def test_a_backward_that_failed_can_be_run_again_over_a_retained_graph() -> None:
    fails = [True]

    def action() -> None:
        if fails:
            raise LookupError(fails.pop())

    class FailsOnce(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x**2

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            action()
            (x,) = ctx.saved_tensors
            return grad * 2 * x

    inputs = [torch.ones(2, requires_grad=True) for _ in range(3)]
    loss = torch.stack(map_with_parallel_backward(FailsOnce, *[(x,) for x in inputs])).sum()
    with pytest.raises(LookupError):
        loss.backward(retain_graph=True)
    for x in inputs:
        x.grad = None
    loss.backward()
    assert [x.grad.tolist() for x in inputs if x.grad is not None] == [[2.0, 2.0]] * 3


def test_ctrl_c_while_pytorch_ties_the_results_is_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch asks the node how it takes gradients, and of an exception there it makes one of its own."""
    monkeypatch.setattr(UnlessCompiled, "__get__", lambda *_: signal.raise_signal(signal.SIGINT))
    calls = [(torch.ones(3, requires_grad=True),) for _ in range(3)]
    with pytest.raises(KeyboardInterrupt):
        map_with_parallel_backward(SavesInput, *calls)
