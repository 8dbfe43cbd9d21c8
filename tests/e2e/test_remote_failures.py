"""Calls that fail may be left out of a pass: what the others give, forwards and backwards, stays right."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import nn

from experts_server import ExpertsServer
from moe_autograd.errors import ExpertFailedError
from moe_autograd.remote import RemoteOptimizer, connect

NUM_EXPERTS = 4


class Fragile(nn.Module):
    """A linear layer that raises in its forward, or in its backward, while it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.fails_in = ""

    def forward(self, x):
        if self.fails_in == "forward":
            raise ArithmeticError("told to")
        y = self.linear(x)
        if self.fails_in == "backward":
            y.register_hook(self._fail)
        return y

    def _fail(self, grad):
        raise ArithmeticError("told to")


@pytest.fixture(scope="module")
def modules():
    torch.manual_seed(0)
    return {f"ffn.{index}": Fragile() for index in range(NUM_EXPERTS)}


@pytest.fixture(scope="module")
def experts(modules):
    with (
        ExpertsServer(modules, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0)) as server,
        connect(server.address) as experts,
    ):
        yield experts


SUBSETS = [
    set(subset)
    for size in range(NUM_EXPERTS + 1)
    for subset in itertools.combinations(range(NUM_EXPERTS), size)
]


@pytest.mark.parametrize("phase", ["forward", "backward"])
@pytest.mark.parametrize("lost", SUBSETS, ids=str)
def test_every_subset_may_fail_in_either_pass(experts, modules, phase, lost):
    for index, module in enumerate(modules.values()):
        module.fails_in = phase if index in lost else ""
    xs = [torch.randn(3, 4, requires_grad=True) for _ in modules]
    failures = []
    outputs = experts.connection.call_together(
        list(experts.values()), [(x,) for x in xs], [{}] * NUM_EXPERTS, failures=failures
    )
    assert [y is None for y in outputs] == [
        phase == "forward" and index in lost for index in range(NUM_EXPERTS)
    ]
    if any(y is not None for y in outputs):
        sum(y.square().sum() for y in outputs if y is not None).backward()

    assert [(failure.index, failure.expert, failure.phase) for failure in failures] == [
        (index, f"ffn.{index}", phase) for index in sorted(lost)
    ]
    assert all(isinstance(failure.error, ExpertFailedError) for failure in failures)
    for index, (x, module) in enumerate(zip(xs, modules.values(), strict=True)):
        if index in lost:
            assert x.grad is None
        else:
            (expected,) = torch.autograd.grad(module.linear(x).square().sum(), x)
            torch.testing.assert_close(x.grad, expected)


def test_without_a_list_the_first_failure_is_raised(experts, modules):
    for module in modules.values():
        module.fails_in = "backward"
    xs = [(torch.randn(3, 4, requires_grad=True),) for _ in modules]
    outputs = experts.connection.call_together(list(experts.values()), xs, [{}] * NUM_EXPERTS)
    with pytest.raises(ExpertFailedError, match=r"expert 'ffn\.0' at .*backward") as raised:
        sum(y.sum() for y in outputs).backward()
    assert raised.value.__notes__ == [f"{NUM_EXPERTS - 1} more of the calls of this pass failed."]


def test_the_survivors_are_trained(experts, modules):
    for module in modules.values():
        module.fails_in = ""
    modules["ffn.1"].fails_in = "backward"
    RemoteOptimizer(experts).zero_grad()
    before = {name: info.num_updates for name, info in experts.info().items()}
    xs = [(torch.randn(3, 4),) for _ in modules]
    outputs = experts.connection.call_together(list(experts.values()), xs, [{}] * NUM_EXPERTS, failures=[])
    sum(y.sum() for y in outputs).backward()
    RemoteOptimizer(experts).step()
    gained = {name: info.num_updates - before[name] for name, info in experts.info().items()}
    assert gained == {"ffn.0": 1, "ffn.1": 0, "ffn.2": 1, "ffn.3": 1}
