"""A module that puts new parameters in the place of its own when it loads: those that are trained stay the same."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from experts_server import ExpertsServer
from moe_autograd.errors import CheckpointError
from moe_autograd.remote import RemoteOptimizer, connect
from tests.support.hosting import sgd

D = 4
NUM_STEPS = 4


class Assigning(nn.Module):
    """Assigns what it loads, as is usual for modules that were built on meta."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = linear()

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return y

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        return super().load_state_dict(state_dict, strict, assign=True)


class Making(Assigning):
    """Makes a part anew when it loads."""

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        self.linear = linear()
        return nn.Module.load_state_dict(self, state_dict, strict)


class Tied(Assigning):
    """Has one weight in two places, which are two once they were assigned."""

    def __init__(self) -> None:
        super().__init__()
        self.again = linear()
        self.again.weight = self.linear.weight

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.again(self.linear(x))
        return y


class Recurrent(Assigning):
    """Computes with a list of its weights, which follows what is set."""

    def __init__(self, kind: type[nn.RNNBase] = nn.LSTM) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = kind(D, D)  # type: ignore[assignment]

    def forward(self, x: Tensor) -> Tensor:
        y, _ = self.linear(x)
        assert isinstance(y, Tensor)
        return y


class Listed(Assigning):
    """Has parameters in a list and in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.list = nn.ParameterList([torch.eye(D), torch.ones(D)])
        self.dict = nn.ParameterDict({"scale": torch.ones(D)})

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = (self.linear(x) @ self.list[0] + self.list[1]) * self.dict["scale"]
        return y


class Normalized(Assigning):
    """Has a weight that is computed of parameters elsewhere."""

    def __init__(self) -> None:
        super().__init__()
        nn.utils.parametrizations.weight_norm(self.linear)


class Copying(nn.Linear):
    """Makes a weight of its own of one that is set."""

    def __setattr__(self, name: str, value: Any) -> None:
        is_weight = isinstance(value, nn.Parameter)
        super().__setattr__(name, nn.Parameter(value.detach().clone()) if is_weight else value)


class Copied(Assigning):
    def __init__(self) -> None:
        super().__init__()
        self.linear = Copying(D, D)


class Widening(Assigning):
    """Comes to a weight of another dtype, and to one less."""

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        self.linear.weight = nn.Parameter(self.linear.weight.double())
        self.linear.bias = None


MAKES: dict[str, Callable[[], nn.Module]] = {
    "assigning": Assigning,
    "making": Making,
    "tied": Tied,
    "LSTM": Recurrent,
    "GRU": lambda: Recurrent(nn.GRU),
    "RNN": lambda: Recurrent(nn.RNN),
    "list and dictionary": Listed,
    "parametrized": Normalized,
    "copied": Copied,
}


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(D, D)


def xs() -> list[Tensor]:
    return list(torch.randn(NUM_STEPS, 5, D, generator=torch.Generator().manual_seed(1)))


def trained_in_torch(module: nn.Module, num_times: int) -> dict[str, Tensor]:
    optimizer = sgd(module.parameters())
    for x in xs() * num_times:
        module(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return module.state_dict()


def trained_on_a_server(
    module: nn.Module, config: dict[str, Any], load: dict[str, Tensor] | None = None
) -> dict[str, Tensor]:
    with (
        ExpertsServer({"e": module}, optimizer=sgd, config=config) as server,
        connect(server.address) as experts,
    ):
        if load is not None:
            experts["e"].load_state_dict(load)
        optimizer = RemoteOptimizer(experts)
        for x in xs():
            experts["e"](x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        return dict(experts["e"].state_dict())


@pytest.mark.parametrize("is_offloaded", [False, True])
@pytest.mark.parametrize("name", MAKES)
def test_an_expert_that_assigns_what_it_loads_is_trained_and_starts_again(
    name: str, is_offloaded: bool, tmp_path: Path
) -> None:
    """The first start tries whether it loads: its optimizer had the weights from before."""
    config: dict[str, Any] = {"checkpoint_dir": tmp_path}
    if is_offloaded:
        config |= {"memory": {"offload": True, "recompute": True}, "offload": {"max_resident_bytes": 1 << 20}}
    make = MAKES[name]
    for num_times in (1, 2):
        found = trained_on_a_server(make(), config)
        torch.testing.assert_close(found, trained_in_torch(make(), num_times))


@pytest.mark.parametrize("name", MAKES)
def test_it_is_trained_after_a_client_has_loaded_weights(name: str) -> None:
    make = MAKES[name]
    module, start = make(), {key: value / 2 for key, value in make().state_dict().items()}
    parameters = list(module.parameters())
    found = trained_on_a_server(module, {}, start)
    assert all(a is b for a, b in zip(module.parameters(), parameters, strict=True))
    plain = make()
    nn.Module.load_state_dict(plain, start)  # copied
    torch.testing.assert_close(found, trained_in_torch(plain, 1))


def test_a_load_that_makes_other_parameters_is_refused_by_name(tmp_path: Path) -> None:
    text = (
        r"load what they have saved, got ValueError: a load that makes other parameters \('linear.weight' that became "
        r"\(4, 4\) float64, and was \(4, 4\) float32, 'linear.bias' that became none, and was \(4,\) float32\)\."
    )
    module = Widening()
    before = dict(module.named_parameters())
    with pytest.raises(CheckpointError, match=text):
        ExpertsServer({"e": module}, optimizer=sgd, config={"checkpoint_dir": tmp_path}).start()
    assert all(now is before[name] for name, now in module.named_parameters())
