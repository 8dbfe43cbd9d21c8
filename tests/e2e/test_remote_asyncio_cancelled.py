"""A task that is cancelled before its remote calls begin: they are not made any more, whatever comes first."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from typing import Literal

import pytest
import torch

from experts_server import ExpertsServer
from moe_autograd import parallel_apply
from moe_autograd.errors import ServerUnavailableError
from moe_autograd.remote import RemoteExperts, RemoteOptimizer, connect, in_thread
from tests.support.held import Held
from tests.support.hosting import make_modules, sgd

NUM_ROUNDS = 20  # what was sent and cancelled at once reached the server in most of them
X = torch.ones(1, 4)


class CancelledBefore:
    """Calls a function in a thread that is held here, and cancelled, before it calls servers; then lets it go on."""

    def __init__(self, func: Callable[[], object], held: Held) -> None:
        self._func, self._held = func, held
        self._is_over = threading.Event()
        self.error: Exception | None = None

    async def __aenter__(self) -> CancelledBefore:
        task = asyncio.ensure_future(in_thread(self._run))
        assert await asyncio.to_thread(self._held.begun.wait, 60)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
        return self

    async def __aexit__(self, *_: object) -> None:
        self._held.may_go.set()
        assert await asyncio.to_thread(self._is_over.wait, 60)

    def _run(self) -> None:
        try:
            self._func()
        except Exception as error:
            self.error = error
        finally:
            self._is_over.set()


def results_of(experts: RemoteExperts) -> torch.Tensor:
    return torch.cat(parallel_apply([*experts.values()], [(X,)] * len(experts)))


def run(update: Literal["on_step", "on_backward"], main: Callable[[RemoteExperts], object]) -> dict[str, int]:
    """Return how often each expert was updated, after many rounds."""
    with ExpertsServer(make_modules(*range(4)), optimizer=sgd, update=update) as server:
        with connect(server.address) as experts:
            for _ in range(NUM_ROUNDS):
                asyncio.run(main(experts))
        return dict(server.num_updates)


def test_a_backward_is_not_sent_after_the_zero_grad_before_which_it_was_cancelled():
    async def main(experts: RemoteExperts) -> None:
        held, optimizer = Held("backward"), RemoteOptimizer(experts)
        loss = held(results_of(experts)).sum()
        async with CancelledBefore(loss.backward, held) as cancelled:
            await in_thread(optimizer.zero_grad)
        assert isinstance(cancelled.error, ServerUnavailableError)
        await in_thread(optimizer.step)

    assert set(run("on_step", main).values()) == {0}


def test_a_backward_that_would_be_an_update_is_not_sent():
    async def main(experts: RemoteExperts) -> None:
        held = Held("backward")
        loss = held(results_of(experts)).sum()
        async with CancelledBefore(loss.backward, held) as cancelled:
            pass
        assert isinstance(cancelled.error, ServerUnavailableError)

    assert set(run("on_backward", main).values()) == {0}


@pytest.mark.parametrize("change", ["step", "load_state_dict"])
def test_no_other_change_is_sent(change):
    async def main(experts: RemoteExperts) -> None:
        held = Held("forward")
        results_of(experts).sum().backward()
        before = experts.state_dict()
        doubled = {key: 2 * value for key, value in before.items()}

        def call() -> None:
            held(X)
            if change == "step":
                RemoteOptimizer(experts).step()
            else:
                experts.load_state_dict(doubled)

        async with CancelledBefore(call, held) as cancelled:
            pass
        assert isinstance(cancelled.error, ServerUnavailableError)
        after = experts.state_dict()
        assert all(torch.equal(before[key], after[key]) for key in before)

    assert set(run("on_step", main).values()) == {0}
