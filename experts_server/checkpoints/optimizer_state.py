"""The state of an expert's optimizer as tensors by name and plain values, and how it comes back from these.

State goes by the parameter's index and a key; a tensor in several places has the name of the first. Beside it and the
groups a `state_dict` has what an optimizer adds to it by an override or a hook.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from experts_server.checkpoints.plain import (
    cannot_hold,
    changeable,
    check_is_text,
    group_of,
    is_plain,
    is_same,
    kinds_of_sequences,
    of_kind,
)
from experts_server.checkpoints.shared_memory import first_that_shares, is_within_itself
from experts_server.hosting.gradients import laid_out_like

_OF_TORCH = {"state", "param_groups"}  # in a `state_dict`, which may have more

# Optimizers that want some state only with a setting, look for it only in their first step, and then begin with zeros.
_STATE_OF_SETTINGS = {"amsgrad": "max_exp_avg_sq", "centered": "grad_avg", "momentum": "momentum_buffer"}
_LOOKING_ONCE = (torch.optim.Adam, torch.optim.RMSprop)


def take_optimizer(
    place: str,
    optimizer: torch.optim.Optimizer,
    module: nn.Module,
    changed_in_groups: Sequence[tuple[str, Any]],
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Return its tensors (not yet copied), and what a snapshot says of it besides.

    Args:
        place: of it, for errors.
        optimizer: it.
        module: whose weights it has.
        changed_in_groups: keys and values of what is not as it was built, and will be another object after a restart.

    Raises:
        CheckpointError: some of it is neither a tensor nor a plain value, or would not be in two places, or in memory
            of the module, after a restart.
    """
    saved = dict(optimizer.state_dict())
    if not saved.keys() >= _OF_TORCH:
        raise cannot_hold(f"{place}, its state_dict", saved, "'state' and 'param_groups' in it")
    tensors: dict[str, Tensor] = {}
    scalars: dict[str, Any] = {}
    also_under: dict[str, list[str]] = {}
    first_names: dict[int, str] = {}
    for index, key, value in _entries_of_state(place, saved["state"]):
        name = f"{index}.{key}"
        first = first_names.setdefault(id(value), name) if isinstance(value, Tensor | list | dict) else name
        if first != name:
            also_under.setdefault(first, []).append(name)
        elif isinstance(value, Tensor) and not hasattr(value, "__tensor_flatten__"):  # made of others
            if is_within_itself(value):
                raise cannot_hold(
                    f"{place}, state {key!r}", value, "a tensor whose elements each have memory of their own"
                )
            tensors[f"optimizer.{name}"] = value
        elif is_plain(value):
            scalars[name] = value
        else:
            raise cannot_hold(f"{place}, state {key!r}", value)
    _check_memory(place, optimizer, module, tensors, changed_in_groups)
    _check_lists(place, optimizer, scalars)
    entries_of_its_own = {key: value for key, value in saved.items() if key not in _OF_TORCH}
    for key, value in entries_of_its_own.items():
        if not is_plain({key: value}):
            raise cannot_hold(f"{place}, {key!r} of its state_dict", value, "a value that JSON gives back")
    return tensors, {
        "optimizer_scalars": copy.deepcopy(scalars),
        "optimizer_kinds": kinds_of_sequences(scalars),
        "optimizer_also_under": also_under,
        "optimizer_empty": [index for index, entries in saved["state"].items() if not entries],
        "optimizer_entries": copy.deepcopy(entries_of_its_own),
    }


def _check_memory(
    place: str,
    optimizer: torch.optim.Optimizer,
    module: nn.Module,
    state: Mapping[str, Tensor],
    changed_in_groups: Sequence[tuple[str, Any]],
) -> None:
    """Raise `CheckpointError` where state has memory of other state, of a group or of the module, or a group of that.

    What a group was built with is the same object after a restart.
    """
    trained = [p for group in optimizer.param_groups for p in group["params"]]
    tensors = {id(one): one for one in (*trained, *module.parameters(), *module.buffers())}
    of_module = [(None, tensor) for tensor in tensors.values()]
    in_groups = [
        (str(number), leaf)
        for number, (_, value) in enumerate(changed_in_groups)
        for leaf in _tensors_in(value)
    ]
    if (number := first_that_shares([*of_module, *in_groups], only_with_nameless=True)) is not None:
        key, value = changed_in_groups[int(number)]
        raise cannot_hold(
            f"{place}, group {key!r}", value, "a tensor that has no memory of a weight or a buffer"
        )
    others = [
        *of_module,
        *((None, leaf) for _, value in _entries_of_groups(optimizer) for leaf in _tensors_in(value)),
    ]
    if (name := first_that_shares([*others, *state.items()])) is not None:
        key = name.split(".", 2)[2]
        raise cannot_hold(
            f"{place}, state {key!r}", state[name], "a tensor that has no memory of another one"
        )


def _tensors_in(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def _check_lists(place: str, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Raise `CheckpointError` where a list or dict within state stands elsewhere in state, or in a group, as well."""
    seen = {id(one) for _, value in _entries_of_groups(optimizer) for one in changeable(value)}
    for name, value in state.items():
        for one in changeable(value):
            if id(one) in seen:
                _, _, key = name.partition(".")
                raise cannot_hold(f"{place}, state {key!r}", value, "a list or dictionary in one place")
            seen.add(id(one))


def _entries_of_groups(optimizer: torch.optim.Optimizer) -> Iterator[tuple[Any, Any]]:
    """Yield each key and value of each group, but for its parameters."""
    for group in optimizer.param_groups:
        yield from ((key, value) for key, value in group.items() if key != "params")


def _entries_of_state(place: str, state: Mapping[Any, Mapping[Any, Any]]) -> Iterator[tuple[int, str, Any]]:
    """Yield each entry of each parameter's state: the parameter's index, the key and the value."""
    for index, entries in state.items():
        if not isinstance(index, int):
            raise cannot_hold(f"{place}, state {index!r}", entries, "state of parameters alone")
        for key, value in entries.items():
            check_is_text(f"{place}, state", [key])
            yield index, key, value


def load_optimizer(
    optimizer: torch.optim.Optimizer,
    groups: list[dict[str, Any]],
    tensors: Mapping[str, Tensor],
    plain: Mapping[str, Any],
) -> None:
    """Give it the state that `take_optimizer` saw.

    Args:
        optimizer: of the same parameters.
        groups: what is set in its groups, with `params` as in its `state_dict`.
        tensors: of the snapshot.
        plain: of the snapshot.
    """
    state, entries = _state_of_optimizer(tensors, plain), plain["optimizer_entries"]
    built = [dict(group) for group in optimizer.param_groups]
    optimizer.load_state_dict({**copy.deepcopy(entries), "state": state, "param_groups": groups})
    for group, own, loaded in zip(optimizer.param_groups, built, groups, strict=True):
        for key in loaded.keys() & own.keys() & group.keys():
            # The module may have it as well, or whoever made the optimizer.
            if is_same(own[key], loaded[key]) and is_same(group[key], loaded[key]):
                group[key] = own[key]
    _undo_casts(optimizer, state)
    _add_state_of_new_settings(optimizer)


def _state_of_optimizer(tensors: Mapping[str, Tensor], plain: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    state: dict[int, dict[str, Any]] = {index: {} for index in plain["optimizer_empty"]}
    saved = group_of(tensors, "optimizer") | plain["optimizer_scalars"]
    for name, kind in plain["optimizer_kinds"].items():
        saved[name] = of_kind(saved[name], kind)
    for name, others in plain["optimizer_also_under"].items():
        saved |= dict.fromkeys(others, saved[name])
    for name, value in saved.items():
        index, _, key = name.partition(".")
        state.setdefault(int(index), {})[key] = value
    return state


def _undo_casts(optimizer: torch.optim.Optimizer, state: Mapping[int, Mapping[str, Any]]) -> None:
    """Have values as they were saved: `load_state_dict` gives tensors the dtype of the weights, and texts another text.

    It leaves the count of steps alone, which fused steps want as it makes it. Tensors were saved contiguous, and one in
    several places stays one.
    """
    made: dict[tuple[int, torch.device], Tensor | None] = {}
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for index, saved in state.items():
        parameter, own = parameters[index], optimizer.state[parameters[index]]
        for key in saved.keys() & own.keys() - {"step"}:
            value = saved[key]
            if isinstance(value, Tensor):
                place = id(value), own[key].device
                if place not in made:
                    moved = value.to(own[key].device)
                    is_alike = moved.shape == parameter.shape
                    made[place] = laid_out_like(parameter, moved) if is_alike else moved
                value = made[place]
            own[key] = value


def _add_state_of_new_settings(optimizer: torch.optim.Optimizer) -> None:
    """Begin what is configured now, and was not when this was saved."""
    if not isinstance(optimizer, _LOOKING_ONCE):
        return
    for group in optimizer.param_groups:
        wanted = [key for setting, key in _STATE_OF_SETTINGS.items() if group.get(setting)]
        for parameter in group["params"]:
            if state := optimizer.state.get(parameter):
                zeros = {key: torch.zeros_like(parameter) for key in wanted if key not in state}
                state.update(zeros)
