"""Gradients that servers gathered of an expert before and after it moved, with its checkpoint: which a step is of."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from experts_server import ExpertsServer
from moe_autograd.errors import ServerUnavailableError
from moe_autograd.remote import RemoteOptimizer, RetryPolicy, connect
from tests.support.hosting import LR
from tests.support.proxy import Proxy
from tests.support.replicas import Replicas, is_lost
from tests.support.servers import wait_until

PATIENT = RetryPolicy(patience_s=100.0)
X = torch.ones(1, 4)


@pytest.fixture
def replicas(tmp_path: Path) -> Iterator[Replicas]:
    replicas = Replicas(tmp_path)
    replicas.restart([0, None])
    yield replicas
    replicas.stop()


@pytest.mark.parametrize("lives", [False, True], ids=["its server is gone", "its server lives"])
def test_one_step_is_of_both(replicas: Replicas, lives: bool) -> None:
    with (
        contextlib.ExitStack() as other,
        connect(replicas.addresses, timeout_s=200.0, retry=PATIENT, allow_missing=True) as experts,
    ):
        optimizer = RemoteOptimizer(experts)
        experts["ffn.0"](X).sum().backward()
        replicas.restart([None, 0])
        if lives:
            other.enter_context(ExpertsServer({"ffn.9": nn.Linear(4, 4)}, listen=replicas.addresses[0]))
        wait_until(lambda: not is_lost(experts, replicas.addresses[1]))
        experts["ffn.0"](2 * X).sum().backward()
        for num_steps in (1, 2):  # the second one of the same gradients, as in torch
            optimizer.step()
            assert replicas.num_updates(0) == num_steps
            expected = replicas.weight(0) - num_steps * 3 * LR
            torch.testing.assert_close(experts.state_dict()["ffn.0.weight"], expected)


def test_so_it_is_where_an_answer_was_lost_before(replicas: Replicas) -> None:
    at_once = RetryPolicy(patience_s=0.0)
    with (
        Proxy(replicas.addresses[0]) as proxy,
        connect([proxy.address, replicas.addresses[1]], retry=at_once, allow_missing=True) as experts,
    ):
        x = torch.full((1 << 14, 4), 2.0**-14, requires_grad=True)
        y = experts["ffn.0"](x).sum()
        proxy.cut_after("answers", 100_000)  # in the middle of it: the gradients are gathered
        proxy.is_gone = True
        with pytest.raises(ServerUnavailableError):
            y.backward()
        replicas.restart([None, 0])
        wait_until(lambda: not is_lost(experts, replicas.addresses[1]))
        experts["ffn.0"](2 * X).sum().backward()
        RemoteOptimizer(experts).step()
        assert replicas.num_updates(0) == 1
        assert torch.equal(experts.state_dict()["ffn.0.weight"], replicas.weight(0) - 3 * LR)


def test_where_it_has_moved_back_those_that_were_to_be_forgotten_are_not_applied(replicas: Replicas) -> None:
    with connect(replicas.addresses, timeout_s=200.0, retry=PATIENT, allow_missing=True) as experts:
        optimizer = RemoteOptimizer(experts, on_failure="drop")
        experts["ffn.0"](X).sum().backward()
        replicas.stop()
        optimizer.zero_grad()
        assert [type(failure) for failure in optimizer.failures] == [ServerUnavailableError]
        replicas.restart([None, 0])
        wait_until(lambda: not is_lost(experts, replicas.addresses[1]))
        experts["ffn.0"](2 * X).sum().backward()
        replicas.restart([0, None])
        wait_until(lambda: not is_lost(experts, replicas.addresses[0]))
        optimizer.step()
        assert replicas.num_updates(0) == 0

        def has_forgotten() -> bool:  # grpc takes a moment to find out that a server is back
            optimizer.zero_grad()
            return optimizer.failures == []

        wait_until(has_forgotten)
        experts["ffn.0"](X).sum().backward()
        optimizer.step()
        assert torch.equal(experts.state_dict()["ffn.0.weight"], replicas.weight(0) - LR)
