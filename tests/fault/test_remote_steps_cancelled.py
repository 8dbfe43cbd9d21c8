"""A task that is cancelled although its step has been made: repeated, the step is the same one."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from experts_server import ExpertsServer
from moe_autograd.errors import CallCancelledError
from moe_autograd.remote import RemoteExperts, RemoteOptimizer, connect, in_thread
from tests.support.hosting import sgd

LONG_S = 60.0


class Trained:
    """Experts `a` and `b` of one server, with an optimizer for both."""

    def __init__(self, server: ExpertsServer, experts: RemoteExperts) -> None:
        self.server, self.experts = server, experts
        self.optimizer = RemoteOptimizer(experts)
        self.backward()

    def backward(self) -> None:
        torch.stack([expert(torch.ones(1, 4)) for expert in self.experts.values()]).sum().backward()

    @property
    def num_updates(self) -> list[int]:
        return [*self.server.num_updates.values()]

    @property
    def has_settled(self) -> bool:
        return "0 open" in repr(self.experts.connection.numbering)


@pytest.fixture
def trained() -> Iterator[Trained]:
    hosted = {"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)}
    with ExpertsServer(hosted, optimizer=sgd) as server, connect(server.address) as experts:
        yield Trained(server, experts)


async def cancel_when_made(func: Callable[[], object], *, result_is_there: bool = False) -> None:
    """Cancel an `in_thread(func)` once `func` has returned, and before the task goes on."""
    is_made = threading.Event()

    def make() -> None:
        func()
        is_made.set()

    task: Any = asyncio.ensure_future(in_thread(make))
    await asyncio.sleep(0)  # it begins
    assert is_made.wait(LONG_S)  # the loop is held up meanwhile
    while result_is_there and not task._fut_waiter.done():
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("result_is_there", [False, True])
def test_a_step_that_nobody_has_heard_of_is_made_once(trained: Trained, result_is_there: bool) -> None:
    async def main() -> None:
        await cancel_when_made(trained.optimizer.step, result_is_there=result_is_there)
        await cancel_when_made(trained.optimizer.step, result_is_there=result_is_there)
        await in_thread(trained.optimizer.step)

    asyncio.run(main())
    assert trained.num_updates == [1, 1]
    assert trained.has_settled
    trained.optimizer.step()  # of the same gradients, as in torch
    assert trained.num_updates == [2, 2]


@pytest.mark.parametrize("error", [ArithmeticError, SystemExit, KeyboardInterrupt])
def test_one_behind_which_something_is_raised_was_heard_of(
    trained: Trained, error: type[BaseException]
) -> None:
    def step() -> None:
        trained.optimizer.step()
        raise error("told to")

    with pytest.raises(error, match="told to"):
        asyncio.run(in_thread(step))
    assert trained.has_settled
    assert trained.num_updates == [1, 1]


def test_its_server_remembers_it_whatever_comes_between(trained: Trained) -> None:
    """A server forgets numbers below those that are open, and refuses them."""
    one, other = (RemoteOptimizer([trained.experts[name]]) for name in ("a", "b"))

    async def main() -> None:
        is_made, may_return = threading.Event(), threading.Event()

        def step() -> None:
            one.step()
            is_made.set()
            assert may_return.wait(LONG_S)

        task = asyncio.ensure_future(in_thread(step))
        assert await asyncio.to_thread(is_made.wait, LONG_S)
        other.step()
        trained.experts.load_state_dict(trained.experts.state_dict())
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        may_return.set()

    asyncio.run(main())
    one.step()
    assert trained.num_updates == [1, 1]
    assert trained.has_settled


def test_each_optimizers_last_step_is_repeated(trained: Trained) -> None:
    one, other = (RemoteOptimizer([trained.experts[name]]) for name in ("a", "b"))

    def step() -> None:
        one.step()
        one.step()
        other.step()

    asyncio.run(cancel_when_made(step))
    one.step()
    other.step()
    assert trained.num_updates == [2, 1]


@pytest.mark.parametrize("is_cancelled_before", [False, True])
@pytest.mark.parametrize("forgets", [False, True])
def test_one_with_other_gradients_is_another_step(
    trained: Trained, forgets: bool, is_cancelled_before: bool
) -> None:
    def go_on() -> None:
        if forgets:
            trained.optimizer.zero_grad()
        trained.backward()

    def step() -> None:
        trained.optimizer.step()
        if not is_cancelled_before:
            go_on()

    asyncio.run(cancel_when_made(step))
    if is_cancelled_before:
        go_on()
    trained.optimizer.step()
    assert trained.num_updates == [2, 2]
    assert trained.has_settled


def test_a_step_whose_caller_goes_on_is_followed_by_another(trained: Trained) -> None:
    def step_and_fail() -> None:
        trained.optimizer.step()
        raise ArithmeticError

    async def main() -> None:
        await in_thread(trained.optimizer.step)
        assert trained.has_settled
        with pytest.raises(ArithmeticError):
            await in_thread(step_and_fail)

    asyncio.run(main())
    assert trained.has_settled
    trained.optimizer.step()
    assert trained.num_updates == [3, 3]


def test_one_within_another_is_cancelled_with_it(trained: Trained) -> None:
    def step() -> None:
        asyncio.run(in_thread(trained.optimizer.step))

    asyncio.run(cancel_when_made(step))
    asyncio.run(in_thread(step))
    assert trained.num_updates == [1, 1]
    assert trained.has_settled


def test_one_that_begins_within_another_that_was_cancelled_ends_at_once(trained: Trained) -> None:
    between, may_go_on = threading.Event(), threading.Event()
    ended: list[BaseException] = []

    def step() -> None:
        between.set()
        assert may_go_on.wait(LONG_S)
        try:
            asyncio.run(in_thread(trained.optimizer.step))
        except CallCancelledError as error:
            ended.append(error)

    async def main() -> None:
        task = asyncio.ensure_future(in_thread(step))
        assert await asyncio.to_thread(between.wait, LONG_S)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        may_go_on.set()

    asyncio.run(main())  # it waits for its threads
    assert len(ended) == 1
    assert trained.num_updates == [0, 0]
