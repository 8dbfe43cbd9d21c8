"""The weights of an expert from outside: copied out, checked, and set, between its other calls."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from experts_server.hosted import HostedExpert
from moe_autograd.errors import InvalidCallError
from moe_autograd.wire import experts_pb2 as pb

SPARE_BYTES, SPARE_ENTRIES = (
    1 << 20,
    64,
)  # so that a state that is slightly wrong is told what is wrong with it


def copy_state(hosted: HostedExpert) -> dict[str, Tensor]:
    """Return a copy of the module's `state_dict`, on the CPU; entries that are no tensors are left out."""
    state = hosted.module.state_dict()
    return {key: value.detach().cpu().clone() for key, value in state.items() if isinstance(value, Tensor)}


def check_size(hosted: HostedExpert, state: Mapping[str, Tensor]) -> None:
    """Raise `InvalidCallError` as soon as what has come is more than this expert can be, before more of it comes."""
    own = [value for value in hosted.module.state_dict().values() if isinstance(value, Tensor)]
    allowed = 2 * sum(value.nbytes for value in own) + SPARE_BYTES
    given = sum(value.nbytes for value in state.values())
    if given > allowed or len(state) > 2 * len(own) + SPARE_ENTRIES:
        raise InvalidCallError(
            f"state of expert {hosted.name!r}: expected about {len(own)} entries of {allowed} bytes at most, got "
            f"{len(state)} of {given} and more to come. Use a state of the same class and arguments."
        )


def check_state(hosted: HostedExpert, state: Mapping[str, Tensor]) -> InvalidCallError | None:
    """Return what is wrong with `state` for this expert, naming both sides, if anything is."""
    own = {key: value for key, value in hosted.module.state_dict().items() if isinstance(value, Tensor)}
    if own.keys() != state.keys():
        missing, unknown = sorted(own.keys() - state.keys()), sorted(state.keys() - own.keys())
        return InvalidCallError(
            f"state of expert {hosted.name!r}: expected keys {sorted(own)}, got {sorted(state)} "
            f"(missing={missing}, unknown={unknown}). Use a state of the same class and arguments."
        )
    for key, value in own.items():
        if value.shape != state[key].shape or value.dtype != state[key].dtype:
            return InvalidCallError(
                f"state of expert {hosted.name!r}, {key!r}: expected {tuple(value.shape)} of {value.dtype}, got "
                f"{tuple(state[key].shape)} of {state[key].dtype}. Use a state of the same class and arguments."
            )
    return None


def load_state(hosted: HostedExpert, state: Mapping[str, Tensor], update: pb.StateUpdate) -> int:
    """Set the weights, once for each (client, sequence); kept graphs go, since they are of other weights."""
    if hosted.ledger.find(update.client_id, update.sequence, update.settled_below) is None:
        with torch.no_grad():
            hosted.module.load_state_dict(dict(state))
        hosted.kept.remove_graphs()
        hosted.ledger.record(update.client_id, update.sequence, hosted.num_updates)
    return hosted.num_updates
