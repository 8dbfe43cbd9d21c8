"""The weights of hosted experts, streamed tensor by tensor: fetched, and set.

What a server sends is taken only if it has the keys, dtypes and shapes that it told when it was asked what it hosts:
another state would be saved, and be missed when it is loaded. What the values are, only the server knows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import SimpleNamespace

import grpc
from torch import Tensor

from moe_autograd.errors import CorruptDataError
from moe_autograd.remote.channel import Channel
from moe_autograd.remote.deadline import Deadline
from moe_autograd.remote.fanout import Cancellation
from moe_autograd.remote.forking import GATE, Passage
from moe_autograd.remote.streaming import streaming
from moe_autograd.wire import experts_pb2 as pb
from moe_autograd.wire.framing import seal
from moe_autograd.wire.layouts import mismatch
from moe_autograd.wire.parcels import Parcel, ParcelReader, ParcelWriter
from moe_autograd.wire.tensors import TensorLimits

State = dict[str, Tensor]


def fetch_states(
    channel: Channel,
    layouts: Mapping[str, pb.StateLayout],
    deadline: Deadline,
    limits: TensorLimits,
    cancellation: Cancellation,
) -> dict[str, State]:
    """Return the `state_dict` of some experts of one server.

    Args:
        channel: to the server.
        layouts: of each expert's state, by name, as its server said when it was asked what it hosts.
        deadline: of all of it.
        limits: of what the server sends.
        cancellation: of the operation.

    Raises:
        CorruptDataError: a state is not whole.
    """
    with GATE.passage(may_interrupt=True) as passage:
        states = _fetch(channel, layouts, deadline, limits, cancellation, passage)
    if states is None:
        with GATE.passage() as passage:
            states = _fetch(channel, layouts, deadline, limits, cancellation, passage)
    assert states is not None, "only a fork interrupts it"
    return states


def _fetch(
    channel: Channel,
    layouts: Mapping[str, pb.StateLayout],
    deadline: Deadline,
    limits: TensorLimits,
    cancellation: Cancellation,
    passage: Passage,
) -> dict[str, State] | None:
    """Do so; return None if a fork of this process interrupts it."""
    place = f"server at {channel.address}, state_dict"
    request = seal(pb.GetStateRequest(experts=layouts))
    reader, arrivals = ParcelReader(limits), _Arrivals(layouts)
    try:
        with streaming(
            channel,
            "GetState",
            request,
            None,
            deadline=deadline,
            passage=passage,
            cancellation=cancellation,
        ) as stream:
            for message in stream:
                for parcel in reader.feed(message):
                    arrivals.put(parcel)
            reader.finish()
            return arrivals.complete()
    except grpc.RpcError as error:
        if passage.is_interrupted:
            return None
        channel.note_failure(error)
        raise channel.error_of_call(error, f"{place}, {deadline}") from error
    except CorruptDataError as error:
        raise CorruptDataError(f"{place}, {deadline}: {error}") from error.__cause__ or error


class _Arrivals:
    """States as they arrive, expert by expert: each the number of its entries, and then so many.

    Args:
        layouts: of each expert that was asked for, in this order.
    """

    def __init__(self, layouts: Mapping[str, pb.StateLayout]) -> None:
        self._layouts = layouts
        self._to_come = list(layouts)[::-1]
        self._num_left = 0
        self._states: dict[str, State] = {}
        self._name = ""

    def put(self, parcel: Parcel) -> None:
        """Take what has come; raises `CorruptDataError` if it should not have."""
        if parcel.error is not None:
            raise CorruptDataError(str(parcel.error)) from parcel.error
        head = parcel.head
        if isinstance(head, pb.StateUpdate) and self._num_left == 0 and self._to_come:
            self._name, self._num_left = self._to_come.pop(), head.num_entries
            self._states[self._name] = {}
        elif isinstance(head, pb.StateEntry) and self._is_next(head) and len(parcel.tensors) == 1:
            (tensor,) = parcel.tensors
            if tensor is None:
                raise CorruptDataError(f"expert {self._name!r}, {head.key!r}: expected a tensor, got None.")
            self._num_left -= 1
            self._states[self._name][head.key] = tensor
        else:
            expected = (
                f"{self._num_left} more entries of expert {self._name!r}" if self._num_left else "no more"
            )
            raise CorruptDataError(f"expected {expected}, got {head!r} with {len(parcel.tensors)} tensors.")

    def _is_next(self, head: pb.StateEntry) -> bool:
        return self._num_left > 0 and head.expert == self._name and head.key not in self._states[self._name]

    def complete(self) -> dict[str, State]:
        """Return all states; raises `CorruptDataError` if something has not come."""
        if self._num_left or self._to_come:
            raise CorruptDataError(
                f"expected the states of {len(self._layouts)} experts, got the end with {self._num_left} "
                f"entries of expert {self._name!r} and {len(self._to_come)} experts to come. The server is broken."
            )
        for name, state in self._states.items():
            if (wrong := mismatch(self._layouts[name], state)) is not None:
                raise CorruptDataError(
                    f"expert {name!r}, {wrong}. Has its server another configuration now? Connect anew."
                )
        return self._states


def send_states(
    channel: Channel,
    states: Mapping[str, Mapping[str, Tensor]],
    update: pb.StateUpdate,
    deadline: Deadline,
    cancellation: Cancellation,
) -> pb.UpdateReply:
    """Set the `state_dict` of each of these experts of one server: all of them, or, where one does not fit, none.

    Args:
        channel: to the server.
        states: by name, complete.
        update: who asks, and the sequence number.
        deadline: of all of it.
        cancellation: of the operation.
    """
    for name, state in states.items():
        for key, tensor in state.items():
            if not isinstance(tensor, Tensor):
                raise TypeError(
                    f"expert {name!r}, state of {key!r}: expected a tensor, got {type(tensor).__name__}. "
                    "Take what `state_dict()` returned."
                )
    writer = ParcelWriter()
    head = pb.StateUpdate(num_entries=sum(map(len, states.values())))
    head.MergeFrom(update)
    writer.add(head)
    for name, state in states.items():
        for key, tensor in state.items():
            writer.add(pb.StateEntry(expert=name, key=key), [tensor])
    messages = iter(writer.next_message, None)
    return channel.upload("SetState", messages, pb.UpdateReply, deadline, cancellation)


def places_of(keys: Iterable[str]) -> SimpleNamespace:
    """Return an object with an attribute for each module and tensor that these keys name, and so on within it.

    >>> places_of(["gate.weight", "gate.bias", "scale"]).gate.bias
    namespace()
    """
    inner: dict[str, list[str]] = {}
    for key in keys:
        name, _, rest = key.partition(".")
        inner.setdefault(name, []).extend([rest] if rest else [])
    return SimpleNamespace(**{name: places_of(rest) for name, rest in inner.items()})


def split_by_expert(state_dict: Mapping[str, Tensor], names: Iterable[str]) -> dict[str, State]:
    """Return the part of a `state_dict` that belongs to each expert, by name.

    Raises:
        TypeError: it is no mapping.
        KeyError: a key belongs to no expert.
    """
    if not isinstance(state_dict, Mapping):
        raise TypeError(
            f"state_dict: expected a mapping of tensors, got {type(state_dict).__name__}. "
            "Take what `state_dict()` returned."
        )
    longest_first = sorted(names, key=len, reverse=True)
    states: dict[str, State] = {}
    for key, tensor in state_dict.items():
        name = next((name for name in longest_first if str(key).startswith(f"{name}.")), None)
        if name is None:
            raise KeyError(f"state_dict: expected keys of the form '<expert>.<key>', got {key!r}.")
        states.setdefault(name, {})[key.removeprefix(f"{name}.")] = tensor
    return states
