"""What has changed in an optimizer's groups comes back after a restart, or saving is refused by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ChainedScheduler, ConstantLR, ExponentialLR, LRScheduler, SequentialLR

from experts_server.checkpoints.snapshot import take
from experts_server.hosting.training import Training
from moe_autograd.errors import CheckpointError
from tests.server.test_restarted_optimizers import (
    Make,
    Slowing,
    assert_goes_on,
    optimizer_of,
    train,
    training,
)
from tests.server.test_training import Client, hosted, restarted


def with_a_rate_halved_in_place(parameters: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.SGD(parameters, lr=torch.tensor(0.1))  # type: ignore[arg-type]
    optimizer.register_step_post_hook(lambda one, *_: one.param_groups[0]["lr"].mul_(0.5) and None)
    return optimizer


def with_betas_halved(parameters: Any) -> torch.optim.Optimizer:
    def halve(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        (group,) = optimizer.param_groups
        group["betas"] = tuple(beta / 2 for beta in group["betas"])

    betas = (torch.tensor(0.9), torch.tensor(0.99))
    optimizer = torch.optim.Adam(parameters, lr=0.1, betas=betas, foreach=False)  # type: ignore[arg-type]
    optimizer.register_step_post_hook(halve)
    return optimizer


class Best(torch.optim.SGD):
    """Has no best yet."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1, momentum=0.9)

    def step(self, closure: Any = None) -> None:
        super().step()
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter] |= {"best": float("nan"), "bests": [float("nan"), 1.0]}
        self.param_groups[0]["best"] = float("nan")


class Proximal(torch.optim.SGD):
    """Stays near the first weights, which it keeps in its group."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        (group,) = self.param_groups
        group["first"] = [parameter.detach().clone() for parameter in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        (group,) = self.param_groups
        for parameter, first in zip(group["params"], group["first"], strict=True):
            parameter.lerp_(first, 0.1)


@pytest.mark.parametrize("make", [with_a_rate_halved_in_place, with_betas_halved, Best, Proximal])
def test_numbers_and_tensors_in_groups_outlive_a_restart(make: Make, tmp_path: Path) -> None:
    """Saves were refused once a tensor had changed, or there was a NaN, or failed in words of torch's."""
    assert_goes_on(make, tmp_path)


class WarmingUp(Slowing):
    """Makes one step that is larger, and takes away what says so."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.param_groups[0]["first"] = True

    def counted(self, parameter: Tensor) -> float:
        return 0.1 if self.param_groups[0].pop("first", False) else 1.0


def test_what_an_optimizer_has_taken_out_of_its_group_is_not_there_after_a_restart(tmp_path: Path) -> None:
    """It was back, and the larger step was made again after each restart."""
    assert_goes_on(WarmingUp, tmp_path)


class Listing(Slowing):
    """Counts in lists of its group: one that it was built with, and one that comes later."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.param_groups[0] |= {"steps": [], "pair": (1.0,)}

    def counted(self, parameter: Tensor) -> float:
        (group,) = self.param_groups
        group["steps"].append(1.0)
        group.setdefault("later", []).append(1.0)
        group["pair"] += (1.0,)
        return float(len(group["steps"]) + len(group["later"]) + len(group["pair"]))


def test_lists_in_a_group_are_lists_after_a_restart_and_tuples_are_tuples(tmp_path: Path) -> None:
    """All were tuples, and no step was made any more."""
    assert_goes_on(Listing, tmp_path)


def test_a_rate_that_is_a_tensor_is_one_after_a_restart_and_one_that_is_none_is_not(tmp_path: Path) -> None:
    client = Client(hosted(training(with_a_rate_halved_in_place)))
    train(client, range(1))
    client.expert = restarted(client.expert, training(with_a_rate_halved_in_place), tmp_path)
    (group,) = optimizer_of(client.expert).param_groups
    torch.testing.assert_close(group["lr"], torch.tensor(0.05), rtol=0, atol=0)
    group["lr"] = 0.25
    client.expert = restarted(client.expert, training(with_a_rate_halved_in_place), tmp_path)
    (group,) = optimizer_of(client.expert).param_groups
    assert isinstance(group["lr"], float)
    assert group["lr"] == 0.25


def test_a_schedule_of_a_rate_that_is_a_tensor_goes_on_after_a_restart(tmp_path: Path) -> None:
    def scheduled(module: nn.Module) -> Training:
        optimizer = torch.optim.SGD(module.parameters(), lr=torch.tensor(0.1))  # type: ignore[arg-type]
        return Training(optimizer, schedule=torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))

    client, straight = Client(hosted(scheduled)), Client(hosted(scheduled))
    train(client, range(2))
    client.expert = restarted(client.expert, scheduled, tmp_path)
    train(client, range(2, 4))
    train(straight, range(4))
    got, want = (optimizer_of(one.expert).param_groups[0]["lr"] for one in (client, straight))
    torch.testing.assert_close(got, want, rtol=0, atol=0)
    got, want = (one.expert.module.state_dict() for one in (client, straight))
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def _one_after_the_other(optimizer: torch.optim.Optimizer, parts: list[LRScheduler]) -> LRScheduler:
    return SequentialLR(optimizer, parts, milestones=[2])


def _at_once(optimizer: torch.optim.Optimizer, parts: list[LRScheduler]) -> LRScheduler:
    return ChainedScheduler(parts)


@pytest.mark.parametrize("make", [_one_after_the_other, _at_once])
def test_a_schedule_of_schedules_goes_on_after_a_restart(
    tmp_path: Path, make: Callable[[torch.optim.Optimizer, list[LRScheduler]], LRScheduler]
) -> None:
    """Saves were refused, as it has the list of rates of a part; a chained one has no `last_epoch`, which was read."""

    def scheduled(module: nn.Module) -> Training:
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        parts: list[LRScheduler] = [ConstantLR(optimizer, total_iters=2), ExponentialLR(optimizer, 0.5)]
        return Training(optimizer, schedule=make(optimizer, parts))

    client, straight = Client(hosted(scheduled)), Client(hosted(scheduled))
    for step in range(5):
        train(client, range(step, step + 1))
        client.expert = restarted(client.expert, scheduled, tmp_path)
    train(straight, range(5))
    assert (
        optimizer_of(client.expert).param_groups[0]["lr"]
        == optimizer_of(straight.expert).param_groups[0]["lr"]
    )
    got, want = (one.expert.module.state_dict() for one in (client, straight))
    torch.testing.assert_close(got, want, rtol=0, atol=0)


def test_an_optimizer_that_has_come_to_more_groups_is_refused_by_name() -> None:
    """The error was `zip() argument 2 is shorter than argument 1`."""

    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters[:1], lr=0.1)

    expert = hosted(training(make))
    optimizer_of(expert).add_param_group({"params": list(expert.module.parameters())[1:]})
    said = (
        r"expert 'e', optimizer: expected 1 group\(s\) of parameters, as it was built with, got 2\. Build it"
    )
    with pytest.raises(CheckpointError, match=said):
        take(expert)


def test_a_tensor_that_has_changed_in_several_groups_at_once_is_refused_by_name() -> None:
    """It would be one for each after a restart, and a change in place of one of them reach no other."""

    def make(parameters: Any) -> torch.optim.Optimizer:
        groups = [{"params": parameters[:1]}, {"params": parameters[1:]}]
        return torch.optim.SGD(groups, lr=torch.tensor(0.1))  # type: ignore[arg-type]

    expert = hosted(training(make))
    take(expert)
    optimizer_of(expert).param_groups[0]["lr"].mul_(0.5)
    with pytest.raises(CheckpointError, match="optimizer, group 'lr': expected one for each group, or"):
        take(expert)


IN_TWO_PLACES: dict[str, Callable[[dict[str, Any], dict[str, Any]], None]] = {
    "a list": lambda one, other: _set_both(one, other, [1.0], lambda kept: kept),
    "a dictionary in a tuple": lambda one, other: _set_both(one, other, {"a": 1.0}, lambda kept: (1.0, kept)),
    "a part of a tensor": lambda one, other: _set_both(one, other, torch.ones(1), lambda kept: kept[0]),
    "a tensor twice in one": lambda one, _: one.update(kept=(torch.ones(()),) * 2),
}


def _set_both(one: dict[str, Any], other: dict[str, Any], kept: Any, place: Callable[[Any], Any]) -> None:
    one["kept"], other["kept"] = place(kept), place(kept)


@pytest.mark.parametrize("share", IN_TWO_PLACES.values(), ids=IN_TWO_PLACES)
def test_what_stands_in_two_places_of_groups_is_refused_by_name(
    share: Callable[[dict[str, Any], dict[str, Any]], None],
) -> None:
    """It would be one for each after a restart, where plain PyTorch keeps it one."""

    def make(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": parameters[:1]}, {"params": parameters[1:]}], lr=0.1)

    expert = hosted(training(make))
    share(*optimizer_of(expert).param_groups)
    said = "optimizer, group 'kept': expected one for each group, or one that stays as it was built"
    with pytest.raises(CheckpointError, match=said):
        take(expert)


@pytest.mark.parametrize("key", [1, True, None, 1.5, ("a", 1)], ids=str)
def test_a_key_of_a_group_that_is_no_text_is_refused_by_name(key: Any) -> None:
    """It came back as a text, or the save failed in words of JSON's."""
    expert = hosted(training(Slowing))
    (group,) = optimizer_of(expert).param_groups
    group[key] = 1.0
    said = rf"optimizer, group {re.escape(repr(key))}: expected a text as its key, got {type(key).__name__}\."
    with pytest.raises(CheckpointError, match=said):
        take(expert)


def test_a_key_that_is_no_text_and_was_taken_out_of_a_group_is_refused_by_name() -> None:
    def make(parameters: Any) -> torch.optim.Optimizer:
        optimizer = Slowing(parameters)
        optimizer.param_groups[0][("a", 1)] = 1.0
        return optimizer

    expert = hosted(training(make))
    take(expert)
    del optimizer_of(expert).param_groups[0][("a", 1)]
    with pytest.raises(CheckpointError, match=r"group \('a', 1\): expected a text as its key, got tuple"):
        take(expert)


ALIKE: list[tuple[Any, Any]] = [
    (1, True),
    (True, 1),
    (1, 1.0),
    (1.0, 1),
    (0.0, -0.0),
    (0.5, numpy.float64(0.5)),
    ([1, [2]], [True, [2]]),
    ([0.0], [-0.0]),
    ({"a": 1}, {"a": 1.0}),
    ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    ((3,), torch.Size([3])),
    (torch.tensor(0.0), torch.tensor(-0.0)),
    (torch.tensor(1), torch.tensor(1.0)),
    (Fraction(1, 2), 0.5),
]


@pytest.mark.parametrize(("built", "now"), ALIKE, ids=lambda value: repr(value))
def test_what_equals_what_was_built_and_is_not_the_same_comes_back_as_it_is(
    built: Any, now: Any, tmp_path: Path
) -> None:
    """It counted as unchanged, and was what had been built after a restart."""

    def make(parameters: Any) -> torch.optim.Optimizer:
        optimizer = Slowing(parameters)
        optimizer.param_groups[0]["kept"] = built
        return optimizer

    expert = hosted(training(make))
    optimizer_of(expert).param_groups[0]["kept"] = now
    again = restarted(expert, training(make), tmp_path)
    assert _told(optimizer_of(again).param_groups[0]["kept"]) == _told(now)


def _told(value: Any) -> str:
    """Return all of it; numpy's numbers are Python's after a restart."""
    return repr(float(value) if isinstance(value, numpy.float64) else value)


@pytest.mark.parametrize(
    "kept",
    [
        torch.tensor([float("nan"), -0.0]),
        torch.tensor(float("nan")),
        numpy.float32("nan"),
        Fraction(1, 2),
        1j,
    ],
    ids=lambda value: repr(value),
)
def test_what_a_checkpoint_cannot_hold_may_stay_in_a_group_as_it_was_built(kept: Any) -> None:
    """A tensor with a NaN never equals itself, and was refused."""

    def make(parameters: Any) -> torch.optim.Optimizer:
        optimizer = Slowing(parameters)
        optimizer.param_groups[0]["kept"] = kept
        return optimizer

    take(hosted(training(make)))


def test_an_array_in_a_group_is_refused_by_name() -> None:
    """The error was of numpy's: whether it has changed, it does not say in one word."""

    def make(parameters: Any) -> torch.optim.Optimizer:
        optimizer = Slowing(parameters)
        optimizer.param_groups[0]["rates"] = numpy.ones(2)
        return optimizer

    said = "optimizer, group 'rates': expected a value that JSON gives back, got ndarray"
    with pytest.raises(CheckpointError, match=said):
        take(hosted(training(make)))
