"""A stage of a zero-bubble pipeline, whose backward is in two parts, trains experts whose weights are elsewhere."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

from experts_server import ExpertsServer
from moe_autograd import FeedForwardExpert, MixtureOfExperts, TopKRouter, parallel_apply
from moe_autograd.autograd import in_turn
from moe_autograd.autograd.offload import OffloadedExperts
from moe_autograd.remote import RemoteOptimizer, connect
from tests.support.functions_waiting import Meets

D, NUM_EXPERTS = 8, 4
sgd = partial(torch.optim.SGD, lr=0.5)

Backward = Callable[[nn.Module, Tensor, Tensor, Tensor], None]
Members = tuple[Sequence[nn.Module], Callable[[], object]]  # and what updates them


@pytest.fixture(autouse=True)
def nothing_is_small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_turn, "MOST_SMALL", -1)


def experts() -> list[nn.Module]:
    torch.manual_seed(1)
    return [FeedForwardExpert(D) for _ in range(NUM_EXPERTS)]


def train(
    members: Sequence[nn.Module], update: Callable[[], object], backward: Backward
) -> list[Tensor | None]:
    """Return gradients of two micro-batches, and what the stage computes when its experts have been updated."""
    torch.manual_seed(2)
    layer = MixtureOfExperts(TopKRouter(D, NUM_EXPERTS, 2), members)
    stage = nn.Sequential(nn.Linear(D, D), layer, nn.Linear(D, D))
    own = [p for name, p in stage.named_parameters() if "experts" not in name]
    xs = [torch.randn(6, D, requires_grad=True) for _ in range(2)]
    for x in xs:
        y = stage(x)
        backward(stage, x, y, torch.randn_like(y))
    update()
    return [*(tensor.grad for tensor in (*xs, *own)), stage(xs[0]).detach()]


def at_once(_: nn.Module, x: Tensor, y: Tensor, grad: Tensor) -> None:
    y.backward(grad)


def in_two_parts(stage: nn.Module, x: Tensor, y: Tensor, grad: Tensor) -> None:
    _, groups = stage_backward_input([y], [grad], [x], stage.parameters())
    stage_backward_weight(stage.parameters(), groups)


@pytest.fixture
def offloaded() -> Iterator[Members]:
    with OffloadedExperts(experts(), sgd, max_resident_bytes=1 << 20) as held:
        yield [*held], held.step


@pytest.fixture
def remote() -> Iterator[Members]:
    hosted = {f"e.{i}": expert for i, expert in enumerate(experts())}
    with ExpertsServer(hosted, optimizer=sgd) as server, connect(server.address) as found:
        yield [found[name] for name in hosted], RemoteOptimizer(found).step


@pytest.mark.parametrize("where", ["offloaded", "remote"])
def test_experts_elsewhere_are_trained_as_by_a_backward_in_one_part(
    where: str, request: pytest.FixtureRequest
) -> None:
    here = experts()
    expected = train(here, sgd([p for expert in here for p in expert.parameters()]).step, at_once)
    found = train(*request.getfixturevalue(where), in_two_parts)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


class Within(nn.Module):
    """Calls an expert, as one of a map's calls, which are all on threads of their own."""

    meeting = threading.Barrier(NUM_EXPERTS)

    def __init__(self, expert: nn.Module) -> None:
        super().__init__()
        self.linear, self.expert = nn.Linear(D, D), expert

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.expert(Meets.apply(torch.tanh(self.linear(x)), self.meeting))  # type: ignore[no-untyped-call]
        return y


@pytest.fixture(params=[False, True], ids=["on the CPU", "beside a device"])
def beside_a_device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let there be a device whose backward is on a thread of the engine; these tests compute on the CPU."""
    monkeypatch.setattr(
        torch.accelerator, "current_accelerator", lambda: torch.device("cuda") if request.param else None
    )
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: request.param)


@pytest.mark.usefixtures("beside_a_device")
@pytest.mark.parametrize("where", ["offloaded", "remote"])
def test_experts_within_calls_of_a_map_are_trained_too(
    where: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> None:
        raise AssertionError("expected nobody to look at what other threads execute")

    monkeypatch.setattr(sys, "_current_frames", refuse)

    def train_within(
        members: Sequence[nn.Module], update: Callable[[], object], backward: Backward
    ) -> Tensor:
        torch.manual_seed(2)
        stage = nn.ModuleList([Within(member) for member in members])
        x = torch.randn(6, D, requires_grad=True)
        y = torch.stack(parallel_apply([*stage], [(x.sin(),)] * NUM_EXPERTS))
        backward(nn.ModuleList([within.linear for within in stage.children()]), x, y, torch.randn_like(y))
        update()
        return torch.stack([member(x.detach()) for member in members]).detach()

    here = experts()
    expected = train_within(here, sgd([p for expert in here for p in expert.parameters()]).step, at_once)
    found = train_within(*request.getfixturevalue(where), in_two_parts)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.usefixtures("beside_a_device")
@pytest.mark.parametrize("where", ["offloaded", "remote"])
def test_another_threads_first_part_trains_nothing_of_this_one(
    where: str, request: pytest.FixtureRequest
) -> None:
    members, update = request.getfixturevalue(where)
    x = torch.randn(3, D, requires_grad=True)
    before = members[0](x).detach()
    loss = torch.stack(parallel_apply([Within(member) for member in members], [(x,)] * NUM_EXPERTS)).sum()

    class Meanwhile(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            other = threading.Thread(target=torch.autograd.grad, args=[loss, x])
            other.start()
            other.join()
            return grad

    elsewhere = torch.randn(3, D, requires_grad=True)
    y = Meanwhile.apply(elsewhere)  # type: ignore[no-untyped-call]
    stage_backward_input([y], [torch.ones_like(y)], [elsewhere], iter(()))
    update()
    torch.testing.assert_close(members[0](x).detach(), before, rtol=0, atol=0)


@pytest.mark.parametrize("where", ["offloaded", "remote"])
def test_gradients_of_inputs_alone_train_nothing_beside_a_schedule(
    where: str, request: pytest.FixtureRequest
) -> None:
    members, update = request.getfixturevalue(where)
    x = torch.randn(3, D, requires_grad=True)
    before = members[0](x).detach()
    torch.autograd.grad(members[0](x).sum(), x)
    update()
    torch.testing.assert_close(members[0](x).detach(), before, rtol=0, atol=0)


def test_a_backward_within_a_first_part_that_asks_for_inputs_alone_trains_nothing(offloaded: Members) -> None:
    members, update = offloaded
    x = torch.randn(3, D, requires_grad=True)
    before = members[0](x).detach()

    class Penalized(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            with torch.enable_grad():
                inner = torch.ones(3, D, requires_grad=True)
                (found,) = torch.autograd.grad(members[0](inner).sum(), inner)
            return grad * found

    y = Penalized.apply(x)  # type: ignore[no-untyped-call]
    stage_backward_input([y], [torch.ones_like(y)], [x], iter(()))
    update()
    torch.testing.assert_close(members[0](x).detach(), before, rtol=0, atol=0)
