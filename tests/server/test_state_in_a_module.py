"""What an optimizer keeps in the memory of its module would be apart after a restart: saves refuse it by name."""

from __future__ import annotations

import contextlib
import inspect
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

from experts_server.checkpoints.snapshot import restore, take
from experts_server.hosting.training import Training
from moe_autograd.errors import CheckpointError
from tests.server.test_restarted_optimizers import Slowing, train
from tests.server.test_restarted_training import OPTIMIZERS
from tests.server.test_training import Client, hosted


def with_more(module: nn.Module) -> Training:
    """Train all but a weight that is frozen, beside which there are buffers."""
    module.register_buffer("counts", torch.zeros(4))
    module.register_buffer("passing", torch.zeros(4), persistent=False)
    module.get_parameter("up.weight").requires_grad_(False)
    return Training(Slowing([p for p in module.parameters() if p.requires_grad]))


PLACES: dict[str, Callable[[nn.Module], Tensor]] = {
    "a buffer": lambda module: module.get_buffer("counts"),
    "a part of one that is not saved": lambda module: module.get_buffer("passing")[2],
    "a frozen weight": lambda module: module.get_parameter("up.weight").detach(),
    "a column of a weight": lambda module: module.get_parameter("down.weight").detach()[:, 0],
    "a number of a weight": lambda module: module.get_parameter("down.weight").detach()[1, 0],
    "a weight": lambda module: module.get_parameter("down.weight"),
}


@pytest.mark.parametrize("is_in_state", [True, False], ids=["state", "group"])
@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES)
def test_what_an_optimizer_keeps_in_the_memory_of_its_module_is_refused_by_name(
    place: Callable[[nn.Module], Tensor], is_in_state: bool
) -> None:
    """Each had memory of its own after a restart: what was written to the one, the other did not have."""

    def make(module: nn.Module) -> Training:
        training = with_more(module)
        (group,) = training.optimizer.param_groups
        state = training.optimizer.state[group["params"][0]]
        (state if is_in_state else group)["kept"] = place(module) if is_in_state else [place(module)]
        return training

    of_group = "(tensor that has no memory of a weight or a buffer|value that JSON gives back), got list"
    said = (
        "optimizer, state 'kept': expected a tensor that has no memory of another one, got"
        if is_in_state
        else f"optimizer, group 'kept': expected a {of_group}"
    )
    with pytest.raises(CheckpointError, match=said):
        take(hosted(make))


def test_what_a_group_was_built_with_is_the_same_after_a_load() -> None:
    """It was a copy: of a mask that is a buffer, the group had another one."""

    def make(module: nn.Module) -> Training:
        training = with_more(module)
        training.optimizer.param_groups[0] |= {"mask": module.get_buffer("counts"), "settings": {"of": [1]}}
        return Training(training.optimizer)

    expert = hosted(make)
    assert expert.trainer is not None
    (group,) = expert.trainer.training.optimizer.param_groups
    mask, settings = group["mask"], group["settings"]
    group["lr"] = 0.5
    saved = take(expert)
    group["lr"] = 0.25
    restore(expert, saved)
    (now,) = expert.trainer.training.optimizer.param_groups
    assert now["mask"] is mask
    assert now["settings"] is settings
    assert now["lr"] == 0.5


def test_groups_that_were_built_with_tensors_in_the_memory_of_each_other_are_saved() -> None:
    """They are of one memory after a restart as well."""

    def make(module: nn.Module) -> Training:
        training, rates = with_more(module), torch.ones(4)
        training.optimizer.param_groups[0] |= {"rates": rates, "first": rates[0], "again": [rates]}
        return Training(training.optimizer)

    take(hosted(make))


SCHEDULES: dict[str, Callable[[torch.optim.Optimizer], lr_scheduler.LRScheduler]] = {
    "StepLR": lambda optimizer: lr_scheduler.StepLR(optimizer, 1),
    "MultiStepLR": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [1, 2]),
    "CosineAnnealingWarmRestarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 2),
    "SequentialLR": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.ConstantLR(optimizer), lr_scheduler.ExponentialLR(optimizer, 0.5)],
        milestones=[1],
    ),
}


def ways_of(kind: Any, rates: list[Any]) -> Iterator[dict[str, Any]]:
    """Yield the ways in which an optimizer of torch's makes its steps here."""
    known = inspect.signature(kind).parameters
    for rate, way in itertools.product(rates, ("", "foreach", "fused")):
        options = {"lr": rate} | ({way: True} if way in known else {})
        with contextlib.suppress(
            ValueError, RuntimeError
        ):  # such as of a rate that is a tensor with `foreach`
            kind([nn.Parameter(torch.ones(2))], **options)
            yield options


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_no_optimizer_of_torchs_is_refused_whatever_schedule_it_has(name: str, schedule: str) -> None:
    kind = getattr(torch.optim, name)
    # A schedule of schedules whose rates are tensors is refused: it has lists of them within lists.
    rates = [0.01] if schedule == "SequentialLR" else [0.01, torch.tensor(0.01)]
    for options in ways_of(kind, rates):

        def make(module: nn.Module, options: dict[str, Any] = options) -> Training:
            optimizer = kind(module.parameters(), **options)
            return Training(optimizer, schedule=SCHEDULES[schedule](optimizer))

        client = Client(hosted(make))
        for step in range(3):
            take(client.expert)
            train(client, range(step, step + 1))
        take(client.expert)
