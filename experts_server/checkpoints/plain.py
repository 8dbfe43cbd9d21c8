"""What of an expert's state is a plain value: one that JSON gives back, and what has changed of such ones."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from moe_autograd.errors import CheckpointError


def group_of(tensors: Mapping[str, Tensor], group: str) -> dict[str, Tensor]:
    """Return those whose names begin with it, by what follows."""
    prefix = f"{group}."
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def changed(place: str, now: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is not as it was `before`."""
    changed = {
        key: value for key, value in now.items() if key not in before or not _is_same(value, before[key])
    }
    for key, value in changed.items():
        if not is_plain(value):
            raise cannot_hold(f"{place} {key!r}", value, "a value that JSON gives back")
    return changed


def _is_same(value: Any, other: Any) -> bool:
    if isinstance(value, Tensor) or isinstance(other, Tensor):
        return isinstance(value, Tensor) and isinstance(other, Tensor) and torch.equal(value, other)
    return bool(value == other)


def is_plain(value: Any) -> bool:
    """Whether JSON gives it back as it is, but for a tuple, which comes back as a list."""
    try:
        back = json.loads(json.dumps(value))
    except (TypeError, ValueError):
        return False
    return bool(back == (list(value) if isinstance(value, tuple) else value))


def cannot_hold(
    place: str, value: Any, expected: str = "a tensor, or a value that JSON gives back"
) -> CheckpointError:
    """Return what refuses a value by name."""
    return CheckpointError(
        f"{place}: expected {expected}, got {type(value).__name__}. A checkpoint cannot hold it: host this expert "
        "without checkpoint_dir."
    )
