"""Hosted experts that call others, on a server or offloaded: no gradient of a weight is lost without an error."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from experts_server import ExpertsServer
from experts_server.configuration.config import ExpertConfig, OptimizerConfig
from experts_server.hosting.building import build_module, build_training
from moe_autograd import parallel_apply
from moe_autograd.autograd.offload import OffloadedExperts
from moe_autograd.errors import ConfigError, ExpertFailedError
from moe_autograd.remote import RemoteExpert, RemoteExperts, RemoteOptimizer, connect
from tests.support.hosting import sgd
from tests.support.servers import tokens

D = 4
MEMORY = [{}, {"recompute": True}, {"split_backward": True}]


class Outer(nn.Module):
    """Calls another expert behind its own layer: a part of it, or one that it only knows."""

    def __init__(self, inner: Any, *, is_part: bool = True) -> None:
        super().__init__()
        self.layer = nn.Linear(D, D)
        self.known = [inner]
        if is_part:
            self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.known[0](self.layer(x))
        return result


class InMap(Outer):
    """Does so by a map of its own."""

    def forward(self, x: Tensor) -> Tensor:
        here, there = parallel_apply([nn.Identity(), self.known[0]], [(x,), (self.layer(x),)])
        result: Tensor = here + there
        return result


def offloaded(optimizer: Any = sgd) -> Any:
    return OffloadedExperts([nn.Linear(D, D)], optimizer, max_resident_bytes=10**6, store="ram")[0]


@pytest.fixture
def inner() -> Iterator[RemoteExperts]:
    with ExpertsServer({"inner": nn.Linear(D, D)}, optimizer=sgd) as server, connect(server.address) as there:
        yield there


@pytest.fixture(params=["remote", "offloaded"])
def trained(request: pytest.FixtureRequest) -> Any:
    return offloaded() if request.param == "offloaded" else request.getfixturevalue("inner")["inner"]


# ---- as a part


def test_a_part_that_is_trained_elsewhere_is_refused_by_name(trained: Any) -> None:
    with pytest.raises(
        ConfigError, match=r"expert 'outer': .* a part 'inner' that is on a server or offloaded"
    ):
        ExpertsServer({"outer": Outer(trained)}, optimizer=sgd)


@pytest.mark.parametrize("make", [nn.Sequential, lambda inner: inner], ids=["bare", "itself"])
def test_so_is_one_of_an_expert_without_weights_of_its_own(
    trained: Any, make: Callable[[nn.Module], nn.Module]
) -> None:
    with pytest.raises(ConfigError, match=r"whose weights would get no gradient\. Let clients call it"):
        ExpertsServer({"outer": make(trained)}, optimizer=sgd)


def makes_offloaded() -> nn.Module:
    return Outer(offloaded())


def test_so_is_one_of_an_expert_from_a_configuration() -> None:
    config = ExpertConfig(**{"class": f"{__name__}:makes_offloaded"})
    module = build_module("e", config, seed=0)
    assert build_training("e", module, None, "on_step") is None
    with pytest.raises(ConfigError, match=r"config, expert 'e': .* a part 'inner'"):
        build_training("e", module, OptimizerConfig(name="sgd"), "on_step")


# ---- as it turns out in a call


@pytest.mark.parametrize("memory", MEMORY, ids=str)
@pytest.mark.parametrize("outer", [Outer, InMap])
@pytest.mark.parametrize("wants_input_grad", [False, True])
def test_a_call_of_one_that_is_no_part_is_refused_each_time(
    trained: Any, outer: type[Outer], memory: dict[str, Any], wants_input_grad: bool
) -> None:
    module = outer(trained, is_part=False)
    server = ExpertsServer({"outer": module}, optimizer=sgd, config={"memory": memory})
    with server, connect(server.address) as outers:
        for _ in range(2):
            with pytest.raises(ExpertFailedError, match=r"expert 'outer'.* would get no gradient"):
                outers["outer"](tokens(3, D).requires_grad_(wants_input_grad))
        assert server._server is not None
        assert len(server._server.registry["outer"].hosted.kept._store) == 0
        with torch.no_grad():
            torch.testing.assert_close(outers["outer"](tokens(3, D)), module(tokens(3, D)))


# ---- what loses nothing


def as_in_torch(outers: RemoteExperts, module: Outer, inner: nn.Module) -> None:
    """Compare two updates with those of plain modules; the inner one is frozen."""
    plain = nn.Sequential(nn.Linear(D, D), inner)
    plain[0].load_state_dict(module.layer.state_dict())
    optimizer, remote = sgd(plain[0].parameters()), RemoteOptimizer(outers)
    for seed in range(2):
        xs = [tokens(3, D, seed=seed).requires_grad_() for _ in range(2)]
        optimizer.zero_grad()
        remote.zero_grad()
        for x, model in zip(xs, (plain, outers["outer"]), strict=True):
            model(x).square().sum().backward()
        optimizer.step()
        remote.step()
        torch.testing.assert_close(xs[1].grad, xs[0].grad)
    torch.testing.assert_close(module.layer.state_dict(), plain[0].state_dict())


def copy_of(inner: Any) -> nn.Linear:
    copy = nn.Linear(D, D).requires_grad_(False)
    state = inner.state_dict() if isinstance(inner, RemoteExpert) else inner._owner.state_dict(0)
    copy.load_state_dict(state)
    return copy


@pytest.mark.parametrize("memory", MEMORY, ids=str)
@pytest.mark.parametrize("is_part", [True, False])
def test_a_frozen_one_is_called_as_in_torch(trained: Any, memory: dict[str, Any], is_part: bool) -> None:
    trained.requires_grad_(False)
    module = Outer(trained, is_part=is_part)
    server = ExpertsServer({"outer": module}, optimizer=sgd, config={"memory": memory})
    with server, connect(server.address) as outers:
        as_in_torch(outers, module, copy_of(trained))


def test_one_that_is_trained_nowhere_is_called_as_in_torch() -> None:
    inner = offloaded(None)
    module = Outer(inner)
    with ExpertsServer({"outer": module}, optimizer=sgd) as server, connect(server.address) as outers:
        as_in_torch(outers, module, copy_of(inner))


def test_an_expert_that_is_not_trained_itself_may_call_one_that_is(trained: Any) -> None:
    module = Outer(trained)
    with ExpertsServer({"outer": module}) as server, connect(server.address) as outers:
        x, own = (tokens(3, D).requires_grad_() for _ in range(2))
        outers["outer"](x).square().sum().backward()
        module.requires_grad_(False)(own).square().sum().backward()
        torch.testing.assert_close(x.grad, own.grad)


def test_an_offloaded_expert_may_call_a_frozen_one(trained: Any) -> None:
    frozen = trained.requires_grad_(False)
    inner_before = copy_of(frozen).state_dict()
    outers = OffloadedExperts([Outer(frozen, is_part=False)], sgd, max_resident_bytes=10**6, store="ram")
    before = outers.state_dict(0)["layer.weight"].clone()
    outers[0](tokens(3, D)).sum().backward()
    outers.step()
    assert not torch.equal(outers.state_dict(0)["layer.weight"], before)
    torch.testing.assert_close(copy_of(frozen).state_dict(), inner_before, rtol=0, atol=0)
