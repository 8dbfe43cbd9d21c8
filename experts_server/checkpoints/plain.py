"""What of an expert's state is a plain value: one that JSON gives back, and what has changed of such ones."""

from __future__ import annotations

import functools
import json
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from numbers import Number
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from experts_server.checkpoints.shared_memory import first_that_shares
from moe_autograd.errors import CheckpointError

_SEQUENCES: dict[str, Callable[[Iterable[Any]], Any]] = {"tuple": tuple, "Size": torch.Size}  # besides lists


def group_of(tensors: Mapping[str, Tensor], group: str) -> dict[str, Tensor]:
    """Return those whose names begin with it, by what follows."""
    prefix = f"{group}."
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


@dataclass(frozen=True)
class Changes:
    """What is not as it was built.

    Attributes:
        values: by key; of tensors of one number, their values.
        dtypes: of those that are tensors.
        kinds: of those that are sequences, and no lists.
        removed: the keys that are there no more.
    """

    values: dict[str, Any]
    dtypes: dict[str, str]
    kinds: dict[str, str]
    removed: list[str]


def changed(place: str, now: Mapping[str, Any], before: Mapping[str, Any]) -> Changes:
    """Return what is not as it was `before`.

    Raises:
        CheckpointError: some of it is no plain value, or not under a text.
    """
    values: dict[str, Any] = {}
    dtypes: dict[str, str] = {}
    removed = [key for key in before if key not in now]
    check_is_text(place, removed)
    for key, value in now.items():
        if key in before and is_same(value, before[key]):
            continue
        check_is_text(place, [key])
        dtype = _dtype_of_numbers(value)
        if dtype is not None:
            dtypes[key] = str(dtype).removeprefix("torch.")
        values[key] = value if dtype is None else tree_map(Tensor.item, value)
        if not is_plain(values[key]):
            raise cannot_hold(f"{place} {key!r}", value, "a value that JSON gives back")
    return Changes(values, dtypes, kinds_of_sequences(values), removed)


def check_is_text(place: str, keys: Iterable[Any]) -> None:
    """Raise `CheckpointError` if one is none: it would come back as one."""
    for key in keys:
        if not isinstance(key, str):
            raise cannot_hold(f"{place} {key!r}", key, "a text as its key")


def check_apart(place: str, entries: Sequence[tuple[str, Any]]) -> None:
    """Raise `CheckpointError` if a tensor, list or dict stands in two places: each would get one of its own."""
    seen: set[int] = set()
    tensors: list[tuple[str | None, Tensor]] = []
    for number, (key, value) in enumerate(entries):
        for one in changeable(value):
            if id(one) in seen:
                raise _cannot_hold_in_two_places(place, key, value)
            seen.add(id(one))
            if isinstance(one, Tensor):
                tensors.append((str(number), one))
    if (shared := first_that_shares(tensors)) is not None:
        raise _cannot_hold_in_two_places(place, *entries[int(shared)])


def changeable(value: Any) -> Iterator[Any]:
    """Yield what others may see change: tensors, lists and dicts."""
    if isinstance(value, Tensor | list | dict):
        yield value
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    for one in inner:
        yield from changeable(one)


def _cannot_hold_in_two_places(place: str, key: str, value: Any) -> CheckpointError:
    return cannot_hold(f"{place} {key!r}", value, "one for each group, or one that stays as it was built")


def kinds_of_sequences(values: Mapping[str, Any]) -> dict[str, str]:
    """Return those that JSON gives back as lists, and are none: the names of their classes."""
    return {key: type(value).__name__ for key, value in values.items() if isinstance(value, tuple)}


def of_kind(value: Iterable[Any], kind: str) -> Any:
    """Return a sequence as it was before JSON had it."""
    return _SEQUENCES[kind](value)


def put_back(built: dict[str, Any], changes: Changes) -> None:
    """Set what had `changed` since it was built; tensors come to where those are that it was built with."""
    for key, value in changes.values.items():
        if key in changes.dtypes:
            device = next(
                (leaf.device for leaf in tree_leaves(built.get(key)) if isinstance(leaf, Tensor)), None
            )
            as_tensor = functools.partial(
                torch.tensor, dtype=getattr(torch, changes.dtypes[key]), device=device
            )
            value = tree_map(as_tensor, value)
        built[key] = of_kind(value, changes.kinds[key]) if key in changes.kinds else value
    for key in changes.removed:
        built.pop(key, None)


def _dtype_of_numbers(value: Any) -> torch.dtype | None:
    """Return the dtype of a tensor of one number, or of several such tensors, as a rate and betas may be."""
    leaves = value if type(value) in (list, tuple) else [value]
    if all(type(leaf) is Tensor and leaf.dim() == 0 for leaf in leaves):
        dtypes = {leaf.dtype for leaf in leaves}
        return dtypes.pop() if len(dtypes) == 1 else None
    return None


def is_same(value: Any, other: Any) -> bool:
    """Whether all in it is as in the other, to the class and the sign of a zero; a NaN is, too.

    What cannot be compared is not.
    """
    if type(value) is not type(other):
        return False
    if isinstance(value, dict):  # in their order
        return is_same([*value.items()], [*other.items()])
    if isinstance(value, list | tuple):
        return len(value) == len(other) and all(map(is_same, value, other))
    try:
        if isinstance(value, Tensor):
            is_alike = value.dtype == other.dtype and value.shape == other.shape
            return is_alike and torch.equal(_bytes_of(value), _bytes_of(other))
        if isinstance(value, Number):
            return repr(value) == repr(other)
        return bool(value == other)
    except (TypeError, ValueError, RuntimeError):  # such as of an array
        return False


def _bytes_of(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().flatten().view(torch.uint8)


def is_plain(value: Any) -> bool:
    """Whether JSON gives it back as it is, but for a tuple or a `torch.Size`, which come back as lists."""
    as_told = list(value) if type(value) in _SEQUENCES.values() else value
    try:
        json.dumps(as_told)
    except (TypeError, ValueError):
        return False
    return _is_of_json(as_told)


def _is_of_json(value: Any) -> bool:
    """Whether all in it is of JSON's own classes, as which others (enums, named tuples) would come back."""
    if type(value) in (dict, OrderedDict):
        return all(isinstance(key, str) and _is_of_json(one) for key, one in value.items())
    if type(value) is list:
        return all(map(_is_of_json, value))
    # numpy's numbers compute alike
    return value is None or type(value) in (str, int, float, bool) or type(value).__module__ == "numpy"


def cannot_hold(
    place: str, value: Any, expected: str = "a tensor, or a value that JSON gives back"
) -> CheckpointError:
    """Return what refuses a value by name."""
    return CheckpointError(
        f"{place}: expected {expected}, got {type(value).__name__}. A checkpoint cannot hold it: host this expert "
        "without checkpoint_dir."
    )
