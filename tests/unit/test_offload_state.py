"""What optimizers of offloaded experts keep in their state comes back from a checkpoint, or is refused by it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe_autograd.autograd.offload import OffloadedExperts
from moe_autograd.errors import CheckpointError
from tests.support.offload_checkpoints import assert_equal, states, train


class CountsForAll(torch.optim.Optimizer):
    """Makes smaller steps each time; what it counts belongs to no parameter."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        count = self.state.setdefault("count", {"steps": 0, "rates": [], "name": "mine", "last": None})
        count["steps"] += 1
        count["rates"].append(0.1 / count["steps"])
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(parameter.grad, alpha=count["rates"][-1])


def build(make: Callable[[Any], torch.optim.Optimizer], folder: Path, limit: int = 900) -> OffloadedExperts:
    torch.manual_seed(0)
    experts = [nn.Linear(8, 8) for _ in range(3)]
    return OffloadedExperts(experts, make, max_resident_bytes=limit, store=folder)


def stopped_and_straight(
    make: Callable[[Any], torch.optim.Optimizer], folder: Path
) -> tuple[list[dict[str, Tensor]], ...]:
    """Return the weights after five steps, once with a checkpoint and other experts in between."""
    with build(make, folder / "straight") as straight:
        train(straight, range(5))
        want = states(straight)
    with build(make, folder / "stopped") as first:
        train(first, range(3))
        first.checkpoint()
    with build(make, folder / "stopped") as second:
        second.restore()
        train(second, range(3, 5))
        return states(second), want


def test_state_that_belongs_to_no_parameter_comes_back(tmp_path: Path) -> None:
    """It had been dropped, and training went on with other numbers."""
    assert_equal(*stopped_and_straight(CountsForAll, tmp_path))


def test_going_back_forgets_state_of_no_parameter_that_came_later(tmp_path: Path) -> None:
    with build(CountsForAll, tmp_path) as experts:
        experts.checkpoint()
        train(experts, range(2))
        experts.restore()
        assert not any(optimizer.state for optimizer in experts.optimizers)


def test_a_checkpoint_of_before_has_no_state_of_no_parameter(tmp_path: Path) -> None:
    with build(CountsForAll, tmp_path) as experts:
        manifest = experts.checkpoint() / "manifest.json"
        manifest.write_text(manifest.read_text().replace("of_all", "unknown"))
        experts.restore()
        train(experts, range(1))


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("mean", torch.ones(2), r"got Tensor with tensors in it \(key='mean'\)"),
        ("means", {"of": [torch.ones(2)]}, r"got dict with tensors in it \(key='means'\)"),
        ("rates", {1: 0.5}, r"got dict \(key='rates'\)"),
        ("seen", {"a"}, r"got set \(key='seen'\)"),
        (0, 0.5, r"got float \(key=0\)"),
        (nn.Parameter(torch.ones(2)), {"step": 1}, r"got dict \(key=Param.*\)"),
    ],
    ids=[
        "tensor",
        "tensors in a list",
        "a number as a key",
        "a set",
        "under a number",
        "of another parameter",
    ],
)
def test_state_of_no_parameter_that_a_checkpoint_cannot_hold_is_refused_before_anything_is_saved(
    tmp_path: Path, key: Any, value: Any, text: str
) -> None:
    with build(CountsForAll, tmp_path) as experts:
        experts.optimizers[1].state[key] = value
        train(experts, range(1))
        with pytest.raises(CheckpointError, match=rf"expert-00001\.optimizer: expected .* {text}"):
            experts.checkpoint()
        assert not list(tmp_path.glob("checkpoint-*"))
