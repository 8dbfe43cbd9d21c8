"""An expert at one moment, as tensors by name and plain values: what a checkpoint holds of it.

    weights.<key>                     the module's state_dict
    optimizer.<parameter>.<key>       the optimizer's state, by the parameter's index
    gathered.<client>.<parameter>     gradients that wait for their client's step
    random                            where the expert's random numbers are

Plain values (JSON): class names, the versions of the module's parts (by which a class whose version has grown since
migrates, as torch lets it), counts, scalar optimizer state, the ledger, and of the schedule and the optimizer's groups
what has changed since they were built: the rest is as configured, also when the configuration changes. What cannot be
told in tensors and plain values is refused, and not left out. `take` runs in a turn of the expert, so all of it is of
one moment: between updates, never during one.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from experts_server.checkpoints.optimizer_state import load_optimizer, take_optimizer
from experts_server.checkpoints.plain import (
    Changes,
    cannot_hold,
    changed,
    check_apart,
    group_of,
    is_plain,
    put_back,
)
from experts_server.hosting.gathered import Gathered
from experts_server.hosting.hosted import HostedExpert
from experts_server.hosting.loading import keeping_parameters, kind_of
from experts_server.hosting.state import in_one_line
from experts_server.hosting.training import Trainer
from moe_autograd._metadata import metadata_of, with_metadata
from moe_autograd.errors import CheckpointError


@dataclass(frozen=True)
class Snapshot:
    """The state of one expert."""

    tensors: dict[str, Tensor]
    plain: dict[str, Any]


def take(hosted: HostedExpert) -> Snapshot:
    """Copy the expert's state; call it in a turn of the expert.

    Raises:
        CheckpointError: some of it is neither a tensor nor a plain value, or a tensor of a kind that has no plain copy.
    """
    tensors, plain = _state_of(hosted)
    copied = {name: _copy(f"expert {hosted.name!r}, {name!r}", tensor) for name, tensor in tensors.items()}
    return Snapshot(copied, plain)


def check_can_be_saved(hosted: HostedExpert) -> None:
    """Raise `CheckpointError` as `take` would, but for what shows when it copies."""
    _state_of(hosted)


def _state_of(hosted: HostedExpert) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors (not yet copied) and the plain values of the expert's state."""
    tensors = {}
    state = hosted.module.state_dict()
    for key, value in state.items():
        if not isinstance(value, Tensor):
            raise cannot_hold(f"expert {hosted.name!r}, {key!r} of its state_dict", value, "a tensor")
        tensors[f"weights.{key}"] = value
    trained: dict[str, Any] = {}
    if hosted.trainer is not None:
        more, trained = _take_training(hosted.trainer, hosted.module)
        tensors |= more
    random_state = hosted.caller.random.state()
    if random_state is not None:
        tensors["random"] = random_state
    return tensors, {
        **_identity(hosted),
        "module": type(hosted.module).__module__,
        "replica": hosted.replica,
        "metadata": _plain_metadata(hosted.name, metadata_of(state)),
        "trained": _trained(hosted),
        **trained,
        "ledger": hosted.ledger.to_plain(),
    }


def restore(hosted: HostedExpert, snapshot: Snapshot) -> None:
    """Become what `take` saw, if it fits (`check_fits`); for a server that is not serving yet.

    Raises:
        CheckpointError: the module or its optimizer does not load what it has saved.
    """
    try:
        with torch.no_grad(), keeping_parameters(hosted.module):
            weights = group_of(snapshot.tensors, "weights")
            hosted.module.load_state_dict(with_metadata(weights, copy.deepcopy(snapshot.plain["metadata"])))
        if hosted.trainer is not None:
            _restore_training(hosted.trainer, snapshot)
    except Exception as error:  # whatever a user's module or optimizer raises
        raise CheckpointError(
            f"checkpoint of expert {hosted.name!r}: expected a module and an optimizer that load what they have saved, "
            f"got {in_one_line(error)}. Host it without checkpoint_dir."
        ) from error
    if "random" in snapshot.tensors:
        hosted.caller.random.set_state(snapshot.tensors["random"])
    hosted.ledger.load_plain(snapshot.plain["ledger"])
    hosted.replica = snapshot.plain["replica"]


def _plain_metadata(name: str, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the parts have in it, by path: their versions, and what hooks of `state_dict` add."""
    for path, values in metadata.items():
        if not is_plain(values):
            place = f"expert {name!r}, the metadata of its state_dict for {path!r}"
            raise cannot_hold(place, values, "values that JSON gives back")
    return copy.deepcopy(dict(metadata))


def _identity(hosted: HostedExpert) -> dict[str, Any]:
    """What has to be the same when it is restored."""
    optimizer = None if hosted.training is None else type(hosted.training.optimizer).__name__
    return {"expert": hosted.name, "class": type(hosted.module).__name__, "optimizer": optimizer}


def _trained(hosted: HostedExpert) -> list[str]:
    """Group and name of each trained parameter, in order: the optimizer's state goes by their places."""
    if hosted.training is None:
        return []
    names = {id(parameter): name for name, parameter in hosted.module.named_parameters()}
    groups = hosted.training.optimizer.param_groups
    return [f"{place} {names.get(id(p))}" for place, group in enumerate(groups) for p in group["params"]]


def _take_training(trainer: Trainer, module: nn.Module) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return the tensors (not yet copied) and the plain values of a training's state."""
    place = f"expert {trainer.name!r}, optimizer"
    groups, schedule = trainer.training.settings()
    built_groups, built_schedule = trainer.training.built_with
    if len(groups) != len(built_groups):
        raise CheckpointError(
            f"{place}: expected {len(built_groups)} group(s) of parameters, as it was built with, got {len(groups)}. "
            "Build it with all of them, or host this expert without checkpoint_dir."
        )
    of_schedule = changed(f"{place}.schedule", schedule, built_schedule)
    of_groups = [changed(f"{place}, group", *pair) for pair in zip(groups, built_groups, strict=True)]
    in_groups, in_live_ones = (
        [(key, group[key]) for group, of_it in zip(these, of_groups, strict=True) for key in of_it.values]
        for these in (groups, trainer.training.optimizer.param_groups)
    )
    # A schedule's lists may be one: it makes others of them, as `SequentialLR` does. Its tensors are those of groups.
    check_apart(f"{place}, group", [*((key, schedule[key]) for key in of_schedule.dtypes), *in_groups])
    tensors, of_optimizer = take_optimizer(place, trainer.training.optimizer, module, in_live_ones)
    gathered = trainer.gathered.by_client()
    for client_id, entry in gathered.items():
        for place_of_grad, grad in enumerate(entry.grads):
            if grad is not None:
                tensors[f"gathered.{client_id.hex()}.{place_of_grad}"] = grad
    return tensors, {
        "num_updates": trainer.num_updates,
        "update": trainer.training.update,
        "gathered": {
            client_id.hex(): [
                *(entry.num_backwards, entry.num_samples, entry.digest),
                *trainer.gathered.standing_of(client_id),
            ]
            for client_id, entry in gathered.items()
        },
        "taken_at_s": time.time(),
        "schedule_class": _schedule_class(trainer),
        "schedule_has_ended": trainer.schedule_end is not None,
        "schedule": asdict(of_schedule),
        "groups": [*map(asdict, of_groups)],
        **of_optimizer,
    }


def _schedule_class(trainer: Trainer) -> str | None:
    schedule = trainer.training.schedule
    return None if schedule is None else type(schedule).__name__


def _restore_training(trainer: Trainer, snapshot: Snapshot) -> None:
    optimizer, schedule, plain = trainer.training.optimizer, trainer.training.schedule, snapshot.plain
    groups, schedule_state = copy.deepcopy(trainer.training.built_with)
    goes_on = plain["schedule_class"] == _schedule_class(trainer)  # otherwise rates begin as configured now
    if goes_on:
        put_back(schedule_state, Changes(**plain["schedule"]))
        for group, saved in zip(groups, plain["groups"], strict=True):
            put_back(group, Changes(**saved))
    for group, own in zip(groups, optimizer.state_dict()["param_groups"], strict=True):
        group["params"] = own["params"]
    load_optimizer(optimizer, groups, snapshot.tensors, plain)
    if schedule is not None:
        schedule.load_state_dict(schedule_state)
    if goes_on and plain["schedule_has_ended"]:  # as far as it was configured then
        trainer.step_schedule()
    trainer.num_updates = int(plain["num_updates"])
    _restore_gathered(trainer, snapshot)


def _restore_gathered(trainer: Trainer, snapshot: Snapshot) -> None:
    grads: dict[str, list[Tensor | None]] = {
        client: [None] * len(trainer.parameters) for client in snapshot.plain["gathered"]
    }
    for name, grad in group_of(snapshot.tensors, "gathered").items():
        client, place = name.split(".")
        grads[client][int(place)] = grad.to(trainer.parameters[int(place)].device)
    # Gathered under another `update` they mean something else: those of steps may be applied already.
    is_usable = snapshot.plain["update"] == trainer.training.update
    # The client is away for as long as the server is; a clock that was set back meanwhile tells nothing.
    since_s = max(0.0, time.time() - snapshot.plain["taken_at_s"])
    for client, (*counts, age_s, is_applied) in snapshot.plain["gathered"].items():
        client_id = bytes.fromhex(client)
        if is_usable:
            gathered = Gathered(grads[client], *counts)
            trainer.gathered.put_back(client_id, gathered, age_s + since_s, is_applied=is_applied)
        else:
            trainer.gathered.note_lost(client_id)


def check_fits(hosted: HostedExpert, snapshot: Snapshot) -> None:
    """Raise `CheckpointError` if the snapshot is of another class, other shapes or another optimizer."""
    mine = _identity(hosted)
    saved = {key: snapshot.plain[key] for key in mine}
    if mine != saved:
        raise CheckpointError(
            f"checkpoint of expert {hosted.name!r}: expected {mine} as configured, got {saved}. "
            "Configure what was saved, or use another checkpoint_dir, and "
            "bring the weights there by experts-server export and import."
        )
    here, there = _trained(hosted), snapshot.plain["trained"]
    if here != there:
        differing = sorted(set(here) ^ set(there))[:4]
        how = (
            f"differing: {', '.join(differing)}" if differing else f"in another order: {', '.join(there[:4])}"
        )
        raise CheckpointError(
            f"checkpoint of expert {hosted.name!r}: expected {len(here)} trained parameters as configured, got "
            f"{len(there)} ({how}). Configure what was saved, or use another checkpoint_dir."
        )
    configured, found = entries_of(hosted), entries_in(snapshot)
    if configured != found:
        differing = differing_keys(configured, found)[:4]
        mine, saved = ({key: entries.get(key) for key in differing} for entries in (configured, found))
        raise CheckpointError(
            f"checkpoint of expert {hosted.name!r}: expected weights {mine} as configured, got {saved}. "
            "Configure what was saved, have its class make all entries when it is built, or use another checkpoint_dir."
        )


def where_another_class(hosted: HostedExpert, snapshot: Snapshot) -> str | None:
    """Say it if a class of this name was saved that is from another Python module, so may compute something else."""
    kind = type(hosted.module)
    saved = snapshot.plain["module"]
    if "__main__" in (saved, kind.__module__) or saved == kind.__module__:
        return None  # a script's classes are imported from it as well
    return f"expected {kind.__module__}.{kind.__name__} as configured, got {saved}.{kind.__name__}"


def entries_of(hosted: HostedExpert) -> dict[str, str]:
    """Return shape and dtype of each tensor that a checkpoint has to have of the module, by key."""
    return _shapes(hosted.module.state_dict())


def entries_in(snapshot: Snapshot) -> dict[str, str]:
    """Return shape and dtype of each tensor that a snapshot has of the module, by key."""
    return _shapes(group_of(snapshot.tensors, "weights"))


def differing_keys(some: Mapping[str, str], others: Mapping[str, str]) -> list[str]:
    """Return the keys of entries that are not the same on both sides."""
    return sorted(key for key in some.keys() | others.keys() if some.get(key) != others.get(key))


def _shapes(tensors: Mapping[str, Any]) -> dict[str, str]:
    return {key: kind_of(value) for key, value in tensors.items() if isinstance(value, Tensor)}


def _copy(place: str, tensor: Tensor) -> Tensor:
    try:
        return tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
    except (RuntimeError, MemoryError) as error:  # such as of a sparse one
        if tells_of_no_memory(error):
            raise CheckpointError(
                f"{place}: expected memory for a copy of {tensor.nbytes} bytes, got none. "
                "Free some, and save again."
            ) from error
        raise CheckpointError(
            f"{place}: expected a tensor that can be copied to the CPU as it is, got one that cannot "
            f"({in_one_line(error)}). Host this expert without checkpoint_dir."
        ) from error


def tells_of_no_memory(error: Exception) -> bool:
    """Whether there is none; torch's allocator of the CPU has no class of its own for that."""
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or "can't allocate memory" in str(error)
