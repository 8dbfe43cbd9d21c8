"""Whose tensor is which: no two offloaded experts may have one tensor, or tensors in the same memory."""

from __future__ import annotations

from collections.abc import Mapping
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

_owners: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # which tensor of which expert a tensor is
# Whose tensor lay where, by its storage, as long as somebody holds that, and its address.
Places = WeakKeyDictionary[torch.UntypedStorage, dict[int, str]]


def check_own(name: str, tensors: Mapping[str, Tensor], others: Places) -> None:
    """Raise `ValueError` for tensors that another expert has: one would take away what the other computes with.

    And for those that begin at the same place in memory, also where `others` that were taken over with this one lay:
    each would get its own, and no longer see how the other changes.
    """
    places: dict[int, str] = {}
    for tensor_name, tensor in tensors.items():
        other = places.setdefault(tensor.data_ptr(), tensor_name)
        if other != tensor_name and tensor.numel():
            raise ValueError(
                f"{name}: expected each tensor in memory of its own, got {tensor_name} and {other} in the same. Let "
                "them be one parameter (a.weight = b.weight), or clone one."
            )
        owner = _owners.get(tensor) or others.get(tensor.untyped_storage(), {}).get(tensor.data_ptr())
        if owner is not None:
            raise ValueError(
                f"{name}: expected tensors of its own, got {tensor_name}, which is {owner}. Give each expert "
                "a copy (copy.deepcopy), or apply what they share outside of them."
            )


def note_owner(name: str, tensors: Mapping[str, Tensor], lay: Mapping[str, Tensor], places: Places) -> None:
    """Remember whose these tensors are, as long as they are there, and in `places` where they `lay`."""
    for tensor_name, tensor in tensors.items():
        _owners[tensor] = f"{tensor_name} of {name}"
        before = lay[tensor_name]
        if before.numel():
            places.setdefault(before.untyped_storage(), {})[before.data_ptr()] = _owners[tensor]


def note_successor(before: Tensor, now: Tensor) -> None:
    """Remember that a tensor has taken the place of another one."""
    _owners[now] = _owners.pop(before)
