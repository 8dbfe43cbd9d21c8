"""What optimizers of offloaded experts keep in their state, under whatever keys, comes back, or is refused by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
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


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("mean", torch.ones(2), r"got Tensor \(key='mean'\)"),
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


class SaysItsCount(torch.optim.SGD):
    """Has a count that nothing but its `state_dict` says."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.count = 0

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "count": self.count}


def says_its_count_by_a_hook(parameters: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    optimizer.register_state_dict_post_hook(lambda _, said: {**said, "count": 0})
    return optimizer


@pytest.mark.parametrize("make", [SaysItsCount, says_its_count_by_a_hook], ids=["override", "hook"])
def test_what_only_a_state_dict_of_its_own_says_is_refused_before_anything_is_saved(
    tmp_path: Path, make: Callable[[Any], torch.optim.Optimizer]
) -> None:
    """It had been dropped, and training went on with other numbers."""
    said = r"expert-00000\.optimizer: expected 'state' and 'param_groups' in its state_dict, got 'count', too"
    with build(make, tmp_path) as experts:
        train(experts, range(1))
        with pytest.raises(CheckpointError, match=said):
            experts.checkpoint()
        assert not list(tmp_path.glob("checkpoint-*"))


def keeping(*keys: Any) -> Callable[[Any], torch.optim.Optimizer]:
    """Return a class of optimizers that keep a mean of gradients under each of these keys."""

    class Keeping(torch.optim.Optimizer):
        def __init__(self, parameters: Any) -> None:
            super().__init__(parameters, {})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for parameter in self.param_groups[0]["params"]:
                for place, key in enumerate(keys):
                    mean = self.state[parameter].setdefault(key, torch.zeros_like(parameter))
                    mean.mul_(0.5).add_(parameter.grad, alpha=1.0 + place)
                    parameter.sub_(mean, alpha=0.01)

    return Keeping


KEYS = [["ema.grad"], ["%2E", ".", "%", "a.b", "a%2Eb"], ["ema", "ema.inner", "inner"]]


class Nested(nn.Module):
    """Has parameters whose names end alike."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleDict({"inner": nn.Linear(8, 8, bias=False), "ema": nn.Linear(8, 8, bias=False)})
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = (self.inner["ema"](x) + self.inner["inner"](x)).tanh() @ self.weight
        return y


def nested(make: Callable[[Any], torch.optim.Optimizer], folder: Path, limit: int) -> OffloadedExperts:
    torch.manual_seed(0)
    return OffloadedExperts([Nested() for _ in range(3)], make, max_resident_bytes=limit, store=folder)


def train_plain(plain: list[nn.Module], optimizers: list[torch.optim.Optimizer], step: int) -> None:
    """Make a step of `train` with plain modules."""
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step))
    for module, optimizer in zip(plain, optimizers, strict=True):
        module(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("keys", KEYS)
def test_keys_of_the_state_may_be_any_text(tmp_path: Path, keys: list[str]) -> None:
    """Those with a dot had come back empty, and the optimizer failed."""
    make, size = keeping(*keys), (2 + len(keys)) * 3 * 256
    torch.manual_seed(0)
    plain: list[nn.Module] = [Nested() for _ in range(3)]
    optimizers = [make(module.parameters()) for module in plain]
    with nested(make, tmp_path, size) as experts:
        for step in range(5):
            train(experts, range(step, step + 1))
            train_plain(plain, optimizers, step)
            experts.checkpoint()
            experts.restore()
        assert_equal(states(experts), [module.state_dict() for module in plain])
        assert experts.residency.peak_bytes <= size < experts.residency.known_bytes


class CountsOnce(torch.optim.Optimizer):
    """Has one tensor with the number of steps for all parameters, and two names for each one's mean."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        parameters = self.param_groups[0]["params"]
        count = self.state[parameters[0]].get("step", torch.zeros(()))
        count += 1
        for parameter in parameters:
            state = self.state[parameter]
            if not state:
                state["mean"] = state["trend"] = torch.zeros_like(parameter)
                state["step"] = count
            state["mean"].mul_(0.5)
            state["trend"].add_(parameter.grad)
            parameter.sub_(state["mean"], alpha=0.1 / state["step"].item())


@pytest.mark.parametrize("limit", [2400, 100_000])
def test_a_tensor_in_several_places_of_the_state_stays_one(tmp_path: Path, limit: int) -> None:
    """Each place had got a tensor of its own, and what was added up in one of them the others had not."""
    torch.manual_seed(0)
    plain: list[nn.Module] = [Nested() for _ in range(3)]
    optimizers = [CountsOnce(module.parameters()) for module in plain]
    with nested(CountsOnce, tmp_path, limit) as experts:
        for step in range(4):
            train(experts, range(step, step + 1))
            train_plain(plain, optimizers, step)
            if step == 1:
                experts.checkpoint()
                experts.restore()
        assert_equal(states(experts), [module.state_dict() for module in plain])
    with nested(CountsOnce, tmp_path, limit) as experts:
        experts.restore()
        train(experts, range(2, 4))
        assert_equal(states(experts), [module.state_dict() for module in plain])


def test_state_of_a_parameter_that_the_expert_has_not_is_refused(tmp_path: Path) -> None:
    with build(keeping("mean"), tmp_path) as experts:
        train(experts, range(1))
        path = experts.checkpoint() / "expert-00001.optimizer.safetensors"
        tensors = safetensors.torch.load_file(path)
        path.unlink()
        safetensors.torch.save_file({"mean.scale": tensors["mean.weight"]}, path)
        with pytest.raises(CheckpointError, match=r"tensors of weight, bias, got 'mean\.scale'"):
            experts.restore()


@pytest.mark.parametrize("key", [0, ("ema", 1), None])
def test_tensors_under_other_keys_train_and_cannot_be_saved(tmp_path: Path, key: Any) -> None:
    torch.manual_seed(0)
    plain = nn.Linear(8, 8)
    optimizer = keeping(key)(plain.parameters())
    with build(keeping(key), tmp_path) as experts:
        train(experts, range(3))
        for step in range(3):
            train_plain([plain], [optimizer], step)
        assert_equal([experts.state_dict(0)], [plain.state_dict()])
        with pytest.raises(CheckpointError, match=rf"got Tensor \(key={re.escape(repr(key))}\)"):
            experts.checkpoint()
        assert not list(tmp_path.glob("checkpoint-*"))
