"""`in_thread`: the loop goes on, torch's world goes along, and cancelling a task reaches the server."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from experts_server import ExpertsServer
from moe_autograd import MixtureOfExperts, TopKRouter, parallel_apply
from moe_autograd.errors import InvalidCallError
from moe_autograd.remote import RemoteExperts, RemoteOptimizer, RetryPolicy, connect, in_thread
from tests.e2e.test_readme import PAGES, blocks
from tests.support.held import Held
from tests.support.hosting import make_modules, sgd
from tests.support.servers import wait_until_inside

X = torch.ones(1, 4)


@pytest.fixture(scope="module")
def server() -> Iterator[ExpertsServer]:
    with ExpertsServer(make_modules(*range(4)), optimizer=sgd) as server:
        yield server


@pytest.fixture
def experts(server) -> Iterator[RemoteExperts]:
    with connect(server.address) as experts:
        yield experts


class Holding:
    """A server whose expert is held in a call of another client; `experts` has all the time there is."""

    def __init__(self, phase: str) -> None:
        self.held = Held(phase)
        self._stack = contextlib.ExitStack()
        self._busy: threading.Thread | None = None

    def __enter__(self) -> Holding:
        server = ExpertsServer({"held": self.held}, optimizer=sgd, update="on_backward")
        self.server = self._stack.enter_context(server)
        self._other = self._stack.enter_context(connect(server.address, timeout_s=1000.0))
        self.experts = self._stack.enter_context(connect(server.address, timeout_s=1000.0))
        return self

    def hold(self) -> Holding:
        self._busy = threading.Thread(target=lambda: self._other["held"](X).sum().backward())
        self._busy.start()
        assert self.held.begun.wait(60)
        return self

    async def until_queued(self, task: asyncio.Future[Any]) -> None:
        """Wait until a call of `task` waits behind the held one."""
        while not self.server._server.registry["held"]:
            assert not task.done(), task.exception()
            await asyncio.sleep(0)

    def let_go(self) -> None:
        self.held.may_go.set()
        if self._busy is not None:
            self._busy.join(60)

    def __exit__(self, *_: object) -> None:
        self.let_go()
        self._stack.close()


def test_a_whole_training_step_can_be_awaited(server):
    async def main() -> None:
        experts = await in_thread(connect, server.address, timeout_s=60.0)
        layer = MixtureOfExperts(TopKRouter(4, 4, top_k=2), experts)
        optimizer = RemoteOptimizer(experts)
        before = await in_thread(experts.state_dict)
        await in_thread(optimizer.zero_grad)
        y = await in_thread(layer, torch.randn(8, 4))
        await in_thread(y.sum().backward)
        await in_thread(optimizer.step)
        after = await in_thread(experts.state_dict)
        assert any(not torch.equal(before[key], after[key]) for key in before)
        await in_thread(experts.load_state_dict, before)
        await in_thread(experts.close)

    asyncio.run(main())


def test_grad_mode_and_autocast_are_those_at_the_call(experts):
    async def main() -> None:
        with torch.no_grad():
            assert not (await in_thread(experts["ffn.0"], X)).requires_grad
        assert (await in_thread(experts["ffn.0"], X)).requires_grad
        with torch.autocast("cpu", torch.bfloat16):
            weight = torch.ones(4, 4)
            assert (await in_thread(lambda: X @ weight)).dtype == torch.bfloat16

    asyncio.run(main())


def test_requests_that_overlap_as_on_the_page_leave_the_loop_its_gradients(server):
    """Blocks of `torch.no_grad()` over an `await` would end in the order they began, and leave it without."""
    code = next(code for code in blocks(PAGES["docs/remote.md"], "python") if "in_thread" in code)
    names: dict[str, Any] = {}
    exec(code.replace("timeout(2.0)", "timeout(1000.0)"), names)

    async def main() -> bool:
        answers = await names["serve"](server.address, [X] * 3)
        return torch.is_grad_enabled() and not any(y.requires_grad for y in answers)

    assert asyncio.run(main())


def test_errors_are_raised_as_they_are(experts):
    with pytest.raises(InvalidCallError, match=r"expert 'ffn\.0'"):
        asyncio.run(in_thread(experts["ffn.0"], torch.ones(1, 5)))


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_cancelling_a_task_reaches_the_server_which_does_not_begin_what_waits_there(server, phase):
    async def main(holding: Holding, modules: list[nn.Module]) -> None:
        if phase == "backward":
            outputs = await in_thread(parallel_apply, modules, [(X,)] * 2)
            backward = sum(outputs).sum().backward
        holding.hold()
        call = in_thread(backward) if phase == "backward" else in_thread(parallel_apply, modules, [(X,)] * 2)
        task = asyncio.ensure_future(call)
        await holding.until_queued(task)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    with Holding(phase) as holding, connect(server.address) as others:
        asyncio.run(main(holding, [others["ffn.0"], holding.experts["held"]]))  # it waits for its threads
        wait_until_inside(holding.server, 1)
        assert not holding.experts.connection._finding.placement.is_lost(holding.server.address)
        holding.let_go()
        assert holding.experts["held"](X).shape == (1, 4)  # the connection goes on
        assert holding.held.num_begun == (2 if phase == "forward" else 1)
        assert holding.server.num_updates == {"held": 1}


@pytest.mark.parametrize("what", ["step", "zero_grad", "load_state_dict", "state_dict"])
def test_cancelling_what_is_no_pass_reaches_the_server(what):
    """It would wait for its deadline otherwise, and `asyncio.run` for it."""

    async def main(call: Callable[[], object], server: ExpertsServer) -> None:
        task = asyncio.ensure_future(in_thread(call))
        await asyncio.to_thread(wait_until_inside, server, 2)  # beside the one that is held
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    held, endless = Held("forward"), RetryPolicy(update_attempt_s=1000.0)
    held.may_go.set()
    with (
        ExpertsServer({"held": held}, optimizer=sgd) as server,
        connect(server.address) as others,
        connect(server.address, timeout_s=1000.0, retry=endless) as experts,
    ):
        experts["held"](X).sum().backward()
        optimizer, state = RemoteOptimizer(experts), experts.state_dict()
        load = partial(experts.load_state_dict, state)
        calls = {"step": optimizer.step, "zero_grad": optimizer.zero_grad, "load_state_dict": load}
        held.may_go.clear()
        held.begun.clear()
        busy = threading.Thread(target=others["held"], args=(X,))
        busy.start()
        assert held.begun.wait(60)
        wait_until_inside(server, 1)  # what has been asked before has left
        asyncio.run(main(calls.get(what, experts.state_dict), server))
        wait_until_inside(server, 1)  # what was cancelled has, too: else the server would go on with it
        held.may_go.set()
        busy.join(60)
        assert not experts.connection._finding.placement.is_lost(server.address)
        optimizer.zero_grad()
        optimizer.step()
        assert server.num_updates == {"held": 0}


def test_cancelling_a_connect_ends_it():
    async def main(listener: socket.socket) -> None:
        address = f"127.0.0.1:{listener.getsockname()[1]}"
        task = asyncio.ensure_future(in_thread(connect, address, timeout_s=1000.0))
        silent, _ = await asyncio.to_thread(listener.accept)
        with silent:
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    with socket.create_server(("127.0.0.1", 0)) as listener:
        asyncio.run(main(listener))


def test_cancelling_a_connect_leaves_a_resolver_that_hangs(monkeypatch):
    asked, may_answer = threading.Event(), threading.Event()

    def getaddrinfo(*arguments: object, **options: object) -> list[object]:
        asked.set()
        assert may_answer.wait(60)
        return []

    async def main() -> None:
        task = asyncio.ensure_future(in_thread(connect, "experts.test:1", timeout_s=1000.0))
        await asyncio.to_thread(asked.wait, 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    asyncio.run(main())
    may_answer.set()


def test_what_is_begun_after_the_cancelling_ends_at_once():
    """A task is cancelled while its thread is between two calls."""
    between, may_go_on = threading.Event(), threading.Event()
    ended: list[Exception] = []

    def work(expert: nn.Module) -> None:
        between.set()
        assert may_go_on.wait(60)
        try:
            expert(X)
        except Exception as error:
            ended.append(error)

    async def main(expert: nn.Module) -> None:
        task = asyncio.ensure_future(in_thread(work, expert))
        await asyncio.to_thread(between.wait, 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        may_go_on.set()

    with Holding("forward") as holding:
        asyncio.run(main(holding.hold().experts["held"]))
        assert "cancelled here" in str(ended[0])
        assert holding.held.num_begun == 1


def test_a_timeout_of_asyncio_is_one_of_the_call():
    async def main(experts: RemoteExperts) -> None:
        async with asyncio.timeout(0.1):
            await in_thread(experts["held"], X)

    with Holding("forward") as holding:
        with pytest.raises(TimeoutError):
            asyncio.run(main(holding.hold().experts))
        wait_until_inside(holding.server, 1)


def test_two_loops_share_a_connection(experts):
    results: list[torch.Tensor] = []

    async def main() -> None:
        calls = (in_thread(experts[f"ffn.{index}"], X) for index in (0, 1, 0, 1))
        results.extend(await asyncio.gather(*calls))

    loops = [threading.Thread(target=asyncio.run, args=(main(),)) for _ in range(2)]
    for loop in loops:
        loop.start()
    for loop in loops:
        loop.join(60)
    assert len(results) == 8
    assert all(any(torch.equal(y, experts[f"ffn.{index}"](X)) for index in (0, 1)) for y in results)


def test_the_loop_answers_while_a_server_does_not():
    """Events, and no time: the loop lets the held call go, which it could not if it were held up."""

    async def main(holding: Holding) -> None:
        call = asyncio.ensure_future(in_thread(holding.experts["held"], X))
        await holding.until_queued(call)
        assert not call.done()
        holding.held.may_go.set()
        assert (await call).shape == (1, 4)

    with Holding("forward") as holding:
        asyncio.run(main(holding.hold()))
        assert holding.held.num_begun == 2
