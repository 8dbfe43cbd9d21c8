"""What `OffloadedExperts` refuses before it does anything: options, hooks, shared tensors, too little room, forks."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence

from torch import Tensor, nn
from torch.utils.weak import WeakTensorKeyDictionary

from moe_autograd.autograd.offload.parts import Part


def check_choices(
    num_microbatches: int | None, update: str, max_resident_bytes: int | None, beside: object | None
) -> None:
    """Raise `ValueError` for options that make no sense."""
    if num_microbatches is not None and num_microbatches < 1:
        raise ValueError(
            f"OffloadedExperts: expected num_microbatches of at least 1 or None, got {num_microbatches}."
        )
    if (max_resident_bytes is None) == (beside is None):
        raise ValueError(
            "OffloadedExperts: expected max_resident_bytes or beside, got "
            f"max_resident_bytes={max_resident_bytes} and beside={beside!r}. Pass one of them."
        )
    if update not in ("on_step", "on_backward"):
        raise ValueError(f"OffloadedExperts: expected update='on_step' or 'on_backward', got {update!r}.")


def check_hooks(name: str, module: nn.Module) -> None:
    """Raise `ValueError` for hooks that would never run: nothing is accumulated in `.grad`."""
    for parameter_name, parameter in module.named_parameters():
        hooks = parameter._post_accumulate_grad_hooks  # a dict or None
        if hooks:
            raise ValueError(
                f"OffloadedExperts: expected no post-accumulate-grad hooks, got {len(hooks)} on {parameter_name} of "
                f"{name}, whose gradients are not in .grad. Remove them; update='on_backward' updates in the backward."
            )


def check_fits(parts: Sequence[Part], limit_bytes: int) -> None:
    """Raise `ValueError` if these parts can never be held together."""
    needed = sum(part.layout.num_bytes for part in parts)
    if needed > limit_bytes:
        sizes = ", ".join(f"{part.name}: {part.layout.num_bytes}" for part in parts)
        raise ValueError(
            f"OffloadedExperts: expected max_resident_bytes of at least {needed}, what one expert needs at once "
            f"({sizes}), got {limit_bytes}. Allow more, or make experts or micro-batches smaller."
        )


def check_process(process: int) -> None:
    """Raise `RuntimeError` in a fork: it has none of the threads, and would write over its parent's files."""
    if process != os.getpid():
        raise RuntimeError(
            f"OffloadedExperts: expected process {process}, which built them, got {os.getpid()}, its fork. Build them "
            "in the fork."
        )


_owners: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # which tensor of which expert a tensor is


def check_own(name: str, tensors: Mapping[str, Tensor]) -> None:
    """Raise `ValueError` for tensors that another expert has: one would take away what the other computes with."""
    for tensor_name, tensor in tensors.items():
        if tensor in _owners:
            raise ValueError(
                f"{name}: expected tensors of its own, got {tensor_name}, which is {_owners[tensor]}. Give each expert "
                "a copy (copy.deepcopy), or apply what they share outside of them."
            )


def note_owner(name: str, tensors: Mapping[str, Tensor]) -> None:
    """Remember whose these tensors are, as long as they are there."""
    for tensor_name, tensor in tensors.items():
        _owners[tensor] = f"{tensor_name} of {name}"
