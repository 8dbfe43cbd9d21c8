"""Connections that are cut in the middle of a message, of every kind and in both directions: nothing is lost by it."""

from __future__ import annotations

import contextlib
import copy
import threading
from collections.abc import Callable
from typing import Literal

import pytest
import torch
from torch import nn

from experts_server import ExpertsServer
from moe_autograd import parallel_apply
from moe_autograd.remote import HedgePolicy, RemoteOptimizer, RetryPolicy, connect
from tests.support.gated import Waiting
from tests.support.hosting import sgd
from tests.support.proxy import Proxy
from tests.support.servers import START_S, wait_until

KINDS = ("forward", "backward", "step", "zero_grad", "info", "state_dict", "load_state_dict")
# Frames of a small call begin with headers of some 50 bytes; a pass of 16 rows has some 6,000 bytes.
PLACES = (0, 3, 9, 20, 40, 75, 140, 260, 500, 900, 2500, 5000)


@pytest.mark.parametrize("direction", ["requests", "answers"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_connection_that_is_cut_within_a_message_changes_no_number(
    kind: str, direction: Literal["requests", "answers"]
) -> None:
    torch.manual_seed(0)
    modules: dict[str, nn.Module] = {f"e.{index}": nn.Linear(32, 32) for index in range(3)}
    twins = copy.deepcopy(modules)
    local = sgd(p for twin in twins.values() for p in twin.parameters())
    with (
        ExpertsServer(modules, optimizer=sgd) as server,
        Proxy(server.address) as proxy,
        connect(proxy.address, timeout_s=START_S) as experts,
    ):
        remote = RemoteOptimizer(experts)
        for place in PLACES:

            def make(now: str, call: Callable[[], object], place: int = place) -> object:
                if now == kind:
                    proxy.cut_after(direction, place)
                return call()

            x, z = (torch.randn(16, 32).requires_grad_() for _ in range(2))
            z.data.copy_(x)
            make("zero_grad", remote.zero_grad)
            local.zero_grad()
            ys = make("forward", lambda x=x: parallel_apply(list(experts.values()), [(x,)] * 3))
            loss = torch.stack(ys).square().mean()
            make("backward", loss.backward)
            torch.stack([twin(z) for twin in twins.values()]).square().mean().backward()
            torch.testing.assert_close(x.grad, z.grad)
            make("step", remote.step)
            local.step()
            make("info", experts.info)
            state = make("state_dict", experts.state_dict)
            make("load_state_dict", lambda state=state: experts.load_state_dict(state))
            for name, twin in twins.items():
                for key, weight in twin.state_dict().items():
                    torch.testing.assert_close(state[f"{name}.{key}"], weight)
        assert {hosted.num_updates for hosted in experts.info().values()} == {len(PLACES)}
        assert proxy.num_cut >= len(PLACES) - 1  # the last answers are short


class HeldUp(torch.optim.SGD):
    """Waits in a forward or in a step, until it is let go."""

    def __init__(self, what: str) -> None:
        self.expert = nn.Linear(4, 4)
        super().__init__(self.expert.parameters(), lr=0.1)
        self.begun, self.gate = threading.Event(), threading.Event()
        if what == "forward":
            self.expert.register_forward_pre_hook(lambda *_: self._wait())
        else:
            self.register_step_pre_hook(lambda *_: self._wait())

    def _wait(self) -> None:
        self.begun.set()
        assert self.gate.wait(START_S)


@pytest.mark.parametrize("what", ["forward", "step"])
def test_patience_is_for_a_server_while_it_is_gone_and_not_for_a_call(what: str) -> None:
    """Two cuts of one call, further apart than `patience_s`: the server is there at once each time."""
    held = HeldUp(what)
    retry = RetryPolicy(patience_s=2.0, update_attempt_s=START_S)
    with (
        ExpertsServer({"e": held.expert}, optimizer=lambda _: held) as server,
        Proxy(server.address) as proxy,
        connect(proxy.address, timeout_s=START_S, retry=retry) as experts,
    ):
        if what == "step":
            experts["e"](torch.ones(1, 4)).sum().backward()
        remote = RemoteOptimizer(experts)
        calls: dict[str, Callable[[], object]] = {
            "forward": lambda: experts["e"](torch.ones(1, 4)).detach(),
            "step": lambda: remote.step() or "stepped",
        }
        call = Waiting(calls[what])
        try:
            assert held.begun.wait(START_S)
            for num_accepted in (2, 3):
                proxy.cut()
                wait_until(lambda n=num_accepted: proxy.num_accepted >= n, 20.0)
                threading.Event().wait(1.25 * retry.patience_s)
        finally:
            held.gate.set()
        assert call.result() is not None
        assert server.num_updates["e"] == (what == "step")


def test_hedged_replicas_count_each_update_once_whatever_is_cut() -> None:
    """Each step has one backward, at the replica that answered first, and moves one weight by 1."""
    num_steps = 40
    experts = [nn.Linear(1, 1, bias=False) for _ in range(2)]
    for expert in experts:
        nn.init.zeros_(expert.weight)
    hedge = HedgePolicy(quantile=0.5, first_after_s=0.001)
    retry = RetryPolicy(patience_s=START_S, update_attempt_s=2.0)
    with contextlib.ExitStack() as stack:
        servers = [
            stack.enter_context(ExpertsServer({"e": expert}, optimizer=lambda p: torch.optim.SGD(p, lr=1.0)))
            for expert in experts
        ]
        proxies = [stack.enter_context(Proxy(server.address, seed)) for seed, server in enumerate(servers)]
        addresses = [proxy.address for proxy in proxies]
        remote = stack.enter_context(connect(addresses, timeout_s=START_S, retry=retry, hedge=hedge))
        optimizer = RemoteOptimizer(remote)
        for proxy in proxies:
            proxy.cut_chance = 0.02
        for step in range(num_steps):
            for i, proxy in enumerate(proxies):
                proxy.delay_s = 0.02 if i == step % 2 else 0.001  # so the other one wins
            optimizer.zero_grad()
            remote["e"](torch.ones(1, 1)).sum().backward()
            optimizer.step()
        assert sum(server.num_updates["e"] for server in servers) == num_steps
        assert sum(-expert.weight.item() for expert in experts) == num_steps
        assert all(server.num_updates["e"] for server in servers), "each has won at times"
        assert sum(proxy.num_cut for proxy in proxies) > 5
