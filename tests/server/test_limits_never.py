"""What never fits a limit is a mistake, told at once; what does not fit now waits its turn."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from experts_server import ExpertsServer
from experts_server.budget import Budget
from moe_autograd import parallel_apply
from moe_autograd.errors import InvalidCallError, RemoteError, ServerBusyError
from moe_autograd.remote import RemoteExperts, connect
from tests.support.servers import tokens

D = 4
LARGE = (1 << 17, D)  # 2 MiB, which comes in parts


@contextmanager
def experts_within(num_experts: int = 1, **limits: int) -> Iterator[RemoteExperts]:
    modules = {f"e.{index}": nn.Linear(D, D) for index in range(num_experts)}
    with (
        ExpertsServer(
            modules, optimizer=lambda p: torch.optim.SGD(p, lr=0.1), config={"limits": limits}
        ) as server,
        connect(server.address, timeout_s=10.0) as experts,
    ):
        yield experts


def call(experts: RemoteExperts, x: Tensor) -> Any:
    return parallel_apply(list(experts.values()), [(x,)] * len(experts))


@pytest.mark.parametrize(
    ("limit", "x"),
    [
        ("max_queued_bytes", tokens(100, D)),
        ("received_bytes", torch.ones(LARGE)),
        ("max_pass_bytes", torch.ones(LARGE)),
        ("gathered_gradient_bytes", tokens(3, D)),
    ],
)
def test_what_never_fits_is_refused_for_what_it_is(limit: str, x: Tensor) -> None:
    refused = pytest.raises(InvalidCallError, match=r"expected at most 50\b.*, got \d+.* raise the")
    with experts_within(**{limit: 50}) as experts, refused:
        experts["e.0"](x).sum().backward()


def test_gradients_that_never_fit_crowd_no_others_out() -> None:
    budget = Budget(100, "bytes")
    with pytest.raises(InvalidCallError, match="bytes: expected at most 100, got 101"):
        budget.take(101)
    assert not budget.reset_refused()
    budget.take(60)
    with pytest.raises(ServerBusyError, match="got 41 more than the 60 in use"):
        budget.take(41)
    assert budget.reset_refused()
    with pytest.raises(InvalidCallError, match="got 101"):
        budget.take(41, 101)


@pytest.mark.parametrize(
    ("limits", "x"),
    [
        ({"max_queued_bytes": 2000}, tokens(100, D)),
        ({"max_queued_calls": 1}, tokens(100, D)),
        ({"received_bytes": 2000}, tokens(100, D)),
        ({"received_bytes": 3 << 20}, torch.ones(LARGE)),
        ({"max_pass_bytes": 3 << 20}, torch.ones(LARGE)),
    ],
    ids=["queued-bytes", "queued-calls", "received-whole", "received-in-parts", "pass"],
)
def test_calls_of_a_pass_that_fit_one_by_one_are_all_made(limits: dict[str, int], x: Tensor) -> None:
    with experts_within(4, **limits) as experts:
        assert [y.shape for y in call(experts, x)] == [x.shape] * 4


@pytest.mark.parametrize("whose", ["server", "client"])
def test_a_limit_of_one_tensor_is_kept_by_a_pass_of_many(whose: str) -> None:
    """Small ones travel as one tensor of all their rows."""
    most, modules = 100 * D * 4, {f"e.{index}": nn.Linear(D, D) for index in range(6)}
    limits, own = ({"max_tensor_bytes": most}, {}) if whose == "server" else ({}, {"max_tensor_bytes": most})
    with (
        ExpertsServer(modules, config={"limits": limits}) as server,
        connect(server.address, **own) as experts,
    ):
        assert [y.shape for y in call(experts, tokens(100, D))] == [(100, D)] * 6
        with pytest.raises(RemoteError, match=rf"expected at most {most} bytes, got shape \(101, {D}\)"):
            call(experts, tokens(101, D))
