"""A layer that goes on without servers that fail does not without those that nobody waits for: they have not failed."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

from experts_server import ExpertsServer
from moe_autograd import MixtureOfExperts, TopKRouter
from moe_autograd.errors import CallCancelledError
from moe_autograd.remote import RemoteExperts, RemoteOptimizer, connect, in_thread
from tests.support.held import Held
from tests.support.hosting import sgd
from tests.support.servers import wait_until_inside

X = torch.randn(6, 4)


class Hosted:
    """A layer with an expert on a server where it can be held, one that calls another such, and one that is here."""

    def __init__(self, phase: str, *, allow_zero_outputs: bool) -> None:
        self.phase = phase
        self.held = [Held(phase), Held(phase)]
        self.let_go()
        self._stack = contextlib.ExitStack()
        server = ExpertsServer({f"ffn.{i}": held for i, held in enumerate(self.held)}, optimizer=sgd)
        self.server = self._stack.enter_context(server)
        address = self.server.address
        self.experts: RemoteExperts = self._stack.enter_context(connect(address, timeout_s=1000.0))
        self.other: RemoteExperts = self._stack.enter_context(connect(address, timeout_s=1000.0))
        first, second = self.experts.values()
        self.layer = MixtureOfExperts(
            TopKRouter(4, 3, top_k=3),
            [first, nn.Sequential(nn.Linear(4, 4), second), nn.Linear(4, 4)],
            on_failure="drop",
            allow_zero_outputs=allow_zero_outputs,
        )

    def let_go(self) -> None:
        for held in self.held:
            held.may_go.set()

    def hold(self) -> None:
        for held in self.held:
            held.may_go.clear()
            held.begun.clear()

    def wait(self) -> None:
        for held in self.held:
            assert held.begun.wait(60)

    def __enter__(self) -> Hosted:
        return self

    def __exit__(self, *_: object) -> None:
        self.let_go()
        self._stack.close()


@pytest.fixture(params=[("forward", False), ("forward", True), ("backward", False)], ids=str)
def hosted(request) -> Iterator[Hosted]:
    phase, allow_zero_outputs = request.param
    with Hosted(phase, allow_zero_outputs=allow_zero_outputs) as hosted:
        yield hosted


def cancelled_by(hosted: Hosted, cancel: Callable[[asyncio.Future[None]], object]) -> Exception | None:
    """Return what a pass raises in its thread that is cancelled while servers have its calls."""
    errors: list[Exception | None] = []
    is_over = threading.Event()

    def train() -> None:
        try:
            hosted.layer(X).sum().backward()
            errors.append(None)
        except Exception as error:
            errors.append(error)
        finally:
            is_over.set()

    async def main() -> None:
        hosted.hold()
        task = asyncio.ensure_future(in_thread(train))
        await asyncio.to_thread(hosted.wait)
        cancel(task)
        with contextlib.suppress(asyncio.CancelledError):
            await task
        assert await asyncio.to_thread(is_over.wait, 60)

    asyncio.run(main())
    return errors[0]


def test_a_pass_whose_task_is_cancelled_ends_there_and_the_next_one_has_all_experts(hosted):
    assert isinstance(cancelled_by(hosted, lambda task: task.cancel()), CallCancelledError)
    hosted.let_go()
    _, routing = hosted.layer(X, return_routing=True)
    assert routing.failures == []


def test_a_pass_beside_close_raises(hosted):
    assert isinstance(cancelled_by(hosted, lambda task: hosted.experts.close()), CallCancelledError)
    with pytest.raises(CallCancelledError):
        hosted.layer(X)


@pytest.mark.parametrize("rpc", ["step", "zero_grad"])
def test_an_update_beside_close_raises(rpc):
    errors: list[Exception] = []

    def update() -> None:
        try:
            getattr(optimizer, rpc)()
        except Exception as error:
            errors.append(error)

    with Hosted("backward", allow_zero_outputs=False) as hosted:
        optimizer = RemoteOptimizer(hosted.experts, on_failure="drop")
        hosted.layer(X).sum().backward()
        hosted.hold()
        others = [threading.Thread(target=expert(X).sum().backward) for expert in hosted.other.values()]
        for other in others:
            other.start()
        hosted.wait()
        updating = threading.Thread(target=update)
        updating.start()
        wait_until_inside(hosted.server, 3)
        hosted.experts.close()
        updating.join(60)
        hosted.let_go()
        for other in others:
            other.join(60)
    assert [type(error) for error in errors] == [CallCancelledError]
    assert optimizer.failures == []
