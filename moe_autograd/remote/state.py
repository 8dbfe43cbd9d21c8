"""The weights of hosted experts, streamed tensor by tensor: fetched, and set."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import grpc
from torch import Tensor

from moe_autograd.errors import CorruptDataError
from moe_autograd.remote.channel import Channel, error_of_call
from moe_autograd.remote.deadline import Deadline
from moe_autograd.remote.fanout import Cancellation
from moe_autograd.wire import experts_pb2 as pb
from moe_autograd.wire.framing import seal
from moe_autograd.wire.parcels import Parcel, ParcelReader, ParcelWriter
from moe_autograd.wire.tensors import TensorLimits

State = dict[str, Tensor]


def fetch_states(
    channel: Channel,
    names: Sequence[str],
    deadline: Deadline,
    limits: TensorLimits,
    cancellation: Cancellation,
) -> dict[str, State]:
    """Return the `state_dict` of each of the named experts of one server."""
    place = f"server at {channel.address}, state_dict"
    states: dict[str, State] = {name: {} for name in names}
    stream = channel.stream("GetState", seal(pb.GetStateRequest(experts=names)), None, deadline)
    cancellation.add(stream.cancel)
    reader = ParcelReader(limits)
    try:
        for message in stream:
            _put(states, reader.feed(message))
        reader.finish()
    except grpc.RpcError as error:
        channel.note_failure(error)
        raise error_of_call(error, f"{place}, {deadline}") from error
    except CorruptDataError as error:
        raise CorruptDataError(f"{place}, {deadline}: {error}") from error
    finally:
        stream.cancel()
        cancellation.remove(stream.cancel)
    return states


def _put(states: dict[str, State], parcels: Iterable[Parcel]) -> None:
    for parcel in parcels:
        head = parcel.head
        if parcel.error is not None:
            raise CorruptDataError(str(parcel.error)) from parcel.error
        if not isinstance(head, pb.StateEntry) or head.expert not in states or len(parcel.tensors) != 1:
            raise CorruptDataError(f"state: expected a tensor of one of {sorted(states)}, got {head!r}.")
        (tensor,) = parcel.tensors
        if tensor is None:
            raise CorruptDataError(
                f"state of expert {head.expert!r}, {head.key!r}: expected a tensor, got None."
            )
        states[head.expert][head.key] = tensor


def send_states(
    channel: Channel, states: Mapping[str, Mapping[str, Tensor]], update: pb.StateUpdate, deadline: Deadline
) -> pb.UpdateReply:
    """Set the `state_dict` of each of these experts of one server: all of them, or, where one does not fit, none.

    Args:
        channel: to the server.
        states: by name, complete.
        update: who asks, and the sequence number.
        deadline: of all of it.
    """
    writer = ParcelWriter()
    head = pb.StateUpdate(num_entries=sum(map(len, states.values())))
    head.MergeFrom(update)
    writer.add(head)
    for name, state in states.items():
        for key, tensor in state.items():
            writer.add(pb.StateEntry(expert=name, key=key), [tensor])
    return channel.upload("SetState", iter(writer.next_message, None), pb.UpdateReply, deadline)


def split_by_expert(state_dict: Mapping[str, Tensor], names: Iterable[str]) -> dict[str, State]:
    """Return the part of a `state_dict` that belongs to each expert, by name.

    Raises:
        KeyError: a key belongs to none.
    """
    longest_first = sorted(names, key=len, reverse=True)
    states: dict[str, State] = {}
    for key, tensor in state_dict.items():
        name = next((name for name in longest_first if key.startswith(f"{name}.")), None)
        if name is None:
            raise KeyError(f"state_dict: expected keys of the form '<expert>.<key>', got {key!r}.")
        states.setdefault(name, {})[key.removeprefix(f"{name}.")] = tensor
    return states
