"""Training and evaluation: what each client asks for, and parts of an expert that have a mode of their own."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from experts_server import ExpertsServer
from experts_server.configuration.settings import load_config
from experts_server.serving.configured import from_config
from moe_autograd.remote import connect

D = 4


class FrozenNorm(nn.Module):
    """Its batch norm evaluates while the rest trains; and in it is a part that trains all the same."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)
        self.norm = nn.BatchNorm1d(D)
        self.norm.noise = nn.Dropout(0.0)
        self.norm.eval()
        self.norm.noise.train()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm.noise(self.norm(self.linear(x)))
        return y


def modes(module: nn.Module) -> list[bool]:
    return [part.training for part in module.modules()]


def test_a_part_that_evaluates_by_itself_does_so_for_all_whoever_evaluates_between() -> None:
    module = FrozenNorm()
    module.norm.running_mean.fill_(0.5)
    twin, x = copy.deepcopy(module), torch.randn(5, D)
    with (
        ExpertsServer({"e": module}) as server,
        connect(server.address) as one,
        connect(server.address) as other,
    ):
        torch.testing.assert_close(one["e"](x), twin(x), rtol=0, atol=0)
        other["e"].eval()
        torch.testing.assert_close(other["e"](x), copy.deepcopy(twin).eval()(x), rtol=0, atol=0)
        assert modes(module) == [False] * 4
        torch.testing.assert_close(one["e"](x), twin(x), rtol=0, atol=0)
        assert modes(module) == modes(twin) == [True, True, False, True]


def test_a_mode_that_is_chosen_while_it_is_hosted_stays_as_well() -> None:
    module = nn.Sequential(nn.Linear(D, D), nn.BatchNorm1d(D))
    x = torch.randn(5, D)
    with ExpertsServer({"e": module}) as server, connect(server.address) as experts:
        experts["e"](x)
        module[1].eval()
        experts["e"].eval()(x)
        twin = copy.deepcopy(module).train()
        twin[1].eval()
        torch.testing.assert_close(experts["e"].train()(x), twin(x), rtol=0, atol=0)


def test_a_part_that_two_hold_has_its_own_mode_again() -> None:
    norm = nn.BatchNorm1d(D)
    module = nn.Sequential(norm, nn.Sequential(nn.Linear(D, D), norm).eval())
    norm.train()
    before = modes(module)
    with (
        ExpertsServer({"e": module}) as server,
        connect(server.address) as one,
        connect(server.address) as other,
    ):
        one["e"](torch.randn(5, D))
        other["e"].eval()(torch.randn(5, D))
        one["e"](torch.randn(5, D))
        assert modes(module) == before == [True, True, False, False]


def test_what_evaluates_once_it_is_built_does_so_in_a_server_of_a_configuration() -> None:
    settings = {"experts": {"e": {"class": "tests.server.test_modes:FrozenNorm"}}}
    server = from_config(load_config(flags=settings, environment={}))
    assert modes(server.registry["e"].hosted.module) == [True, True, False, True]
    server.pool.close(10)
