"""What optimizers keep in ways of their own comes back after a restart as it was, or saving is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from experts_server.checkpoints.snapshot import take
from experts_server.hosting.hosted import HostedExpert
from experts_server.hosting.training import Training
from moe_autograd.errors import CheckpointError
from tests.server.test_training import Client, D, hosted, restarted
from tests.support.servers import tokens

Make = Callable[[Any], torch.optim.Optimizer]


def training(make: Make) -> Callable[[nn.Module], Training]:
    return lambda module: Training(make(list(module.parameters())))


def train(client: Client, steps: range) -> None:
    for step in steps:
        client.update("zero_grad")
        client.backward(tokens(4, D, seed=step), tokens(4, D, seed=9))
        client.update("step")


def trained(make: Make, restart_in: Path | None) -> dict[str, Tensor]:
    """Return the weights after six steps, with a restart after the third one or without."""
    client = Client(hosted(training(make)))
    train(client, range(3))
    if restart_in is not None:
        client.expert = restarted(client.expert, training(make), restart_in)
    train(client, range(3, 6))
    return client.expert.module.state_dict()


def assert_goes_on(make: Make, folder: Path) -> None:
    torch.testing.assert_close(trained(make, folder), trained(make, None), rtol=0, atol=0)


def optimizer_of(expert: HostedExpert) -> torch.optim.Optimizer:
    assert expert.training is not None
    return expert.training.optimizer


class Slowing(torch.optim.Optimizer):
    """Makes smaller steps each time; subclasses say where the number of steps is."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.count: Any = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.count += 1
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(parameter.grad, alpha=0.1 / self.counted(parameter))

    def counted(self, parameter: Tensor) -> float:
        return float(self.count)


class SaysItsCount(Slowing):
    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.count = state_dict.get("count", 0)
        super().load_state_dict({key: state_dict[key] for key in ("state", "param_groups")})


def says_its_count_by_hooks(parameters: Any) -> torch.optim.Optimizer:
    def load(optimizer: Any, said: dict[str, Any]) -> None:
        optimizer.count = said.get("count", 0)

    optimizer = Slowing(parameters)
    optimizer.register_state_dict_post_hook(lambda one, said: {**said, "count": getattr(one, "count")})  # noqa: B009
    optimizer.register_load_state_dict_pre_hook(load)
    return optimizer


@pytest.mark.parametrize("make", [SaysItsCount, says_its_count_by_hooks], ids=["override", "hooks"])
def test_what_an_optimizer_adds_to_its_state_dict_outlives_a_restart(make: Make, tmp_path: Path) -> None:
    """It was dropped, and training went on as if it had just begun."""
    assert_goes_on(make, tmp_path)


@pytest.mark.parametrize(
    ("value", "kind"),
    [(torch.ones(2), "Tensor"), ((1, (2, 3)), "tuple"), ({1: 0.5}, "dict"), ((1, 2), "tuple")],
    ids=["tensor", "nested tuple", "number as a key", "tuple"],
)
def test_what_a_state_dict_has_that_json_does_not_give_back_is_refused_by_name(value: Any, kind: str) -> None:
    expert = hosted(training(SaysItsCount))
    vars(optimizer_of(expert))["count"] = value
    said = rf"expert 'e', optimizer, 'count' of its state_dict: expected a value that JSON gives back, got {kind}\."
    with pytest.raises(CheckpointError, match=said):
        take(expert)


class OfAnotherKind(Slowing):
    def state_dict(self) -> dict[str, Any]:
        return {"inner": super().state_dict()}


def test_a_state_dict_that_is_not_as_torch_has_it_is_refused_by_name() -> None:
    """The error was `'state'`."""
    with pytest.raises(CheckpointError, match="its state_dict: expected 'state' and 'param_groups' in it"):
        take(hosted(training(OfAnotherKind)))


class Aging(Slowing):
    """Counts in a tuple for each weight."""

    def counted(self, parameter: Tensor) -> float:
        state = self.state[parameter]
        before = state.get("steps", ())
        state["steps"] = (*before, 1.0) if isinstance(before, tuple) else (1.0,)
        return float(len(state["steps"]))


class Sharing(Slowing):
    """Counts for all weights in one tensor, which is in the state of each."""

    dtype, shape = torch.float32, ()

    def counted(self, parameter: Tensor) -> float:
        first = self.param_groups[0]["params"][0]
        shared = self.state[first].setdefault("count", torch.zeros(self.shape, dtype=self.dtype))
        own = self.state[parameter].setdefault("count", shared)
        if parameter is first:
            own += 1
        return float(own.max())


class SharingIntegers(Sharing):
    dtype = torch.int64


class SharingDoubles(Sharing):
    """Of a dtype that `load_state_dict` casts, and of the shape of a bias."""

    dtype, shape = torch.float64, (D,)


@pytest.mark.parametrize("make", [Aging, Sharing, SharingIntegers, SharingDoubles])
def test_state_is_of_the_same_kind_after_a_restart(make: Make, tmp_path: Path) -> None:
    """A tuple came back as a list, and one tensor in several places as one for each."""
    assert_goes_on(make, tmp_path)


def test_a_tensor_in_several_places_is_one_of_the_checkpoint_and_one_after_a_restart(tmp_path: Path) -> None:
    client = Client(hosted(training(SharingDoubles)))
    train(client, range(1))
    assert [name for name in take(client.expert).tensors if name.endswith(".count")] == ["optimizer.0.count"]
    for _ in range(2):
        client.expert = restarted(client.expert, training(SharingDoubles), tmp_path)
        counts = [state["count"] for state in optimizer_of(client.expert).state.values()]
        assert len(counts) > 1
        assert len(set(map(id, counts))) == 1
        assert counts[0].dtype == torch.float64


class InParts(Slowing):
    """Counts in a part of a tensor, of which it keeps another part, and all of it if it is told to."""

    keeps_all = False

    def counted(self, parameter: Tensor) -> float:
        state = self.state[parameter]
        if not state:
            counts = torch.zeros(*parameter.shape, 2)
            state["twice"], state["once"] = counts.unbind(-1)
            state |= {"counts": counts} if self.keeps_all else {}
        state["once"].add_(1)
        state["twice"].add_(2)
        return float(state["twice"].max()) / 2


class InPartsOfOne(InParts):
    keeps_all = True


def test_parts_of_a_tensor_that_are_apart_outlive_a_restart(tmp_path: Path) -> None:
    assert_goes_on(InParts, tmp_path)


def test_state_that_is_in_the_memory_of_other_state_is_refused_by_name() -> None:
    """It was one of its own after a restart, and what was written to it reached the other no more."""
    client = Client(hosted(training(InPartsOfOne)))
    train(client, range(1))
    said = "expert 'e', optimizer, state 'counts': expected a tensor that has no memory of another one, got Tensor"
    with pytest.raises(CheckpointError, match=said):
        take(client.expert)


class UnderANumber(Slowing):
    """Its state came back under "0", and it began anew."""

    def counted(self, parameter: Tensor) -> float:
        self.state[parameter][0] = self.state[parameter].get(0, 0) + 1
        return float(self.state[parameter][0])


def test_state_under_a_key_that_is_no_text_is_refused_by_name() -> None:
    client = Client(hosted(training(UnderANumber)))
    train(client, range(1))
    with pytest.raises(
        CheckpointError, match="expert 'e', optimizer, state 0: expected a text as its key, got int"
    ):
        take(client.expert)


# ---- what is set in groups


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
    with pytest.raises(CheckpointError, match="optimizer, group 'lr': expected a tensor for each group, or"):
        take(expert)


def test_an_array_in_a_group_is_refused_by_name() -> None:
    """The error was of numpy's: whether it has changed, it does not say in one word."""

    def make(parameters: Any) -> torch.optim.Optimizer:
        optimizer = Slowing(parameters)
        optimizer.param_groups[0]["rates"] = numpy.ones(2)
        return optimizer

    said = "optimizer, group 'rates': expected a value that JSON gives back, got ndarray"
    with pytest.raises(CheckpointError, match=said):
        take(hosted(training(make)))
