"""Find what a callable holds, before it is called: tensors with history, modules, generators of random numbers."""

from __future__ import annotations

import collections
import contextvars
import functools
import itertools
import types
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from moe_autograd.autograd.contents.compiled import is_compiled
from moe_autograd.autograd.contents.in_modules import held_by_module
from moe_autograd.autograd.contents.in_objects import HOLDS_NOTHING, attributes_of
from moe_autograd.autograd.contents.leaves import LookedThrough, leaves_of
from moe_autograd.autograd.contents.named import telling_names
from moe_autograd.autograd.contents.ranks import are_for_one_call
from moe_autograd.autograd.contents.reaching import (
    MOST_LOOKED_AT,
    Cut,
    Held,
    Known,
    around_function,
    first,
    has_history,
    is_generator,
)

_CALL = "__call__"  # which callables that are no functions may have
_SEQUENCES: Any = (list, tuple, set, frozenset, collections.deque)
_ITERATE: dict[type, Any] = {dict: dict.values, **{kind: kind.__iter__ for kind in _SEQUENCES}}


class LooseCut(NamedTuple):
    """A cut at a tensor of an object among the arguments, such as a cache, which the call may change in place.

    Then it is no cut any more: the tensor's new history is within the call, and nobody differentiates through it here.
    """

    edge: GradientEdge
    tensor: Tensor


def look_into(
    call: object,
    args: Iterable[object] = (),
    known: Known | None = None,
    leaves: LookedThrough | None = None,
) -> Held:
    """Return what a callable holds, and what objects among its arguments hold that are no pytrees.

    It is looked for in its closure, its bound arguments, and what these lead to: containers, attributes, modules,
    context variables; nearest first. Every call of a map asks, and the objects that a callable leads to may be a whole
    program: so there is a bound, and of the globals that a function names only `_FOLLOWED_BY_NAME` are followed, and
    functions of the same file. What modules hold is `known` from call to call, and so are the `leaves` of containers.
    """
    own = Held() if known is None else Held(known=known)
    objects = _objects_among(args, {} if leaves is None else leaves)
    modules = [value for value in (call, *objects) if isinstance(value, torch.nn.Module)]
    found = [tensor for module in modules for tensor in held_by_module(module, own)]
    seen = set(map(id, modules))
    if not isinstance(call, torch.nn.Module):
        method = getattr(type(call), _CALL, None)
        found += _held_by_all([call, method] if isinstance(method, types.FunctionType) else [call], seen, own)
    cuts = _cuts(found) if found else []
    if objects:
        edges = {edge[:2] for edge, _ in cuts}
        loose = _cuts(_held_by_all(objects, seen, own))
        cuts += [LooseCut(*cut) for cut in loose if cut[0][:2] not in edges]
    own.cuts = cuts
    return own


def _held_by_all(values: Iterable[object], seen: set[int], own: Held) -> list[Tensor]:
    """Return the tensors with history that values and what these lead to hold, but for what was `seen`."""
    found: list[Tensor] = []
    to_visit = [value for value in values if id(value) not in seen]
    seen.update(map(id, to_visit))
    for held in to_visit:  # grows
        if isinstance(held, types.FunctionType):
            if is_compiled(held):
                own.compiled.append(held)
            own.note(telling_names(held))
        if isinstance(held, Tensor):
            if has_history(held):
                found.append(held)
            own.talks = own.talks or are_for_one_call([held])
            continue
        if is_generator(held):
            own.generators.append(held)
            continue
        for value in _held_by(held, own):
            if not isinstance(value, HOLDS_NOTHING) and id(value) not in seen and len(seen) < MOST_LOOKED_AT:
                seen.add(id(value))
                to_visit.append(value)
    return found


def _objects_among(args: Iterable[object], known: LookedThrough) -> list[object]:
    leaves = itertools.chain.from_iterable([leaves_of(value, known) for value in args])
    return [leaf for leaf in leaves if not isinstance(leaf, (Tensor, *HOLDS_NOTHING))]


def _cuts(found: Iterable[Tensor]) -> list[Cut]:
    """Return one for each place in the graph: a module may hold a tensor in several places."""
    cuts = [(get_gradient_edge(tensor), tensor) for tensor in found]
    return list({cut[0][:2]: cut for cut in cuts}.values())


def _held_by(value: object, of_all: Held) -> Iterable[object]:
    if isinstance(value, torch.nn.Module):
        return held_by_module(value, of_all)
    if isinstance(value, functools.partial):
        return (value.func, *value.args, *value.keywords.values())
    if isinstance(value, contextvars.ContextVar):
        return (value.get(None),)
    if isinstance(value, types.MethodType):
        return (value.__func__, value.__self__)
    if isinstance(value, types.FunctionType):
        return (*around_function(value), *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
    if (iterate := _ITERATE.get(type(value))) is not None:
        return first(iterate, value)
    ways = [iterate for kind, iterate in _ITERATE.items() if issubclass(type(value), kind)]
    attributes = [place.value for place in attributes_of(value)]
    return (*(first(ways[0], value) if ways else ()), *attributes)
