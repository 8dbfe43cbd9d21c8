"""The weights of an expert from outside: copied out, checked, and set, between its other calls."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from experts_server.hosting.hosted import HostedExpert
from experts_server.hosting.loading import keeping_parameters
from moe_autograd._metadata import merged, metadata_of, of_versions, paths_in, with_metadata
from moe_autograd.errors import ConfigError, ExpertFailedError, InvalidCallError, listed
from moe_autograd.wire import experts_pb2 as pb
from moe_autograd.wire.layouts import layout_of, mismatch, num_bytes
from moe_autograd.wire.status import told
from moe_autograd.wire.tensors import check_can_travel

# So that a state that is slightly wrong is told what is wrong with it.
SPARE_BYTES, SPARE_ENTRIES = 1 << 20, 64


def layout_of_expert(hosted: HostedExpert) -> pb.StateLayout:
    """Return the layout of what `copy_state` returns.

    Raises:
        ConfigError: the module's `state_dict` fails.
    """
    try:
        state = hosted.module.state_dict()
        return layout_of(tensors := _tensors_in(state), [key for key in state if key not in tensors])
    except Exception as error:
        raise ConfigError(
            f"expert {hosted.name!r}: expected the tensors of its state_dict, by which clients know its weights, got "
            f"{told(error)}. Host a module that can be saved."
        ) from error


def copy_state(hosted: HostedExpert) -> dict[str, Tensor]:
    """Return a copy of the module's `state_dict`, on the CPU; entries that are no tensors are left out.

    It has the versions of the module's parts, as torch's `_metadata`.
    """
    return _copies(_tensors(hosted))


def state_to_send(hosted: HostedExpert, layout: pb.StateLayout) -> dict[str, Tensor]:
    """Return what `copy_state` returns.

    Args:
        hosted: the expert.
        layout: of its state, as clients were told: they would take no other for whole.

    Raises:
        InvalidCallError: one of the tensors cannot travel, or the state has other keys or shapes by now.
    """
    tensors = _tensors(hosted)
    for key, tensor in tensors.items():
        try:
            check_can_travel(tensor)
        except TypeError as error:
            raise InvalidCallError(f"expert {hosted.name!r}, state of {key!r}: {error}") from error
    if (wrong := mismatch(layout, tensors)) is not None:
        raise InvalidCallError(
            f"expert {hosted.name!r}, state of another form than when its server started: {wrong}. Have its class "
            "make all entries, in their shapes, when it is built."
        )
    return _copies(tensors)


def _copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    copies = {key: value.detach().cpu().clone() for key, value in tensors.items()}
    return with_metadata(copies, metadata_of(tensors))


def _tensors(hosted: HostedExpert) -> dict[str, Tensor]:
    return _tensors_in(hosted.module.state_dict())


def _tensors_in(state: Mapping[str, Any]) -> dict[str, Tensor]:
    tensors = {key: value for key, value in state.items() if isinstance(value, Tensor)}
    return with_metadata(tensors, metadata_of(state))


class ComingState:
    """What a client is about to set of one expert, as far as it has come.

    Args:
        name: the expert's.
        layout: of its state.
    """

    def __init__(self, name: str, layout: pb.StateLayout) -> None:
        self._name, self._layout = name, layout
        self._num_bytes, self._most_bytes = 0, 2 * num_bytes(layout) + SPARE_BYTES
        self._come: dict[str, Tensor] = {}
        self._versions: dict[str, int] | None = None

    def add(self, entry: pb.StateEntry, tensor: Tensor | None) -> None:
        """Take an entry; raises `InvalidCallError` as soon as more has come than this expert can be."""
        if tensor is None:
            raise self._refused("expected a tensor, got None.")
        if entry.key in self._come:
            raise self._refused(f"expected each key once, got {entry.key!r} again. The client is broken.")
        if entry.versions:
            if self._versions is not None:
                got = f"got some again with {entry.key!r}. The client is broken."
                raise self._refused(f"expected versions with one entry alone, {got}")
            self._versions = dict(entry.versions)
        self._come[entry.key] = tensor
        self._num_bytes += tensor.nbytes
        num_known = len(self._layout.entries)
        if self._num_bytes > self._most_bytes or len(self._come) > 2 * num_known + SPARE_ENTRIES:
            raise self._refused(
                f"expected about {num_known} entries of {self._most_bytes} bytes at most, got {len(self._come)} of "
                f"{self._num_bytes} and more to come. Use a state of the same class and arguments."
            )

    def whole(self) -> dict[str, Tensor]:
        """Return it with the versions of modules that the expert has; `InvalidCallError` if it is another's."""
        wrong = mismatch(self._layout, self._come)
        if wrong is not None:
            raise self._refused(f"{wrong}. Use a state of the same class and arguments.")
        if self._versions is None:
            return self._come
        known = paths_in(own.key for own in self._layout.entries)
        versions = {path: version for path, version in self._versions.items() if path in known}
        return with_metadata(self._come, of_versions(versions))

    def _refused(self, what: str) -> InvalidCallError:
        return InvalidCallError(f"state of expert {self._name!r}: {what}")


def load_state(hosted: HostedExpert, state: Mapping[str, Tensor], update: pb.StateUpdate) -> int:
    """Set all weights or none, once for each (client, sequence); kept graphs go, since they are of other weights.

    Raises:
        InvalidCallError: the module has other entries by now.
        ExpertFailedError: it does not take them.
    """
    if hosted.ledger.find(update.client_id, update.sequence, update.settled_below) is None:
        before = copy_state(hosted)
        if before.keys() != state.keys():
            raise InvalidCallError(
                f"state of expert {hosted.name!r}: expected a module that has the entries with which its server "
                f"started, got others: {listed(sorted(before.keys() ^ state.keys())[:4])}. Have its class make all "
                "entries when it is built."
            )
        try:
            _load(hosted, state)
        except Exception as error:  # torch raises when it has set what it could
            with contextlib.suppress(Exception):  # the same once more: it sets what it had set
                _load(hosted, before)
            raise ExpertFailedError(
                f"state of expert {hosted.name!r}: expected a module that takes other weights, got "
                f"{in_one_line(error)}. It has those from before."
            ) from error
        finally:
            hosted.kept.remove_graphs()
        hosted.ledger.record(update.client_id, update.sequence, hosted.num_updates)
    return hosted.num_updates


def _load(hosted: HostedExpert, state: Mapping[str, Tensor]) -> None:
    with torch.no_grad(), keeping_parameters(hosted.module):
        # a state without versions counts as one of the class as it is now
        own = metadata_of(hosted.module.state_dict())
        given = with_metadata(state, merged(own, metadata_of(state)))
        # all keys are there, but for what is no tensor: that has not travelled, and stays
        hosted.module.load_state_dict(given, strict=False)


def in_one_line(error: Exception) -> str:
    """Return what `load_state_dict` raised, of which torch makes a list, as a part of a sentence."""
    return " ".join(told(error).split()).rstrip(".")
