"""An expert at one moment, as tensors by name and plain values: what a checkpoint holds of it.

    weights.<key>                     the module's state_dict
    optimizer.<parameter>.<key>       the optimizer's state, by the parameter's index
    gathered.<client>.<parameter>     gradients that wait for their client's step
    random                            where the expert's random numbers are

Plain values (JSON): class names, counts, scalar optimizer state, the schedule, the ledger. `take` runs in a turn
of the expert, so all of it is of one moment: between updates, never during one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from experts_server.gathered import Gathered
from experts_server.hosted import HostedExpert
from experts_server.training import Trainer
from moe_autograd.errors import CheckpointError

FORMAT = 1


@dataclass(frozen=True)
class Snapshot:
    """The state of one expert."""

    tensors: dict[str, Tensor]
    plain: dict[str, Any]


def take(hosted: HostedExpert) -> Snapshot:
    """Copy the expert's state; call it in a turn of the expert."""
    state = hosted.module.state_dict()
    tensors = {f"weights.{key}": value for key, value in state.items() if isinstance(value, Tensor)}
    trained: dict[str, Any] = {}
    if hosted.trainer is not None:
        more, trained = _take_training(hosted.trainer)
        tensors |= more
    random_state = hosted.caller.random.state()
    if random_state is not None:
        tensors["random"] = random_state
    copied = {name: _copy(tensor) for name, tensor in tensors.items()}
    return Snapshot(copied, {**_identity(hosted), **trained, "ledger": hosted.ledger.to_plain()})


def restore(hosted: HostedExpert, snapshot: Snapshot) -> None:
    """Become what `take` saw; for a server that is not serving yet.

    Raises:
        CheckpointError: the snapshot is of another class, other shapes, or another optimizer. Nothing was changed.
    """
    _check_fits(hosted, snapshot)
    weights = _group(snapshot.tensors, "weights")
    with torch.no_grad():
        hosted.module.load_state_dict(weights)
    if hosted.trainer is not None:
        _restore_training(hosted.trainer, snapshot, hosted.caller.device)
    if "random" in snapshot.tensors:
        hosted.caller.random.set_state(snapshot.tensors["random"])
    hosted.ledger.load_plain(snapshot.plain["ledger"])


def _identity(hosted: HostedExpert) -> dict[str, Any]:
    """What has to be the same when it is restored."""
    optimizer = None if hosted.training is None else type(hosted.training.optimizer).__name__
    return {"expert": hosted.name, "class": type(hosted.module).__name__, "optimizer": optimizer}


def _take_training(trainer: Trainer) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors (not yet copied) and the plain values of a training's state."""
    tensors: dict[str, Tensor] = {}
    scalars: dict[str, Any] = {}
    optimizer, schedule = trainer.training.optimizer, trainer.training.schedule
    for index, entries in optimizer.state_dict()["state"].items():
        for key, value in entries.items():
            if isinstance(value, Tensor):
                tensors[f"optimizer.{index}.{key}"] = value
            elif _is_plain(value):
                scalars[f"{index}.{key}"] = value
    gathered = {client_id.hex(): entry for client_id, entry in trainer.gathered.by_client().items()}
    for client, entry in gathered.items():
        for place, grad in enumerate(entry.grads):
            if grad is not None:
                tensors[f"gathered.{client}.{place}"] = grad
    return tensors, {
        "num_updates": trainer.num_updates,
        "gathered": {client: [entry.num_backwards, entry.num_samples] for client, entry in gathered.items()},
        "schedule": None if schedule is None else _plain_of(schedule.state_dict()),
        "scheduled": [] if schedule is None else [_plain_of(group) for group in optimizer.param_groups],
        "optimizer_scalars": scalars,
    }


def _restore_training(trainer: Trainer, snapshot: Snapshot, device: torch.device) -> None:
    optimizer, schedule, plain = trainer.training.optimizer, trainer.training.schedule, snapshot.plain
    state: dict[int, dict[str, Any]] = {}
    for name, tensor in _group(snapshot.tensors, "optimizer").items():
        index, _, key = name.partition(".")
        state.setdefault(int(index), {})[key] = tensor
    for name, value in plain["optimizer_scalars"].items():
        index, _, key = name.partition(".")
        state.setdefault(int(index), {})[key] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    if schedule is not None and plain["schedule"] is not None:
        schedule.load_state_dict(plain["schedule"])
        for group, scheduled in zip(optimizer.param_groups, plain["scheduled"], strict=True):
            for key, value in scheduled.items():
                group[key] = tuple(value) if isinstance(value, list) else value
    trainer.num_updates = int(plain["num_updates"])
    _restore_gathered(trainer, snapshot, device)


def _restore_gathered(trainer: Trainer, snapshot: Snapshot, device: torch.device) -> None:
    grads: dict[str, list[Tensor | None]] = {
        client: [None] * len(trainer.parameters) for client in snapshot.plain["gathered"]
    }
    for name, grad in _group(snapshot.tensors, "gathered").items():
        client, place = name.split(".")
        grads[client][int(place)] = grad.to(device)
    for client, (num_backwards, num_samples) in snapshot.plain["gathered"].items():
        trainer.gathered.put(bytes.fromhex(client), Gathered(grads[client], num_backwards, num_samples))


def _check_fits(hosted: HostedExpert, snapshot: Snapshot) -> None:
    mine, saved = _identity(hosted), {key: snapshot.plain.get(key) for key in _identity(hosted)}
    if mine != saved:
        raise CheckpointError(
            f"checkpoint of expert {hosted.name!r}: expected {mine} as configured, got {saved}. "
            "Configure what was saved, or use another checkpoint_dir."
        )
    configured = _shapes(hosted.module.state_dict())
    found = _shapes(_group(snapshot.tensors, "weights"))
    if configured != found:
        differing = sorted(k for k in configured.keys() | found.keys() if configured.get(k) != found.get(k))
        here, there = ({key: shapes.get(key) for key in differing[:4]} for shapes in (configured, found))
        raise CheckpointError(
            f"checkpoint of expert {hosted.name!r}: expected weights {here} as configured, got {there}. "
            "Configure what was saved, or use another checkpoint_dir."
        )


def _group(tensors: dict[str, Tensor], group: str) -> dict[str, Tensor]:
    prefix = f"{group}."
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def _shapes(tensors: Mapping[str, Any]) -> dict[str, str]:
    return {
        key: f"{tuple(value.shape)} {str(value.dtype).removeprefix('torch.')}"
        for key, value in tensors.items()
        if isinstance(value, Tensor)
    }


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format)


def _plain_of(values: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in values.items() if _is_plain(value)}


def _is_plain(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True
