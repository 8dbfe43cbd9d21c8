"""Experts that torch has made of modules: scripted, traced, exported, compiled; and modules that nobody can call."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from experts_server import ExpertsServer
from experts_server.configuration.config import ExpertConfig
from experts_server.hosting.building import build_module
from moe_autograd.errors import ConfigError
from moe_autograd.remote import RemoteOptimizer, connect
from tests.support.hosting import sgd
from tests.support.servers import tokens

D = 4
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit")


class Own(nn.Module):
    """Has a forward of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(D, 2 * D), nn.Linear(2 * D, D)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


def exported(module: nn.Module) -> nn.Module:
    shapes = ({0: torch.export.Dim("num_tokens")},)
    return torch.export.export(module, (tokens(3, D),), dynamic_shapes=shapes).module()


MADE: dict[str, Callable[[], Any]] = {
    "scripted": lambda: torch.jit.script(Own()),
    "a scripted layer": lambda: torch.jit.script(nn.Linear(D, D)),
    "with a scripted layer": lambda: nn.Sequential(torch.jit.script(nn.Linear(D, D)), nn.ReLU()),
    "traced": lambda: torch.jit.trace(Own(), tokens(3, D)),
    "exported": lambda: exported(Own()),
    "compiled": lambda: torch.compile(Own(), backend="eager"),
}


def made(what: str) -> Any:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".torch.jit")
        return MADE[what]()


def train(expert: nn.Module, optimizer: Any, num_steps: int) -> list[Tensor]:
    """Return the inputs' gradients of each step, and what it computes in the end."""
    grads = []
    for step in range(num_steps):
        x = tokens(3, D, seed=step).requires_grad_()
        expert(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert x.grad is not None
        grads.append(x.grad)
    return [*grads, expert(tokens(5, D)).detach()]


@pytest.mark.parametrize("what", MADE)
def test_what_torch_makes_of_a_module_trains_as_it_does_alone_also_from_a_checkpoint(
    what: str, tmp_path: Path
) -> None:
    alone = made(what)
    own_optimizer = sgd(alone.parameters())
    for num_steps in (2, 1):  # the second server goes on
        expected = train(alone, own_optimizer, num_steps)
        server = ExpertsServer({"e": made(what)}, optimizer=sgd, config={"checkpoint_dir": tmp_path})
        with server, connect(server.address) as experts:
            got = train(experts["e"], RemoteOptimizer(experts), num_steps)
        torch.testing.assert_close(got, expected)


def test_what_is_frozen_is_refused_by_name() -> None:
    """It has no mode, which every call asks for."""
    frozen = torch.jit.freeze(torch.jit.script(Own()).eval())
    with pytest.raises(ConfigError, match=r"^expert 'e': .* got RecursiveScriptModule without a mode"):
        ExpertsServer({"e": frozen}).start()


def test_a_module_without_a_forward_is_refused_by_name_also_in_a_file() -> None:
    with pytest.raises(ConfigError, match=r"^expert 'e': expected a module with a forward, got ModuleList"):
        ExpertsServer({"e": nn.ModuleList([nn.Linear(D, D)])}).start()
    with pytest.raises(ConfigError, match=r"expert 'e', key 'class': expected a module with a forward, got"):
        build_module("e", ExpertConfig.model_validate({"class": "torch.nn:ModuleList"}), 0)


class CalledItself(nn.Module):
    def __call__(self, x: Tensor) -> Tensor:
        return x * 2


class GivenAForward(nn.ModuleList):
    def __init__(self) -> None:
        super().__init__()
        self.forward = lambda x: x * 2


@pytest.mark.parametrize("make", [CalledItself, GivenAForward])
def test_a_module_may_be_callable_in_other_ways(make: type[nn.Module]) -> None:
    with ExpertsServer({"e": make()}) as server, connect(server.address) as experts:
        torch.testing.assert_close(experts["e"](tokens(3, D)), tokens(3, D) * 2)
