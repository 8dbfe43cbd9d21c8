"""Fused kernels know neither strides nor versions of tensors: the weights are those of a loop all the same."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from experts_server import ExpertsServer
from experts_server.budget import Budget
from experts_server.checkpoints.snapshot import restore, take
from experts_server.configuration.config import MemoryConfig, OffloadConfig, OptimizerConfig, ServingConfig
from experts_server.hosting.building import build_training
from experts_server.hosting.gradients import differentiate
from experts_server.hosting.hosted import HostedExpert, SharedMemory
from experts_server.hosting.kept import KeptForwards
from experts_server.hosting.training import Training
from moe_autograd import FeedForwardExpert, parallel_apply
from moe_autograd.remote import RemoteOptimizer, connect

D = 6


class Turned(nn.Module):
    """Its weight's gradient is laid out by columns."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, D))

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight.t().softmax(dim=1)).square()


class TurnedWeight(nn.Module):
    """Its weight itself is laid out by columns."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, D).t())

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.weight.softmax(dim=1).contiguous()).square()


class Shifted(nn.Module):
    """Its bias's gradient is one number in memory, for all values."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(64, D))

    def forward(self, x: Tensor) -> Tensor:
        return self.bias.sum() * x


class Image(nn.Module):
    """A convolution whose weight is laid out with its channels last."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 3).to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv(x)
        return y


def fused_adam(module: nn.Module) -> Training | None:
    return build_training("e", module, OptimizerConfig(name="adam", lr=0.1, args={"fused": True}), "on_step")


def configured(name: str) -> Callable[[nn.Module], Training | None]:
    return lambda module: build_training("e", module, OptimizerConfig(name=name, lr=0.1), "on_step")


@pytest.mark.parametrize(
    ("make", "shape"),
    [(Turned, (5, D)), (TurnedWeight, (5, D)), (Shifted, (5, D)), (Image, (2, 2, 5, 5))],
)
@pytest.mark.parametrize(
    "train", [configured("adam"), configured("sgd"), fused_adam], ids=["adam", "sgd", "asked for"]
)
def test_tensors_of_any_layout_are_trained_as_in_a_loop(
    make: Callable[[], nn.Module], shape: tuple[int, ...], train: Callable[[nn.Module], Training | None]
) -> None:
    torch.manual_seed(0)
    module = make()
    local = copy.deepcopy(module)
    training = train(module)
    assert training is not None
    expert = hosted(module, training)
    plain = type(training.optimizer)(local.parameters(), lr=0.1, foreach=False)
    for number in range(1, 6):
        x = torch.randn(shape)
        train_once(expert, x, number)
        plain.zero_grad()
        local(x).sum().backward()
        plain.step()
        if number == 3:
            module = make()
            training = train(module)
            restarted = hosted(module, training)
            restore(restarted, take(expert))
            expert = restarted
    torch.testing.assert_close(module.state_dict(), local.state_dict())


def hosted(module: nn.Module, training: Training | None) -> HostedExpert:
    memory = SharedMemory(KeptForwards(1 << 20, 60), Budget(1 << 20, "gathered"), Budget(1 << 20, "replies"))
    return HostedExpert("e", module, training, memory)


def train_once(expert: HostedExpert, x: Tensor, number: int) -> None:
    trainer = expert.trainer
    assert trainer is not None
    y = expert.module(x)
    grads = differentiate([y], [torch.ones_like(y)], trainer.parameters, retain_graph=False)
    trainer.zero_grad(b"client")
    trainer.take_in(b"client", grads, len(x), number)
    trainer.step(b"client", None)


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam])
def test_offloaded_weights_are_kept_after_a_fused_step(make: Any) -> None:
    """Fused steps leave the versions of what they change as they were, and only what has changed is written."""
    torch.manual_seed(0)
    experts = {f"e.{i}": FeedForwardExpert(8, 16) for i in range(6)}
    local = copy.deepcopy(experts)
    optimizers = {name: make(module.parameters(), lr=0.1) for name, module in local.items()}
    config = ServingConfig(
        memory=MemoryConfig(recompute=True, offload=True), offload=OffloadConfig(max_resident_bytes=4600)
    )
    with (
        ExpertsServer(experts, optimizer=lambda ps: make(ps, lr=0.1, fused=True), config=config) as server,
        connect(server.address) as there,
    ):
        for _ in range(2):
            x = torch.randn(3, 8)
            RemoteOptimizer(there).zero_grad()
            torch.stack(parallel_apply([there[name] for name in there], [(x,)] * 6)).square().sum().backward()
            RemoteOptimizer(there).step()
            for name, module in local.items():
                optimizers[name].zero_grad()
                module(x).square().sum().backward()
                optimizers[name].step()
        got = there.state_dict()
    expected = {
        f"{name}.{key}": w for name, module in local.items() for key, w in module.state_dict().items()
    }
    torch.testing.assert_close(got, expected)
