"""What a module's parts have in its `state_dict` beside tensors: by `get_extra_state`, and their versions.

What else they put there, by `_save_to_state_dict` or a hook, is refused by name.

A part whose class has raised its `_version` since a checkpoint migrates what is there, as torch lets it: the module
loads it once more, as a `state_dict` of the versions before.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from moe_autograd._metadata import merged, metadata_of, of_versions, with_metadata
from moe_autograd.autograd.offload.flat import lies_in
from moe_autograd.autograd.offload.held_optimizer import is_plain
from moe_autograd.errors import CheckpointError

_USUAL_VERSION = 1  # of a class that has never raised it
_EXTRA_STATE = "_extra_state"  # the end of its keys in a `state_dict`
_SAVE = ("state_dict", "_save_to_state_dict")  # a module's methods


class ExtraState:
    """The extra state of an expert, by the names of its parts that have some, and its parts' versions.

    Args:
        name: the expert's.
        module: the expert.
    """

    def __init__(self, name: str, module: nn.Module) -> None:
        self._name, self._module = name, module
        self.parts = {
            path: part
            for path, part in module.named_modules()
            if type(part).get_extra_state is not nn.Module.get_extra_state
        }
        self.versions = {
            path: part._version
            for path, part in module.named_modules(remove_duplicate=False)
            if type(part._version) is int and part._version != _USUAL_VERSION
        }

    @property
    def may_be_some(self) -> bool:
        """Whether parts may have something in their `state_dict` beside parameters and buffers."""
        return bool(self.parts) or any(map(_saves_by_itself, self._module.modules()))

    def to_save(self, flat: Tensor) -> dict[str, Any]:
        """Return it for a checkpoint, while the weights are held and lie in `flat`.

        Raises:
            CheckpointError: it has something that JSON would not give back, or parts save something by other ways.
        """
        self._check_nothing_else(flat)
        found = {path: part.get_extra_state() for path, part in self.parts.items()}
        for path, value in found.items():
            if not is_plain(value):
                raise CheckpointError(
                    f"{self._name}: expected plain values from get_extra_state(), got {type(value).__name__} "
                    f"(part={path!r}). Register tensors as buffers, and save the rest yourself."
                )
        return found

    def _check_nothing_else(self, flat: Tensor) -> None:
        """Raise `CheckpointError` for what a `state_dict` has of neither tensors, under whatever names, nor this."""
        if not any(map(_saves_by_itself, self._module.modules())):
            return
        parameters = nn.Module.named_parameters(self._module, remove_duplicate=False)
        known = {n for n, _ in (*parameters, *nn.Module.named_buffers(self._module, remove_duplicate=False))}
        for key, value in self._module.state_dict().items():
            is_ours = key in known or key.rpartition(".")[2] == _EXTRA_STATE
            if not is_ours and not (
                isinstance(value, Tensor) and (lies_in(value, flat) or not value.numel())
            ):
                raise CheckpointError(
                    f"{self._name}: expected state_dict() with parameters, buffers and what get_extra_state() returns, "
                    f"got {type(value).__name__} beside these (key={key!r}), by _save_to_state_dict() or a hook. "
                    "Register it as a buffer, or return it from get_extra_state()."
                )

    def check(self, folder: Path, saved: Mapping[str, Any]) -> None:
        """Raise `CheckpointError` unless a checkpoint has it of the parts that have some."""
        if saved.keys() != self.parts.keys():
            raise CheckpointError(
                f"{folder}: {self._name}: expected extra state of the parts {[*self.parts]}, got it of {[*saved]}. "
                "Build the experts as those that were saved."
            )

    def is_in(self, options: Mapping[str, Any]) -> bool:
        """Whether a checkpoint has something to `restore`."""
        return bool(self.parts) or self._saved_versions(options) != self.versions

    def restore(self, options: Mapping[str, Any]) -> None:
        """Give the parts what a checkpoint has that was checked, while its weights are held, which they may change.

        Raises:
            CheckpointError: they do not take weights of the versions that were saved.
        """
        saved = options.get("extra_state", {})
        if (versions := self._saved_versions(options)) == self.versions:
            for path, value in saved.items():
                self.parts[path].set_extra_state(value)
            return
        state = self._module.state_dict()
        given = {
            key: value.detach().clone() if isinstance(value, Tensor) else value
            for key, value in state.items()
        }
        saved_of = {self.parts[path]: value for path, value in saved.items()}
        given |= {
            f"{path}.{_EXTRA_STATE}".removeprefix("."): saved_of[part]
            for path, part in self._module.named_modules(remove_duplicate=False)
            if part in saved_of
        }
        before = of_versions(
            {path: versions.get(path, _USUAL_VERSION) for path in {**self.versions, **versions}}
        )
        try:
            self._module.load_state_dict(with_metadata(given, merged(metadata_of(state), before)))
        except Exception as error:  # whatever a user's module raises
            raise CheckpointError(
                f"{self._name}: expected a module that takes weights of the versions {versions}, got {error}. "
                "Build the experts as those that were saved."
            ) from error

    def _saved_versions(self, options: Mapping[str, Any]) -> dict[str, int]:
        versions: dict[str, int] = options.get("versions", self.versions)
        return versions


def _saves_by_itself(part: nn.Module) -> bool:
    """Whether something of a user's decides what is in its `state_dict`."""
    own, kind = vars(part), type(part)
    is_replaced = any(name in own or getattr(kind, name) is not getattr(nn.Module, name) for name in _SAVE)
    return is_replaced or bool(part._state_dict_hooks)
