"""What optimizers keep in ways of their own comes back after a restart as it was, or saving is refused by name.

What is set in their groups is in `test_restarted_groups.py`.
"""

from __future__ import annotations

import collections
import enum
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

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


class Sizing(Slowing):
    """Keeps sizes, in state and in its group."""

    def counted(self, parameter: Tensor) -> float:
        size = self.state[parameter].setdefault("size", parameter.shape)
        return float(size.numel() + self.param_groups[0].setdefault("last", size).numel())


class LookingForState(Slowing):
    """Makes a larger step for a weight that has no state yet, and keeps an empty one."""

    def counted(self, parameter: Tensor) -> float:
        is_first = parameter not in self.state
        self.state[parameter]  # there from now on
        return 0.1 if is_first else 1.0


class OfNumpy(Slowing):
    def counted(self, parameter: Tensor) -> float:
        state = self.state[parameter]
        state["count"] = state.get("count", numpy.float64(0)) + numpy.float64(1)
        return float(state["count"])


@pytest.mark.parametrize(
    "make", [Aging, Sizing, LookingForState, OfNumpy, Sharing, SharingIntegers, SharingDoubles]
)
def test_state_is_of_the_same_kind_after_a_restart(make: Make, tmp_path: Path) -> None:
    """A tuple came back as a list, a size as a tuple, empty state not, and one tensor in several places as several."""
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


class InItsWeight(Slowing):
    """Keeps what it takes for a copy of its weight in single precision, which is the weight."""

    def counted(self, parameter: Tensor) -> float:
        self.state[parameter].setdefault("master", parameter.detach().float())
        return 1.0


class InItsGroup(Slowing):
    """Keeps a number of its group in its state, too."""

    def counted(self, parameter: Tensor) -> float:
        number = self.param_groups[0].setdefault("number", torch.zeros(()))
        self.state[parameter]["master"] = number.view(1)
        return float(number.add_(1))


@pytest.mark.parametrize(
    ("make", "key"), [(InPartsOfOne, "counts"), (InItsWeight, "master"), (InItsGroup, "master")]
)
def test_state_in_the_memory_of_other_state_a_weight_or_a_group_is_refused_by_name(
    make: Make, key: str
) -> None:
    """It was one of its own after a restart: what was written to it reached the other no more, and no weight moved."""
    client = Client(hosted(training(make)))
    train(client, range(1))
    said = f"expert 'e', optimizer, state '{key}': expected a tensor that has no memory of another one, got Tensor"
    with pytest.raises(CheckpointError, match=said):
        take(client.expert)


class Expanding(Slowing):
    """Has one number for all rows of a weight."""

    def counted(self, parameter: Tensor) -> float:
        state = self.state[parameter]
        counts: Tensor = state.setdefault("counts", torch.zeros(1).expand(len(parameter)))
        counts[:1].add_(1)
        return float(counts[-1])


def test_state_whose_elements_are_in_one_memory_is_refused_by_name() -> None:
    """Each had memory of its own after a restart: what was added to the first reached the last no more."""
    client = Client(hosted(training(Expanding)))
    train(client, range(1))
    said = "optimizer, state 'counts': expected a tensor whose elements each have memory of their own, got Tensor"
    with pytest.raises(CheckpointError, match=said):
        take(client.expert)


class Listing(Slowing):
    """Counts for all weights in one list, which is in the state of each, or in the group as well."""

    is_in_group = False

    def counted(self, parameter: Tensor) -> float:
        (group,) = self.param_groups
        counts: list[float]
        counts = self.state[group["params"][0]].setdefault("counts", [])
        if self.is_in_group:
            group["counts"] = counts
        else:
            self.state[parameter]["counts"] = counts
        counts.append(1.0)
        return float(len(counts))


class ListingInItsGroup(Listing):
    is_in_group = True


class ListingTwice(Slowing):
    """Has one dictionary in two places of one value."""

    def counted(self, parameter: Tensor) -> float:
        self.state[parameter]["counts"] = ({"a": 1.0},) * 2
        return 1.0


def test_a_list_in_the_state_of_several_weights_is_one_after_a_restart(tmp_path: Path) -> None:
    assert_goes_on(Listing, tmp_path)


@pytest.mark.parametrize("make", [ListingInItsGroup, ListingTwice])
def test_a_list_or_dictionary_of_state_that_stands_in_two_places_is_refused_by_name(make: Make) -> None:
    """There were two after a restart: what was appended to the one, the other did not have."""
    client = Client(hosted(training(make)))
    train(client, range(1))
    said = "optimizer, state 'counts': expected a list or dictionary in one place, got (list|tuple)"
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


class InOrder(Slowing):
    """Counts in a dictionary whose order is kept, as that of any other is by now."""

    def counted(self, parameter: Tensor) -> float:
        counts = self.state[parameter].setdefault("counts", collections.OrderedDict(one=0.0))
        counts["one"] += 1
        return float(counts["one"])


def test_an_ordered_dictionary_goes_on_as_a_plain_one(tmp_path: Path) -> None:
    assert_goes_on(InOrder, tmp_path)


class Mode(enum.StrEnum):
    FAST = "fast"


class Pair(NamedTuple):
    one: float
    other: float


@pytest.mark.parametrize(
    "value",
    [Pair(1.0, 2.0), collections.defaultdict(int, a=1), Mode.FAST, [Mode.FAST]],
    ids=lambda value: type(value).__name__,
)
@pytest.mark.parametrize("is_in_state", [True, False], ids=["state", "group"])
def test_what_would_come_back_as_of_another_class_is_refused_by_name(is_in_state: bool, value: Any) -> None:
    """It came back as a tuple, a dict or a text, and the steps after a restart raised, or were others."""
    expert = hosted(training(Slowing))
    optimizer = optimizer_of(expert)
    (group,) = optimizer.param_groups
    (optimizer.state[group["params"][0]] if is_in_state else group)["kept"] = value
    place = "state 'kept': expected a tensor, or" if is_in_state else "group 'kept': expected"
    said = f"optimizer, {place} a value that JSON gives back, got {type(value).__name__}"
    with pytest.raises(CheckpointError, match=said):
        take(expert)
