"""What a module's parts have in its `state_dict` beside tensors, by `get_extra_state`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from moe_autograd.autograd.offload.held_optimizer import is_plain
from moe_autograd.errors import CheckpointError


class ExtraState:
    """The extra state of an expert, by the names of its parts that have some.

    Args:
        name: the expert's.
        module: the expert.
    """

    def __init__(self, name: str, module: nn.Module) -> None:
        self._name = name
        self.parts = {
            path: part
            for path, part in module.named_modules()
            if type(part).get_extra_state is not nn.Module.get_extra_state
        }

    def to_save(self) -> dict[str, Any]:
        """Return it for a checkpoint, while the weights are held.

        Raises:
            CheckpointError: it has something that JSON would not give back.
        """
        found = {path: part.get_extra_state() for path, part in self.parts.items()}
        for path, value in found.items():
            if not is_plain(value):
                raise CheckpointError(
                    f"{self._name}: expected plain values from get_extra_state(), got {type(value).__name__} "
                    f"(part={path!r}). Register tensors as buffers, and save the rest yourself."
                )
        return found

    def check(self, folder: Path, saved: Mapping[str, Any]) -> None:
        """Raise `CheckpointError` unless a checkpoint has it of the parts that have some."""
        if saved.keys() != self.parts.keys():
            raise CheckpointError(
                f"{folder}: {self._name}: expected extra state of the parts {[*self.parts]}, got it of {[*saved]}. "
                "Build the experts as those that were saved."
            )

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Give the parts what a checkpoint has that was checked, while the weights are held, which they may change."""
        for path, value in saved.items():
            self.parts[path].set_extra_state(value)
