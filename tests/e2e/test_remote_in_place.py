"""Experts on servers may change their inputs in place, as they may here; their gradients are those of what came."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from experts_server import ExpertsServer
from experts_server.configuration.config import LimitsConfig, MemoryConfig, ServingConfig
from moe_autograd import parallel_apply
from moe_autograd.errors import ExpertFailedError
from moe_autograd.remote import RemoteOptimizer, connect
from tests.support.hosting import LR, sgd


class AddsOne(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.add_(1))


class ChangesTheSecond(AddsOne):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.linear(x) * y.mul_(2)


class ChangesWhatItNeeds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        z = y.square()
        y.add_(1)
        return z


MODULES = {
    "adds": AddsOne,
    "silu": lambda: nn.Sequential(nn.SiLU(inplace=True), nn.Linear(4, 4)),
    "second": ChangesTheSecond,
}
CONFIGS = {
    "kept": ServingConfig(),
    "let go": ServingConfig(limits=LimitsConfig(kept_forward_bytes=1)),
    "recomputed": ServingConfig(memory=MemoryConfig(recompute=True)),
}


@pytest.mark.parametrize("is_updated", [False, True])
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("name", MODULES)
@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_an_expert_that_changes_its_input(config, name: str, requires_grad: bool, is_updated: bool) -> None:
    torch.manual_seed(0)
    module = MODULES[name]()
    twin = copy.deepcopy(module)
    with (
        ExpertsServer({"e": module}, optimizer=sgd, config=config) as server,
        connect(server.address) as experts,
    ):
        for _ in range(2):  # it is known to change them, the second time
            given = [torch.randn(3, 4) for _ in range(2 if name == "second" else 1)]
            theirs = [x.clone().requires_grad_(requires_grad) for x in given]
            ours = [x.clone().requires_grad_(requires_grad) for x in given]
            before = experts["e"].state_dict()
            y = experts["e"](*theirs)
            expected = twin(*(x * 1 for x in ours))
            torch.testing.assert_close(y, expected)
            if is_updated:  # by weights that are the same: the server has no graph after it
                experts["e"].load_state_dict(before)
            twin.zero_grad()
            RemoteOptimizer(experts).zero_grad()
            y.square().sum().backward()
            expected.square().sum().backward()
            RemoteOptimizer(experts).step()
            torch.testing.assert_close([x.grad for x in theirs], [x.grad for x in ours])
            for key, parameter in twin.named_parameters():
                torch.testing.assert_close(module.state_dict()[key], parameter - LR * parameter.grad)
            twin.load_state_dict(module.state_dict())


def test_its_masks_are_those_of_the_forward_where_that_was_begun_twice() -> None:
    module = nn.Sequential(nn.Dropout(0.5, inplace=True), nn.Identity())
    config = ServingConfig(limits=LimitsConfig(kept_forward_bytes=1))
    with ExpertsServer({"e": module}, config=config) as server, connect(server.address) as experts:
        for _ in range(2):
            x = torch.ones(50, 4, requires_grad=True)
            y = experts["e"](x)
            y.sum().backward()
            torch.testing.assert_close(x.grad, y.detach())


def test_a_change_of_what_the_backward_needs_raises_as_in_torch() -> None:
    module = ChangesWhatItNeeds()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        copy.deepcopy(module)(torch.ones(3, 4)).sum().backward()
    with ExpertsServer({"e": module}) as server, connect(server.address) as experts:
        for _ in range(2):  # its graph is weighed, the first time
            y = experts["e"](torch.ones(3, 4, requires_grad=True))
            with pytest.raises(ExpertFailedError, match="modified by an inplace operation"):
                y.sum().backward()


def test_results_that_came_together_have_memory_of_their_own():
    modules = {f"e.{index}": nn.Linear(4, 4) for index in range(8)}
    with ExpertsServer(modules) as server, connect(server.address) as experts:
        with torch.no_grad():
            outputs = parallel_apply(list(experts.values()), [(torch.ones(3, 4),)] * 8)
        inputs = [torch.ones(3, 4, requires_grad=True) for _ in range(8)]
        sum(y.sum() for y in parallel_apply(list(experts.values()), [(x,) for x in inputs])).backward()
    for results in (outputs, [x.grad for x in inputs]):
        others = [result.clone() for result in results[1:]]
        assert [result.untyped_storage().nbytes() for result in results] == [48] * 8
        results[0].resize_(8, 4)[3:].zero_()
        torch.testing.assert_close(results[1:], others, rtol=0, atol=0)
