"""The weights of hosted experts, streamed tensor by tensor: fetched, and set.

What a server sends is taken only if it has the keys, dtypes and shapes that it told when it was asked what it hosts:
another state would be saved, and be missed when it is loaded. What the values are, only the server knows. States have
the versions of hosted modules beside them, as torch's `_metadata`.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterable, Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from moe_autograd._metadata import (
    metadata_of,
    of_versions,
    path_within,
    paths_in,
    versions_of,
    with_metadata,
)
from moe_autograd.errors import CorruptDataError, listed
from moe_autograd.remote.asking import upload
from moe_autograd.remote.channel import Channel
from moe_autograd.remote.operations import Operation
from moe_autograd.remote.streaming import streaming
from moe_autograd.wire import experts_pb2 as pb
from moe_autograd.wire.framing import seal
from moe_autograd.wire.layouts import mismatch
from moe_autograd.wire.parcels import Parcel, ParcelReader, ParcelWriter
from moe_autograd.wire.tensors import TORCH_DTYPES, check_can_travel

if TYPE_CHECKING:
    from moe_autograd.remote.placement import HostedExpert

State = dict[str, Tensor]


def fetch_states(
    channel: Channel, layouts: Mapping[str, pb.StateLayout], operation: Operation
) -> dict[str, State]:
    """Return the `state_dict` of some experts of one server.

    Args:
        channel: to the server.
        layouts: of each expert's state, by name, as its server said when it was asked what it hosts.
        operation: that it is a part of.

    Raises:
        CorruptDataError: a state is not whole.
    """
    request = seal(pb.GetStateRequest(experts=layouts))
    for may_interrupt in (True, False):
        with channel.our_errors("GetState", operation, may_interrupt=may_interrupt) as passage:
            reader, arrivals = ParcelReader(channel.limits), _Arrivals(layouts)
            with streaming(channel, "GetState", request, None, passage, operation) as stream:
                for message in stream:
                    for parcel in reader.feed(message):
                        arrivals.put(parcel)
            reader.finish()
            return arrivals.complete()
    raise AssertionError("a fork interrupts it once")


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
        self._name, self._keys, self._paths = "", frozenset[str](), set[str]()

    def put(self, parcel: Parcel) -> None:
        """Take what has come; raises `CorruptDataError` if it should not have."""
        if parcel.error is not None:
            raise CorruptDataError(str(parcel.error)) from parcel.error
        head = parcel.head
        if isinstance(head, pb.StateUpdate) and self._num_left == 0 and self._to_come:
            self._name, self._num_left = self._to_come.pop(), head.num_entries
            self._states[self._name] = {}
            self._keys = frozenset(entry.key for entry in self._layouts[self._name].entries)
            self._paths = paths_in(self._keys)
        elif isinstance(head, pb.StateEntry) and self._is_next(head) and len(parcel.tensors) == 1:
            (tensor,) = parcel.tensors
            if tensor is None:
                raise CorruptDataError(f"expert {self._name!r}, {head.key!r}: expected a tensor, got None.")
            self._num_left -= 1
            self._take_versions(head)
            self._states[self._name][head.key] = tensor
        else:
            named = f" {head.key!r} of expert {head.expert!r}" if isinstance(head, pb.StateEntry) else ""
            got = f"{type(head).__name__}{named} with {len(parcel.tensors)} tensors"
            raise CorruptDataError(f"expected {self._expected()}, got {got}. The server is broken.")

    def _take_versions(self, head: pb.StateEntry) -> None:
        if not head.versions:
            return
        state = self._states[self._name]
        if metadata_of(state) or not head.versions.keys() <= self._paths:
            raise CorruptDataError(
                f"expert {self._name!r}, {head.key!r}: expected versions of modules that have entries, and with one "
                f"entry alone, got {len(head.versions)}. The server is broken."
            )
        self._states[self._name] = with_metadata(state, of_versions(head.versions))

    def _expected(self) -> str:
        if self._num_left:
            return f"{self._num_left} more entries of expert {self._name!r}"
        return f"the state of expert {self._to_come[-1]!r}" if self._to_come else "no more"

    def _is_next(self, head: pb.StateEntry) -> bool:
        is_new = head.key in self._keys and head.key not in self._states[self._name]
        return self._num_left > 0 and head.expert == self._name and is_new

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


def tell_of_left_out(hosted: Iterable[HostedExpert], told: set[tuple[str, ...]]) -> None:
    """Warn of what is no tensor in the states of these experts: it stays on servers.

    Args:
        hosted: what servers say of them.
        told: classes and keys that this was said of; it is said once of each.
    """
    for expert in hosted:
        kind = (expert.kind, *expert.layout.left_out)
        if expert.layout.left_out and kind not in told:
            told.add(kind)
            warnings.warn(
                f"expert {expert.name!r}, state_dict: expected tensors alone, got something else under "
                f"{listed(expert.layout.left_out)} (kind={expert.kind!r}). That stays on its server, and is not in the "
                "state. Register tensors as buffers, and save the rest yourself.",
                stacklevel=2,
            )


def as_hosted(state: Mapping[str, Tensor], layout: pb.StateLayout) -> State:
    """Return a state with its tensors in the dtypes of the expert's, as `load_state_dict` of torch converts them."""
    dtypes = {entry.key: TORCH_DTYPES.get(entry.dtype) for entry in layout.entries}

    def converted(key: str, tensor: Tensor) -> Tensor:
        dtype = dtypes.get(key)
        return tensor.detach().to(dtype) if dtype is not None and isinstance(tensor, Tensor) else tensor

    return with_metadata({key: converted(key, tensor) for key, tensor in state.items()}, metadata_of(state))


def send_states(
    channel: Channel, states: Mapping[str, Mapping[str, Tensor]], update: pb.StateUpdate, operation: Operation
) -> pb.UpdateReply:
    """Set the `state_dict` of each of these experts of one server: all of them, or, where one does not fit, none.

    Args:
        channel: to the server.
        states: by name, complete.
        update: who asks, and the sequence number.
        operation: that it is a part of.

    Raises:
        TypeError: what is given is no tensor, or one that cannot travel; nothing was sent then.
    """
    writer = ParcelWriter()
    head = pb.StateUpdate(num_entries=sum(map(len, states.values())))
    head.MergeFrom(update)
    writer.add(head)
    for name, state in states.items():
        versions = versions_of(state)
        for key, tensor in state.items():
            if not isinstance(tensor, Tensor):
                raise TypeError(
                    f"expert {name!r}, state of {key!r}: expected a tensor, got {type(tensor).__name__}. "
                    "Take what `state_dict()` returned."
                )
            try:
                check_can_travel(tensor)
            except TypeError as error:
                raise TypeError(f"expert {name!r}, state of {key!r}: {error}") from error
            writer.add(pb.StateEntry(expert=name, key=key, versions=versions), [tensor])
            versions = {}
    messages = iter(writer.next_message, None)
    return upload(channel, "SetState", messages, pb.UpdateReply, operation)


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


def check_apart(hosted: Mapping[str, HostedExpert]) -> None:
    """Refuse experts of which one has keys that begin with another one's name: nobody could say whose these are.

    Raises:
        ValueError: naming both.
    """
    for inner in hosted:
        outer = inner
        while outer := outer.rpartition(".")[0]:
            if outer not in hosted:
                continue
            keys = [f"{outer}.{entry.key}" for entry in hosted[outer].layout.entries]
            if (shared := next((key for key in keys if key.startswith(f"{inner}.")), None)) is not None:
                raise ValueError(
                    f"experts {outer!r} and {inner!r}: expected no key of the first to begin with the name of the "
                    f"second, got {shared!r}. Use the state_dict() and load_state_dict() of each of the two."
                )


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
    known = set(names)
    states: dict[str, State] = {}
    for key, tensor in state_dict.items():
        name = _expert_of(str(key).rpartition(".")[0], known)
        if not name:
            raise KeyError(f"state_dict: expected keys of the form '<expert>.<key>', got {key!r}.")
        states.setdefault(name, {})[key.removeprefix(f"{name}.")] = tensor
    metadata: dict[str, dict[str, Any]] = {name: {} for name in states}
    for path, values in metadata_of(state_dict).items():
        if (name := _expert_of(path, known)) in metadata:
            metadata[name][path.removeprefix(name).removeprefix(".")] = values
    return {name: with_metadata(state, metadata[name]) for name, state in states.items()}


def joined_states(states: Mapping[str, State]) -> State:
    """Return one `state_dict` of the states of some experts, by name, of which `split_by_expert` makes these again."""
    joined = {f"{name}.{key}": tensor for name, state in states.items() for key, tensor in state.items()}
    metadata = {
        path_within(f"{name}.", path): values
        for name, state in states.items()
        for path, values in metadata_of(state).items()
    }
    return with_metadata(joined, metadata)


def _expert_of(path: str, known: Collection[str]) -> str:
    """Return the longest name of an expert that is this path or holds it, or none: names and keys have dots."""
    while path and path not in known:
        path = path.rpartition(".")[0]
    return path
