"""Modules with versions (`_version` of torch): a checkpoint keeps these, so what it restores is what was saved."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from experts_server import ExpertsServer
from moe_autograd.errors import CheckpointError
from tests.support.checkpointing import adam
from tests.support.servers import WireClient, tokens
from tests.support.versioned import D, Refusing, Second, Third, expert_of, renamed

OFFLOAD = {"memory": {"recompute": True, "offload": True}, "offload": {"max_resident_bytes": 1 << 20}}


def served(folder: Path, module: nn.Module, config: dict[str, Any] | None = None) -> ExpertsServer:
    return ExpertsServer(
        {"e": module}, optimizer=adam, config={"checkpoint_dir": str(folder), **(config or {})}
    )


def same(one: Any, other: Any) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("config", [{}, OFFLOAD], ids=["in memory", "offloaded"])
@pytest.mark.parametrize("kind", [Second, Refusing])
def test_weights_are_the_same_after_the_first_start_and_after_each_restart(
    tmp_path: Path, kind: type[nn.Module], config: dict[str, Any]
) -> None:
    """They were migrated as those of a state of before there were versions."""
    weights: dict[str, Tensor] = dict(copy.deepcopy(expert_of(kind).state_dict()))
    for seed in (0, 1, 2):
        with (
            served(tmp_path, expert_of(kind, seed), config) as server,
            WireClient(server.address) as client,
        ):
            assert same(client.get_state()["e"], weights)
            client.forward("e", tokens(3, D))
            client.backward("e", torch.ones(3, D))
            client.step()
            weights = client.get_state()["e"]


def test_a_class_whose_version_has_grown_migrates_what_was_saved_before_as_in_torch(tmp_path: Path) -> None:
    before = expert_of(renamed(Second))
    with served(tmp_path, before):
        pass
    natively, now = expert_of(renamed(Third), 1), expert_of(renamed(Third), 1)
    natively.load_state_dict(before.state_dict())
    with served(tmp_path, now):
        pass
    assert same(now.state_dict(), natively.state_dict())
    assert torch.equal(now.get_parameter("within.1.bias"), -before.get_parameter("within.1.bias"))
    with served(tmp_path, again := expert_of(renamed(Third), 2)):
        assert same(again.state_dict(), natively.state_dict())  # once


def test_what_hooks_add_to_the_metadata_is_saved_too_and_refused_by_name_where_it_is_not_plain(
    tmp_path: Path,
) -> None:
    seen: list[Any] = []

    def noting(note: Any) -> nn.Module:
        module = nn.Sequential(nn.Linear(D, D))
        module[0].register_state_dict_post_hook(
            lambda module, state, prefix, metadata: metadata.update(note=note)
        )
        module[0].register_load_state_dict_pre_hook(
            lambda module, state, prefix, metadata, *rest: seen.append(metadata["note"])
        )
        return module

    with served(tmp_path, noting("first")):
        pass
    with served(tmp_path, noting("second")):
        pass
    assert seen == ["first", "first"]
    said = r"expert 'e', the metadata of its state_dict for '0': expected values that JSON gives back, got dict\."
    with pytest.raises(CheckpointError, match=said):
        served(tmp_path / "other", noting(torch.ones(1))).start()
