"""A checkpoint that an earlier version wrote is read: what has changed since is told otherwise in it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from experts_server.checkpoints.checkpoint import CheckpointFolder, _sealed
from experts_server.checkpoints.expert_file import write_snapshot
from experts_server.checkpoints.snapshot import Snapshot, restore, take
from experts_server.hosting.training import Training
from tests.server.test_restarted_optimizers import optimizer_of, train
from tests.server.test_training import Client, hosted


def training(module: nn.Module) -> Training:
    """Return one with all that a format has to tell: tensors in groups, tuples, and a schedule."""
    betas = (torch.tensor(0.9), torch.tensor(0.99))
    optimizer = torch.optim.Adam(module.parameters(), torch.tensor(0.1), betas, foreach=False)  # type: ignore[arg-type]
    optimizer.register_step_post_hook(halve)
    return Training(optimizer, schedule=torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9))


def halve(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    (group,) = optimizer.param_groups
    group["betas"] = tuple(beta / 2 for beta in group["betas"])
    group["weight_decay"] += 0.25
    optimizer.state[group["params"][0]]["steps"] = (1, 2)


def as_format_6_has_it(plain: dict[str, Any]) -> dict[str, Any]:
    """Return what was written then: dtypes beside what has changed, and nothing of what was removed."""
    schedule, groups = plain["schedule"], plain["groups"]
    told = {key: value for key, value in plain.items() if key not in ("optimizer_kinds", "optimizer_empty")}
    return told | {
        "schedule": schedule["values"],
        "groups": [group["values"] for group in groups],
        "dtypes": {"schedule": schedule["dtypes"], "groups": [group["dtypes"] for group in groups]},
        "optimizer_tuples": [*plain["optimizer_kinds"]],
    }


def test_a_checkpoint_of_format_6_is_read_as_it_was_by_its_own_version(tmp_path: Path) -> None:
    client = Client(hosted(training))
    train(client, range(3))
    snapshot = take(client.expert)
    generation = tmp_path / "generation-00000001"
    generation.mkdir()
    entry = write_snapshot(
        generation / "e.safetensors", Snapshot(snapshot.tensors, as_format_6_has_it(snapshot.plain))
    )
    (generation / "manifest.json").write_bytes(
        _sealed({"format": 6, "generation": 1, "experts": {"e": entry}})
    )
    with CheckpointFolder(tmp_path) as folder:
        newest = folder.read_newest()
    assert newest is not None
    again = Client(hosted(training))
    restore(again.expert, newest[1]["e"])
    groups, found = (optimizer_of(one.expert).param_groups for one in (client, again))
    for group in (*groups, *found):
        group.pop("params")
    assert found == groups
    assert type(found[0]["betas"]) is tuple
    assert (1, 2) in [state.get("steps") for state in optimizer_of(again.expert).state.values()]
    torch.testing.assert_close(
        found[0]["betas"], (torch.tensor(0.1125), torch.tensor(0.12375)), rtol=1e-6, atol=0
    )
