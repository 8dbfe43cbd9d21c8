"""A step that raised, since an answer was lost, and is repeated: no expert makes it twice, and none leaves it out."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

import pytest
import torch
from torch import nn

from experts_server import ExpertsServer
from moe_autograd.errors import CallCancelledError, ServerUnavailableError
from moe_autograd.remote import RemoteExperts, RemoteOptimizer, RetryPolicy, connect, in_thread
from tests.support.hosting import sgd
from tests.support.proxy import Proxy
from tests.support.servers import wait_until


@dataclass
class Trained:
    """Experts `near` and `far`, each on its server, `far` behind a proxy.

    Args:
        has_made: called by the far server once it has made a step, before it answers.
    """

    experts: RemoteExperts
    servers: list[ExpertsServer]
    proxy: Proxy
    has_made: Callable[[], None] = lambda: None

    def backward(self) -> None:
        torch.stack([expert(torch.ones(1, 4)) for expert in self.experts.values()]).sum().backward()

    def lose(self) -> None:
        """Cut the far server off."""
        self.proxy.is_gone = True
        self.proxy.cut()

    def give_back(self) -> None:
        self.has_made = lambda: None
        self.proxy.is_gone = False

    @property
    def num_updates(self) -> dict[str, int]:
        return {name: count for server in self.servers for name, count in server.num_updates.items()}


@pytest.fixture
def trained() -> Iterator[Trained]:
    class Telling(torch.optim.SGD):
        def step(self, closure=None):  # type: ignore[no-untyped-def]
            super().step(closure)
            trained.has_made()

    with (
        ExpertsServer({"near": nn.Linear(4, 4)}, optimizer=sgd) as near,
        ExpertsServer({"far": nn.Linear(4, 4)}, optimizer=lambda own: Telling(own, lr=0.1)) as far,
        Proxy(far.address) as proxy,
        connect([near.address, proxy.address], retry=RetryPolicy(patience_s=0.1)) as experts,
    ):
        trained = Trained(experts, [near, far], proxy)
        yield trained


def has_got_through(call: Callable[[], None]) -> bool:
    try:
        call()
    except ServerUnavailableError:
        return False
    return True


@pytest.mark.parametrize("lost", ["request", "answer"])
def test_a_step_repeated_after_it_raised_is_made_once_everywhere(
    trained: Trained, lost: Literal["request", "answer"]
) -> None:
    optimizer = RemoteOptimizer(trained.experts)
    trained.backward()
    if lost == "request":
        trained.lose()
    trained.has_made = trained.lose
    assert not has_got_through(optimizer.step)
    wait_until(lambda: trained.num_updates == {"near": 1, "far": int(lost == "answer")})
    assert not has_got_through(optimizer.step)
    trained.give_back()
    wait_until(lambda: has_got_through(optimizer.step))
    assert trained.num_updates == {"near": 1, "far": 1}
    optimizer.step()  # of the same gradients, as in torch
    assert trained.num_updates == {"near": 2, "far": 2}


def test_a_backward_that_never_arrived_is_not_missed(trained: Trained) -> None:
    y = trained.experts["far"](torch.ones(1, 4)).sum()
    trained.lose()
    with pytest.raises(ServerUnavailableError):
        y.backward()
    trained.give_back()
    wait_until(lambda: has_got_through(trained.backward))
    RemoteOptimizer(trained.experts).step()
    assert trained.num_updates == {"near": 1, "far": 1}


def test_its_servers_remember_it_whatever_comes_between(trained: Trained) -> None:
    """A server forgets numbers below those that are open, and refuses them."""
    optimizer, experts = RemoteOptimizer(trained.experts), trained.experts
    trained.backward()
    trained.has_made = trained.lose
    assert not has_got_through(optimizer.step)
    wait_until(lambda: trained.num_updates["far"] == 1)
    trained.give_back()
    wait_until(lambda: has_got_through(lambda: experts.load_state_dict(experts.state_dict())))
    optimizer.step()
    assert trained.num_updates == {"near": 1, "far": 1}


@pytest.mark.parametrize("forgets", [False, True])
def test_one_with_other_gradients_is_another_step(trained: Trained, forgets: bool) -> None:
    optimizer = RemoteOptimizer(trained.experts)
    trained.backward()
    trained.has_made = trained.lose
    assert not has_got_through(optimizer.step)
    trained.give_back()
    if forgets:
        wait_until(lambda: has_got_through(optimizer.zero_grad))
    wait_until(lambda: has_got_through(trained.backward))
    optimizer.step()
    assert trained.num_updates == {"near": 2, "far": 2}
    assert "0 open" in repr(trained.experts.connection.numbering)


def test_who_goes_on_without_a_server_makes_another_step(trained: Trained) -> None:
    optimizer = RemoteOptimizer(trained.experts, on_failure="drop")
    trained.backward()
    trained.has_made = trained.lose
    optimizer.step()
    assert len(optimizer.failures) == 1
    optimizer.step()
    wait_until(lambda: trained.num_updates == {"near": 2, "far": 1})


def test_who_would_go_on_and_is_cancelled_repeats_the_step(trained: Trained) -> None:
    is_held, may_go_on = threading.Event(), threading.Event()
    optimizer = RemoteOptimizer(trained.experts, on_failure="drop")
    trained.backward()

    def hold() -> None:
        is_held.set()
        assert may_go_on.wait(60)

    async def main() -> None:
        task = asyncio.ensure_future(in_thread(optimizer.step))
        assert await asyncio.to_thread(is_held.wait, 60)
        await asyncio.to_thread(wait_until, lambda: trained.num_updates["near"] == 1)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    trained.has_made = hold
    asyncio.run(main())
    may_go_on.set()
    optimizer.step()
    assert not optimizer.failures
    assert trained.num_updates == {"near": 1, "far": 1}
    assert "0 open" in repr(trained.experts.connection.numbering)


def test_who_would_go_on_without_servers_goes_on_with_no_closed_connection(trained: Trained) -> None:
    is_held, may_go_on = threading.Event(), threading.Event()
    optimizer = RemoteOptimizer(trained.experts, on_failure="drop")
    trained.backward()

    def hold() -> None:
        is_held.set()
        assert may_go_on.wait(60)

    trained.has_made = hold
    with ThreadPoolExecutor() as threads:
        step = threads.submit(optimizer.step)
        assert is_held.wait(60)
        trained.experts.close()
        with pytest.raises(CallCancelledError):
            step.result(60)
        may_go_on.set()
