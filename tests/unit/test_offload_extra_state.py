"""What experts say by `get_extra_state`: it is in copies and checkpoints, or refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe_autograd.autograd.offload import OffloadedExperts
from moe_autograd.errors import CheckpointError


class Counts(nn.Linear):
    """Knows how often it was called."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.state: Any = {"calls": 0}

    def forward(self, x: Tensor) -> Tensor:
        self.state["calls"] += 1
        return super().forward(x) * self.state["calls"]

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.state = state


class SumsUp(Counts):
    """Its extra state is computed from its weights."""

    def get_extra_state(self) -> Any:
        return {"sum": self.weight.sum().item(), **self.state}


class Rescales(Counts):
    """As its extra state is set, it computes one thing of its weights and changes them."""

    top = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) / self.top

    def set_extra_state(self, state: Any) -> None:
        super().set_extra_state({**state})
        self.top = self.weight.detach().abs().max().item()
        self.weight.data.mul_(2)
        self.bias.data = self.bias.data + 1


def build(folder: Path, part: Callable[[], nn.Module] = Counts) -> OffloadedExperts:
    experts = (nn.Sequential(nn.Linear(2, 2), part()) for _ in range(3))
    sgd = torch.optim.SGD
    return OffloadedExperts(experts, sgd, max_resident_bytes=2 * 2 * 6 * 4, store=folder)


def train(experts: OffloadedExperts) -> None:
    for expert in experts:
        expert(torch.ones(1, 2)).sum().backward()
    experts.step()


@pytest.mark.parametrize("part", [Counts, SumsUp])
def test_it_comes_back_with_the_weights(tmp_path: Path, part: type[nn.Module]) -> None:
    with build(tmp_path, part) as experts:
        train(experts)
        want = [experts.state_dict(i) for i in range(3)]
        assert want[0]["1._extra_state"]["calls"] == 1
        experts.checkpoint()
    with build(tmp_path, part) as experts:
        experts.restore()
        for i in range(3):
            got = experts.state_dict(i)
            assert got.pop("1._extra_state") == want[i].pop("1._extra_state")
            assert all(torch.equal(got[name], value) for name, value in want[i].items())


def test_parts_may_read_and_change_their_weights_as_it_is_set(tmp_path: Path) -> None:
    """They had read NaN, without an error."""
    with build(tmp_path, Rescales) as experts:
        plain = nn.Sequential(nn.Linear(2, 2), Rescales())
        train(experts)
        plain.load_state_dict(experts.state_dict(0))
        experts.checkpoint()
        experts.restore()
        assert torch.equal(experts[0](torch.ones(1, 2)), plain(torch.ones(1, 2)))
        assert torch.equal(experts.state_dict(0)["1.bias"], plain.state_dict()["1.bias"])


def test_tensors_in_it_are_copied_for_a_state_dict_and_refused_in_a_checkpoint(tmp_path: Path) -> None:
    with build(tmp_path) as experts:
        part = experts[1].stands_for.get_submodule("1")
        part.state = {"scale": torch.ones(2), "calls": 0}  # type: ignore[assignment]
        copied = experts.state_dict(1)["1._extra_state"]
        part.get_extra_state()["scale"].zero_()
        assert torch.equal(copied["scale"], torch.ones(2))
        with pytest.raises(
            CheckpointError, match=r"expert-00001: expected plain values from get_.*, got dict \(part='1'\)"
        ):
            experts.checkpoint()
        assert not [*tmp_path.glob("checkpoint-*")]


def test_a_checkpoint_without_it_is_refused_before_anything_changes(tmp_path: Path) -> None:
    with build(tmp_path, lambda: nn.Linear(2, 2)) as experts:
        experts.checkpoint()
    with build(tmp_path) as experts:
        before = experts.state_dict(0)
        with pytest.raises(
            CheckpointError, match=r"expected extra state of the parts \['1'\], got it of \[\]"
        ):
            experts.restore()
        assert torch.equal(experts.state_dict(0)["0.weight"], before["0.weight"])


class Saves(nn.Linear):
    """Saves how often it was called, as modules did before there was `get_extra_state`."""

    def __init__(self) -> None:
        super().__init__(2, 2)
        self.count = 1

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}count"] = torch.tensor(self.count)


def saves_by_a_hook() -> nn.Module:
    part = nn.Linear(2, 2)
    part.register_state_dict_post_hook(lambda module, state, prefix, _: state.update({f"{prefix}count": 1}))
    return part


@pytest.mark.parametrize("part", [Saves, saves_by_a_hook])
def test_what_modules_save_by_other_ways_is_refused(tmp_path: Path, part: Callable[[], nn.Module]) -> None:
    """A checkpoint had lacked it, without an error."""
    with build(tmp_path, part) as experts:
        train(experts)
        with pytest.raises(
            CheckpointError, match=r"expert-00000: expected state_dict\(\) with .* \(key='1\.count'\)"
        ):
            experts.checkpoint()
        assert not [*tmp_path.glob("checkpoint-*")]


def saves_tensors_by_other_names() -> nn.Module:
    def rename(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        state[f"{prefix}kernel"] = state.pop(f"{prefix}weight").t()
        state[f"{prefix}first"], state[f"{prefix}rest"] = state.pop(f"{prefix}bias").split(1)

    part = nn.Linear(2, 2)
    part.register_state_dict_post_hook(rename)
    return part


def test_parts_may_save_their_tensors_by_other_names(tmp_path: Path) -> None:
    with build(tmp_path, saves_tensors_by_other_names) as experts:
        train(experts)
        want = experts.state_dict(0)
        experts.checkpoint()
        train(experts)
        experts.restore()
        assert want.keys() >= {"1.kernel", "1.first", "1.rest"}
        assert all(torch.equal(value, want[name]) for name, value in experts.state_dict(0).items())


class SavesWithoutArguments(nn.Linear):
    """Its `state_dict` takes none of torch's arguments."""

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        return super().state_dict()


def looks_at_values_as_it_saves() -> nn.Module:
    def look(module: nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
        assert all(value.numpy().size for value in state.values())

    expert = nn.Linear(2, 2)
    expert.register_state_dict_post_hook(look)
    return expert


@pytest.mark.parametrize(
    "build_expert",
    [
        pytest.param(lambda: SavesWithoutArguments(2, 2), id="SavesWithoutArguments"),
        looks_at_values_as_it_saves,
    ],
)
def test_a_checkpoint_asks_for_what_modules_save_as_anybody_does(
    tmp_path: Path, build_expert: Callable[[], nn.Module]
) -> None:
    """It had asked for `keep_vars`, which some do not take, and values that require gradients."""
    experts = (build_expert() for _ in range(2))
    with OffloadedExperts(experts, torch.optim.SGD, max_resident_bytes=100, store=tmp_path) as offloaded:
        want = offloaded.state_dict(0)
        offloaded.checkpoint()
        train(offloaded)
        offloaded.restore()
        assert all(torch.equal(value, want[name]) for name, value in offloaded.state_dict(0).items())
