"""What objects hold that are no pytrees (dataclasses, distributions): their attributes, and containers among these.

Nothing that their classes define is to run: so a frozen object, too, can be given another tensor for one that it holds,
and stays the object that it is for whoever knows it.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.utils._pytree import tree_leaves, tree_map_only

from moe_autograd.autograd.reaching import has_history

HOLDS_NOTHING = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    type(None),
    type,
    types.ModuleType,
    types.BuiltinFunctionType,
)
# Tensors, and what may lead to a whole program.
_NOT_LOOKED_INTO = (
    Tensor,
    *HOLDS_NOTHING,
    torch.nn.Module,
    types.FunctionType,
    types.MethodType,
    functools.partial,
    Node,
)
_ITEMS: dict[Any, Callable[[Any], Iterable[tuple[Any, Any]]]] = {
    dict: lambda held: tuple(dict.items(held)),  # at once: other threads may change them meanwhile
    list: lambda held: enumerate(tuple(list.__iter__(held))),
    collections.deque: lambda held: enumerate(tuple(collections.deque.__iter__(held))),
}


class Place(NamedTuple):
    """Where something is held; `put(owner, key, other)` puts something else there."""

    put: Callable[[Any, Any, Any], None]
    owner: Any
    key: Any
    value: Any


def may_hold(value: object) -> bool:
    """Whether a value is to be looked into."""
    return not _is(value, _NOT_LOOKED_INTO)


def attributes_of(value: object) -> list[Place]:
    """Return the attributes of an object, slots of its bases included."""
    found = list[Place]()
    with contextlib.suppress(AttributeError):  # it has slots alone
        own = object.__getattribute__(value, "__dict__")
        if isinstance(own, dict):
            found += [Place(dict.__setitem__, own, name, held) for name, held in _ITEMS[dict](own)]
    for kind in type(value).__mro__:
        for slot in kind.__dict__.values() if "__slots__" in kind.__dict__ else ():
            if isinstance(slot, types.MemberDescriptorType):
                with contextlib.suppress(AttributeError):  # nothing is in it
                    found.append(Place(types.MemberDescriptorType.__set__, slot, value, slot.__get__(value)))
    return found


def tensors_in_objects(values: Iterable[object]) -> Iterator[tuple[object, Tensor]]:
    """Yield the tensors that objects among `values` hold, and objects that these lead to; each with its holder."""
    to_visit = [one for value in values for one in _out_of_tuples(value) if may_hold(one)]
    seen = set(map(id, to_visit))
    for holder in to_visit:  # grows
        for place in _places_in(holder):
            for held in _out_of_tuples(place.value):
                if _is(held, Tensor):
                    yield holder, held
                elif id(held) not in seen and may_hold(held):
                    seen.add(id(held))
                    to_visit.append(held)


def with_tensors_in_objects(tree: Any) -> list[object]:
    """Return the leaves of a pytree, and the tensors that objects among them hold."""
    leaves = tree_leaves(tree)
    return [*leaves, *[tensor for _, tensor in tensors_in_objects(leaves)]]


class InObjects:
    """The tensors with history in objects that a call returned.

    Args:
        values: what it returned; mostly tensors.
        own: returns those of some tensors that are the call's.

    Attributes:
        tensors: each once.
    """

    def __init__(self, values: Iterable[object], own: Callable[[list[Tensor]], list[Tensor]]) -> None:
        found = [both for both in tensors_in_objects(values) if has_history(both[1])]
        self._holders = list({id(holder): holder for holder, _ in found}.values())
        self.tensors = own(list({id(tensor): tensor for _, tensor in found}.values()))

    def exchange(self, values: list[Any]) -> list[Any]:
        """Let the objects hold other tensors, the last of `values`, instead of theirs; return the other values."""
        count = len(values) - len(self.tensors)
        both = zip(self.tensors, values[count:], strict=True)
        others = {id(tensor): other for tensor, other in both if other is not tensor}
        for holder in self._holders:
            for put, owner, key, held in _places_in(holder):
                other = _exchanged(held, others)
                if other is not held:
                    put(owner, key, other)
        return values[:count]


def _places_in(holder: Any) -> list[Place]:
    places = attributes_of(holder)
    for kind, items in _ITEMS.items():
        if _is(holder, kind):
            places += [Place(kind.__setitem__, holder, key, held) for key, held in items(holder)]
    return places


def _out_of_tuples(value: object) -> Sequence[Any]:
    """Return what is in nested tuples, which cannot be changed; anything else as it is."""
    return (value,) if _is_no_tuple(value) else tree_leaves(value, is_leaf=_is_no_tuple)


def _exchanged(held: object, others: Mapping[int, Tensor]) -> object:
    if all(id(one) not in others for one in _out_of_tuples(held)):
        return held
    return tree_map_only(Tensor, lambda one: others.get(id(one), one), held, is_leaf=_is_no_tuple)


def _is_no_tuple(value: object) -> bool:
    return not _is(value, tuple)


def _is(value: object, kinds: Any) -> bool:
    return issubclass(
        type(value), kinds
    )  # `isinstance` would ask the value for its `__class__`, as mocks have one
