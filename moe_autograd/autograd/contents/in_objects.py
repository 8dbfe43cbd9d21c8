"""What objects hold that are no pytrees (dataclasses, distributions): their attributes, and containers among these.

So do tensors: what users have put on them are the notes on a tensor.

Nothing that their classes define is to run: so a frozen object, too, can be given another tensor for one that it holds,
and stays the object that it is for whoever knows it.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import logging
import operator
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.utils._pytree import TreeSpec, is_structseq_class, tree_flatten

from moe_autograd.autograd.contents.leaves import PLAIN_VALUES
from moe_autograd.autograd.contents.reaching import at_once, has_history

HOLDS_NOTHING: tuple[type, ...] = (*PLAIN_VALUES, type, types.ModuleType, types.BuiltinFunctionType)
# What may lead to a whole program.
_NOT_LOOKED_INTO = (
    *HOLDS_NOTHING,
    torch.nn.Module,
    types.FunctionType,
    types.MethodType,
    functools.partial,
    logging.Logger,
    Node,
)
# Read at once, as other threads may change them meanwhile.
_ITEMS: dict[Any, Callable[[Any], Iterable[tuple[Any, Any]]]] = {
    dict: lambda held: [] if _are_plain(at_once(dict.values, held)) else at_once(dict.items, held),
    list: lambda held: _numbered(tuple(list.__iter__(held))),
    collections.deque: lambda held: _numbered(at_once(collections.deque.__iter__, held)),
}
_OF_PYTHON = (types.GetSetDescriptorType, types.MemberDescriptorType)  # descriptors
_MOST_LOOKED_INTO = 4096  # objects; what a call returns may lead to a whole program


class Place(NamedTuple):
    """Where something is held; `put(owner, key, other)` puts something else there."""

    put: Callable[[Any, Any, Any], None]
    owner: Any
    key: Any
    value: Any


def holder_in(value: object) -> object | None:
    """Return what of a value is to be looked into: of a tensor the notes on it, anything else as it is, or nothing."""
    if _is(value, Tensor):
        return notes_on(cast(Tensor, value)) or None
    return None if _is(value, _NOT_LOOKED_INTO) else value


def notes_on(tensor: Tensor) -> dict[str, Any]:
    """Return what users have put on a tensor; nothing if attributes make it what it is, as they do a `DTensor`."""
    return tensor.__dict__ if _is_made_without_attributes(tensor) else {}


def put_on(tensor: Tensor, notes: dict[str, Any]) -> None:
    """Let a tensor, which stands for another one, have the notes on that; the two share them from now on."""
    if _is_made_without_attributes(tensor):
        object.__setattr__(tensor, "__dict__", notes)


def _is_made_without_attributes(tensor: Tensor) -> bool:
    return type(tensor).__torch_dispatch__ is Tensor.__torch_dispatch__


def attributes_of(value: object) -> list[Place]:
    """Return the attributes of an object, slots of its bases included."""
    found = list[Place]()
    kinds = type(value).__mro__
    own = next((kind.__dict__["__dict__"] for kind in kinds if "__dict__" in kind.__dict__), None)
    # Python's own; a class may define another, and one of an extension return no dict.
    if isinstance(own, _OF_PYTHON) and isinstance(held_by := own.__get__(value), dict):
        found += [
            Place(dict.__setitem__, held_by, name, held)
            for name, held in _ITEMS[dict](held_by)
            if type(held) not in PLAIN_VALUES
        ]
    for kind in kinds:
        for slot in kind.__dict__.values() if "__slots__" in kind.__dict__ else ():
            if isinstance(slot, types.MemberDescriptorType):
                with contextlib.suppress(AttributeError):  # nothing is in it
                    found.append(Place(types.MemberDescriptorType.__set__, slot, value, slot.__get__(value)))
    return found


def tensors_in_objects(values: Iterable[object]) -> Iterator[tuple[object, Tensor]]:
    """Yield the tensors that objects among `values` hold, and those nearest to them; each with its holder."""
    to_visit: list[object] = []
    for value in values:
        for one in _out_of_tuples(value):
            if _is(one, Tensor) and one is not value:
                yield value, one
            if (holder := holder_in(one)) is not None:
                to_visit.append(holder)
    seen = set(map(id, to_visit))
    for holder in to_visit:  # grows
        for place in _places_in(holder):
            for held in _out_of_tuples(place.value):
                if _is(held, Tensor):
                    yield holder, held
                inner = holder_in(held)
                if inner is not None and len(to_visit) < _MOST_LOOKED_INTO and id(inner) not in seen:
                    seen.add(id(inner))
                    to_visit.append(inner)


def taken_apart(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> tuple[list[Any], TreeSpec | None]:
    """Flatten a pytree. One that holds itself, or is nested too deeply, is its only leaf: an object like others."""
    try:
        return tree_flatten(tree, is_leaf)
    except RecursionError:
        return [tree], None


def with_tensors_in_objects(tree: Any) -> list[object]:
    """Return the leaves of a pytree, and the tensors that objects among them hold."""
    leaves, _ = taken_apart(tree)
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
        """Let the objects hold other tensors, the last of `values`, instead of theirs; return the other values.

        Tuples, which cannot be changed, are others then.
        """
        count = len(values) - len(self.tensors)
        both = zip(self.tensors, values[count:], strict=True)
        others = {id(tensor): other for tensor, other in both if other is not tensor}
        # What is held comes first: another tuple takes its attributes along.
        for holder in reversed(self._holders):
            for put, owner, key, held in _places_in(holder):
                other = _exchanged(held, others)
                if other is not held:
                    put(owner, key, other)
        return [_exchanged(value, others) if _is(value, tuple) else value for value in values[:count]]


def makes_itself(value: object) -> bool:
    """Whether a value is of a class derived from a namedtuple, which may take other arguments, or have attributes."""
    return _is(value, tuple) and hasattr(type(value), "_fields") and "_fields" not in type(value).__dict__


def _places_in(holder: Any) -> list[Place]:
    places = [] if type(holder) in _ITEMS else attributes_of(holder)
    for kind, items in _ITEMS.items():
        if _is(holder, kind):
            places += [
                Place(kind.__setitem__, holder, key, held)
                for key, held in items(holder)
                if type(held) not in PLAIN_VALUES
            ]
    return places


def _numbered(values: tuple[Any, ...]) -> Iterable[tuple[int, Any]]:
    return [] if _are_plain(values) else enumerate(values)


def _are_plain(values: Iterable[object]) -> bool:
    return PLAIN_VALUES.issuperset(map(type, values))  # a vocabulary has very many


def _out_of_tuples(value: object) -> Sequence[Any]:
    """Return what is in nested tuples, which cannot be changed, and those with attributes; anything else as it is."""
    if not _is(value, tuple):
        return (value,)
    inner = tuple(tuple.__iter__(cast(Any, value)))
    found = [] if _are_plain(inner) else [one for held in inner for one in _out_of_tuples(held)]
    return found if type(value) is tuple else [*found, value]


def _exchanged(held: Any, others: Mapping[int, Tensor]) -> Any:
    """Return what is to be in the place of something; in that of a tuple another one, of its class."""
    if not _is(held, tuple):
        return others.get(id(held), held)
    before = tuple(tuple.__iter__(held))
    after = [_exchanged(one, others) for one in before]
    if all(map(operator.is_, before, after)):
        return held
    kind = type(held)
    if is_structseq_class(kind):
        return kind(after)
    made = tuple.__new__(kind, after)
    with contextlib.suppress(AttributeError):  # it has no attributes
        made.__dict__.update(held.__dict__)
    return made


def _is(value: object, kinds: Any) -> bool:
    """As `isinstance`, which would ask the value for its `__class__`; mocks have one."""
    return issubclass(type(value), kinds)
