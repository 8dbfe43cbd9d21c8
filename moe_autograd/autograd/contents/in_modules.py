"""What a module holds: tensors with history among its attributes and parts, and parts that matter to a map."""

from __future__ import annotations

import contextvars
import types
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import parametrize

from moe_autograd.autograd.contents.compiled import is_compiled
from moe_autograd.autograd.contents.leaves import PLAIN_VALUES
from moe_autograd.autograd.contents.named import globals_of
from moe_autograd.autograd.contents.ranks import (
    are_for_one_call,
    has_hooks_of_torch,
    modules_that_talk,
    refuse_reducing,
)
from moe_autograd.autograd.contents.reaching import (
    CONTAINERS,
    Held,
    around_all,
    flattened,
    has_history,
    is_generator,
    within,
)

NOT_MADE_YET = "_initialize_hook"  # attribute of a lazy module until its first call has made its parameters
_OF_TORCH = frozenset(vars(torch.nn.Module()))  # attributes of every module
_LOOKED_AT = frozenset([Tensor, types.FunctionType, *CONTAINERS])  # of its others; most are numbers


def held_by_module(module: torch.nn.Module, of_all: Held) -> list[Tensor]:
    """Return the tensors with history that a module holds, and add its parts that matter to those `of_all`.

    Computed weights stand as attributes, in lists of them, as parameters (`functional_call`), as buffers, or around
    `forward`: in its closure, or in globals that it names. Each module is looked through once for all calls of a map.
    Generators of random numbers are found there and in attributes that `forward` names.
    """
    key = (id(module), of_all.changes)
    if key not in of_all.known:
        own = Held(changes=of_all.changes)
        of_all.known[key] = own, _look_through(module, own)
    own, found = of_all.known[key]
    of_all.add(own)
    return found


def _look_through(module: torch.nn.Module, of_all: Held) -> list[Tensor]:
    """See `held_by_module`; this reads the dictionaries themselves, as `Module.modules()` takes long."""
    found: list[Tensor] = []
    parts = [module]
    seen = {id(module)}  # a part may lead back to what it is a part of
    met: dict[int, object] = {}  # functions by their `id`, looked at once
    named: dict[type, Sequence[str]] = {}  # attributes, by the classes that are met

    def add(modules: Iterable[torch.nn.Module | None]) -> None:
        new = {id(one): one for one in modules if one is not None and id(one) not in seen}
        seen.update(new)
        parts.extend(new.values())

    talking = modules_that_talk()
    for part in parts:  # grows
        attributes = part.__dict__
        own = attributes if "_modules" in attributes else _of_script(part)
        parameters, buffers, children = own["_parameters"], own["_buffers"], own["_modules"]
        around = _in_attributes(attributes, found, of_all, met)
        weights = [*parameters.values()]  # at once, as other threads may add some
        found += _with_history((*weights, *buffers.values()))
        if (kind := type(part)) not in named:
            named[kind] = globals_of(kind, getattr(kind, "forward", None)).attributes
            around += _around_forward(kind, of_all)
        for name in named[kind]:
            if type(held := attributes.get(name)) is torch.Generator:
                around.append(held)
        if of_all.changes:  # what `functional_call` runs is often hidden from `modules()`, in a list
            add(_modules_in(attributes))
        if around:
            around = [held.get(None) if isinstance(held, contextvars.ContextVar) else held for held in around]
            found += within(around)
            add(held for held in around if isinstance(held, torch.nn.Module))
            generators = [held for held in around if type(held) is torch.Generator]
            of_all.generators += filter(is_generator, generators)
        if (
            isinstance(part, talking)
            or (weights and are_for_one_call(weights))
            or has_hooks_of_torch(attributes)
        ):
            refuse_reducing(part)
            of_all.talks = True
        if is_compiled(part):
            of_all.compiled.append(part)
        if hasattr(kind, "stands_for"):  # an offloaded expert
            stand_in: Any = part
            add([stand_in.stands_for])
        if children:
            if parametrize._cache_enabled and "parametrizations" in children:
                found += _computed_for_all(part, children)
            add([*children.values()])
    of_all.parts.extend(parts)
    return found


def _in_attributes(
    attributes: dict[str, Any], found: list[Tensor], of_all: Held, met: dict[int, object]
) -> list[Any]:
    """Add the tensors with history among a module's own attributes; return what stands around functions there."""
    around = list[Any]()
    names = [name for name in attributes.keys() - _OF_TORCH if type(attributes.get(name)) in _LOOKED_AT]
    for name in sorted(names):
        held: Any = attributes.get(name)
        kind = type(held)
        if kind is Tensor:
            if has_history(held):
                found.append(held)
        elif kind is tuple and PLAIN_VALUES.issuperset(map(type, held)):  # a shape, mostly
            continue
        elif kind in CONTAINERS and held:
            found += within(held)
        elif kind is types.FunctionType and id(held) not in met:  # a `forward` of its own, too
            met[id(held)] = held
            around += around_all(held, of_all)
    return around


def _around_forward(kind: type[torch.nn.Module], of_all: Held) -> list[Any]:
    """Return what the `forward` of a module's class reaches; note what it names of changes and settings."""
    forward = getattr(kind, "forward", None)
    around = around_all(forward, of_all) if getattr(forward, "__closure__", None) else []
    named = globals_of(kind, forward)
    for function, name in named.places:
        if (one := function()) is not None:
            around.append(one.__globals__.get(name))
    of_all.note(named.telling)
    return around


def _computed_for_all(part: torch.nn.Module, children: dict[str, Any]) -> list[Tensor]:
    """Return the parametrized weights that, inside of `parametrize.cached()`, are computed now for all calls."""
    weights = [getattr(part, name) for name in children["parametrizations"]._modules]
    return [weight for weight in weights if weight.grad_fn is not None]


def _modules_in(attributes: dict[str, Any]) -> list[torch.nn.Module]:
    """Return the modules that stand as attributes and in lists of them, as they may do unregistered."""
    own = [attributes.get(name) for name in sorted(attributes.keys() - _OF_TORCH)]
    return [value for value in flattened(own) if isinstance(value, torch.nn.Module)]


def _with_history(tensors: Sequence[Tensor | None]) -> list[Tensor]:
    """Return those that were computed; of several in one go, as every call of a module asks."""
    try:
        return [tensor for tensor in tensors if tensor is not None and tensor.grad_fn is not None]
    except RuntimeError:
        return [tensor for tensor in tensors if tensor is not None and has_history(tensor)]


def _of_script(module: torch.nn.Module) -> dict[str, Any]:
    """Return what a traced module, whose parts are those of another, keeps elsewhere."""
    return {name: getattr(module, name) for name in ("_parameters", "_buffers", "_modules")}
