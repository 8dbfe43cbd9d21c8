"""Offloaded modules with versions (`_version` of torch): in copies and checkpoints their weights stay what they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from moe_autograd.autograd.offload import OffloadedExperts
from moe_autograd.errors import CheckpointError
from tests.support.versioned import D, Refusing, Second, Third, expert_of


def build(folder: Path, kind: type[nn.Module], seed: int = 0) -> OffloadedExperts:
    experts = (expert_of(kind, seed + number) for number in range(3))
    sgd = torch.optim.SGD
    return OffloadedExperts(experts, sgd, max_resident_bytes=2 * 2 * 2 * (D * D + D) * 4, store=folder)


def same(one: Any, other: Any) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("kind", [Second, Refusing])
def test_a_copy_is_loaded_into_the_plain_module_as_it_is(tmp_path: Path, kind: type[nn.Module]) -> None:
    with build(tmp_path, kind) as experts:
        plain = expert_of(kind, 9)
        plain.load_state_dict(experts.state_dict(0))
    assert same(plain.state_dict(), expert_of(kind).state_dict())


@pytest.mark.parametrize("kind", [Second, Refusing])
def test_a_checkpoint_of_the_same_class_is_restored_as_it_is(tmp_path: Path, kind: type[nn.Module]) -> None:
    with build(tmp_path, kind) as experts:
        experts.checkpoint()
    with build(tmp_path, kind, 9) as experts:
        experts.restore()
        assert all(same(experts.state_dict(i), expert_of(kind, i).state_dict()) for i in range(3))


class Counting(Third):
    """Has an extra state, which counts how often it was set."""

    num_set = 0

    def get_extra_state(self) -> int:
        return self.num_set

    def set_extra_state(self, state: int) -> None:
        self.num_set = state + 1


class CountingBefore(Second):
    """The same, before its version grew."""

    def get_extra_state(self) -> int:
        return 7

    def set_extra_state(self, state: int) -> None: ...


@pytest.mark.parametrize(("old", "new"), [(nn.Linear, Second), (Second, Third), (CountingBefore, Counting)])
def test_a_class_whose_version_has_grown_migrates_a_checkpoint_as_in_torch(
    tmp_path: Path, old: type[nn.Module], new: type[nn.Module]
) -> None:
    """It was taken for one of the class as it is now."""
    with build(tmp_path, old) as experts:
        experts.checkpoint()
    natively = [expert_of(new, 9) for _ in range(3)]
    for number, module in enumerate(natively):
        module.load_state_dict(expert_of(old, number).state_dict())
    with build(tmp_path, new, 9) as experts:
        experts.restore()
        for _ in range(2):  # they leave memory, and come back
            for number, module in enumerate(natively):
                got, want = experts.state_dict(number), module.state_dict()
                for extra in ("_extra_state", "within.1._extra_state"):
                    assert got.pop(extra, None) == want.pop(extra, None)
                assert same(got, want)
        experts.checkpoint()
    with build(tmp_path, new, 9) as experts:
        experts.restore()
        assert torch.equal(experts.state_dict(1)["weight"], natively[1].get_parameter("weight"))  # once


def test_a_part_under_two_paths_has_the_extra_state_that_was_saved(tmp_path: Path) -> None:
    def experts_of(kind: type[nn.Module]) -> OffloadedExperts:
        part = kind(D, D)
        sequence = nn.Sequential(part, nn.ReLU(), part)
        return OffloadedExperts([sequence], torch.optim.SGD, max_resident_bytes=10_000, store=tmp_path)

    with experts_of(CountingBefore) as experts:
        experts.checkpoint()
    with experts_of(Counting) as experts:
        experts.restore()
        state = experts.state_dict(0)
    assert [state["0._extra_state"], state["2._extra_state"]] == [8, 8]


def test_a_class_that_refuses_the_version_of_a_checkpoint_is_named(tmp_path: Path) -> None:
    with build(tmp_path, Third) as experts:
        experts.checkpoint()
    said = r"expert-00000: expected a module that takes weights of the versions {'': 3, .* got expected version 2"
    with build(tmp_path, Refusing) as experts, pytest.raises(CheckpointError, match=said):
        experts.restore()
