"""Classes that have changed what their weights mean, and migrate older states in the way that torch has for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

D = 4


class Second(nn.Linear):
    """Version 1, and what was before there were any, had the weight transposed."""

    _version = 2

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: dict[str, Any], *rest: Any
    ) -> None:
        if local_metadata.get("version") in (None, 1):
            state_dict[f"{prefix}weight"] = state_dict[f"{prefix}weight"].t()
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


class Third(Second):
    """Versions before it had the negative bias."""

    _version = 3

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: dict[str, Any], *rest: Any
    ) -> None:
        if local_metadata.get("version") != 3:
            state_dict[f"{prefix}bias"] = -state_dict[f"{prefix}bias"]
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


class Refusing(nn.Linear):
    """Takes no state of another version; it forgets what it has read."""

    _version = 2

    def _load_from_state_dict(
        self, state_dict: Any, prefix: str, local_metadata: dict[str, Any], *rest: Any
    ) -> None:
        if (version := local_metadata.pop("version", None)) != 2:
            raise ValueError(f"expected version 2, got {version}")
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


def expert_of(kind: type[nn.Module], seed: int = 0) -> nn.Module:
    """Return an expert that is of this class, and has a part of it."""
    torch.manual_seed(seed)
    expert = kind(D, D)
    expert.add_module("within", nn.Sequential(nn.ReLU(), kind(D, D)))
    return expert


def renamed(kind: type[nn.Module], name: str = "Net") -> type[nn.Module]:
    """Return the class under another name: checkpoints look at the name."""
    return type(name, (kind,), {})
