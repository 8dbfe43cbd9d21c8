"""Find what a callable holds, before it is called: tensors with history, and modules with buffers."""

from __future__ import annotations

import collections
import contextlib
import contextvars
import functools
import itertools
import types
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.utils import parametrize
from torch.utils._pytree import tree_leaves

from moe_autograd.autograd.compiled import is_compiled
from moe_autograd.autograd.named import (
    CHANGING,
    SETTING,
    globals_of,
    is_function_of,
    is_torchs,
    names_of,
    telling_names,
)
from moe_autograd.autograd.ranks import are_spread, modules_that_talk

MOST_LOOKED_AT = 256  # objects that one callable holds
NOT_MADE_YET = "_initialize_hook"  # attribute of a lazy module until its first call has made its parameters

Cut = tuple[GradientEdge, Tensor]  # where an inner graph ends, and the outer tensor that stands there

_PLAIN = (Tensor, int, float, type(None))  # arguments, mostly
_HOLDS_NOTHING = (
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
_FOLLOWED_BY_NAME = (Tensor, torch.nn.Module, contextvars.ContextVar, list, tuple, dict)
_CALL = "__call__"  # which callables that are no functions may have
_CONTAINERS = frozenset([list, tuple, dict])
_SEQUENCES: Any = (list, tuple, set, frozenset, collections.deque)
_ITERATE: dict[type, Any] = {dict: dict.values, **{kind: kind.__iter__ for kind in _SEQUENCES}}
_OF_TORCH = frozenset(vars(torch.nn.Module()))  # attributes of every module


class LooseCut(NamedTuple):
    """A cut at a tensor of an object among the arguments, such as a cache, which the call may change in place.

    Then it is no cut any more: the tensor's new history is within the call, and nobody differentiates through it here.
    """

    edge: GradientEdge
    tensor: Tensor


class Held(NamedTuple):
    """What a callable holds.

    Args:
        cuts: the tensors with history (Rule 3 of `module_calls`).
        owners: the modules that have buffers themselves.
        talkers: the modules that run collectives, by themselves or for their weights, and such tensors (`ranks`).
        compiled: the modules and functions that `torch.compile` has made (`compiled`).
        changing: what changes a module for as long as it runs (`named`, rule 1).
        setting: what sets something for the whole process (`named`, rule 2).
        parts: all modules.
    """

    cuts: list[Cut]
    owners: list[torch.nn.Module]
    talkers: list[object]
    compiled: list[object]
    changing: list[object]
    setting: list[object]
    parts: list[torch.nn.Module]


def holds_nothing() -> Held:
    """Return lists to be filled."""
    return Held([], [], [], [], [], [], [])


def look_into(call: object, args: Iterable[object] = ()) -> Held:
    """Return what a callable holds, and what objects among its arguments hold that are no pytrees.

    It is looked for in its closure, its bound arguments, and what these lead to: containers, attributes, modules,
    context variables; nearest first. Every call of a map asks, and the objects that a callable leads to may be a whole
    program: so there is a bound, and of the globals that a function names only `_FOLLOWED_BY_NAME` are followed, and
    functions of the same file.
    """
    own = holds_nothing()
    objects = _objects_among(args)
    modules = [value for value in (call, *objects) if isinstance(value, torch.nn.Module)]
    found = [tensor for module in modules for tensor in _held_by_module(module, own)]
    seen = set(map(id, modules))
    if not isinstance(call, torch.nn.Module):
        method = getattr(type(call), _CALL, None)
        found += _held_by_all([call, method] if isinstance(method, types.FunctionType) else [call], seen, own)
    cuts = _cuts(found) if found else []
    if objects:
        known = {edge[:2] for edge, _ in cuts}
        loose = _cuts(_held_by_all(objects, seen, own))
        cuts += [LooseCut(*cut) for cut in loose if cut[0][:2] not in known]
    own.cuts.extend(cuts)
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
            _note(held, telling_names(held), own)
        if isinstance(held, Tensor):
            if _has_history(held):
                found.append(held)
            if are_spread([held]):
                own.talkers.append(held)
            continue
        for value in _held_by(held, own):
            if not isinstance(value, _HOLDS_NOTHING) and id(value) not in seen and len(seen) < MOST_LOOKED_AT:
                seen.add(id(value))
                to_visit.append(value)
    return found


def _objects_among(args: Iterable[object]) -> list[object]:
    if all(isinstance(value, _PLAIN) for value in args):
        return []
    return [leaf for leaf in tree_leaves(args) if not isinstance(leaf, (Tensor, *_HOLDS_NOTHING))]


def _cuts(found: Iterable[Tensor]) -> list[Cut]:
    """Return one for each place in the graph: a module may hold a tensor in several places."""
    cuts = [(get_gradient_edge(tensor), tensor) for tensor in found]
    return list({(edge.node, edge.output_nr): (edge, tensor) for edge, tensor in cuts}.values())


def _held_by(value: object, of_all: Held) -> Iterable[object]:
    if isinstance(value, torch.nn.Module):
        return _held_by_module(value, of_all)
    if isinstance(value, functools.partial):
        return (value.func, *value.args, *value.keywords.values())
    if isinstance(value, contextvars.ContextVar):
        return (value.get(None),)
    if isinstance(value, types.MethodType):
        return (value.__func__, value.__self__)
    if isinstance(value, types.FunctionType):
        return (*_around(value), *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values())
    for kind, iterate in _ITERATE.items():
        if isinstance(value, kind):
            return _first(iterate(value))
    return _attributes_of(value)


def _attributes_of(value: object) -> list[object]:
    """Return the attributes of an object, slots of its bases included; nothing that its class defines is to run."""
    found = list[object]()
    with contextlib.suppress(AttributeError):  # it has slots alone
        attributes = object.__getattribute__(value, "__dict__")
        found += attributes.values() if isinstance(attributes, dict) else ()
    for owner in type(value).__mro__:
        for slot in owner.__dict__.values() if "__slots__" in owner.__dict__ else ():
            if isinstance(slot, types.MemberDescriptorType):
                with contextlib.suppress(AttributeError):  # nothing is in it
                    found.append(slot.__get__(value))
    return found


def _held_by_module(module: torch.nn.Module, of_all: Held) -> list[Tensor]:
    """Return the tensors with history that a module holds, and add its parts that matter to those `of_all`.

    Computed weights stand as attributes, in lists of them, as parameters (`functional_call`), as buffers, or around
    `forward`: in its closure, or in globals that it names. Every call of a module asks, so this reads the dictionaries
    themselves, not `Module.modules()`.
    """
    found: list[Tensor] = []
    parts, around = [module], list[Any]()
    talking = modules_that_talk()
    for part in parts:  # grows
        attributes = part.__dict__
        own = attributes if "_modules" in attributes else _of_script(part)
        parameters, buffers, children = own["_parameters"], own["_buffers"], own["_modules"]
        for name in sorted(attributes.keys() - _OF_TORCH):
            held: Any = attributes.get(name)
            kind = type(held)
            if kind is Tensor:
                if _has_history(held):
                    found.append(held)
            elif kind in _CONTAINERS and held:
                found += _within(held)
            elif kind is types.FunctionType:  # a `forward` of its own, too
                around += _around_all(held, of_all)
        found += _with_history((*parameters.values(), *buffers.values()))
        forward = getattr(type(part), "forward", None)
        if getattr(forward, "__closure__", None):
            around += _around_all(forward, of_all)
        named = globals_of(type(part), forward)
        for function, name in named.places:
            if (one := function()) is not None:
                around.append(one.__globals__.get(name))
        _note(part, named.telling, of_all)
        if of_all.changing:  # a template is often hidden from `modules()`
            parts += _modules_in(attributes, parts)
        if around:
            around = [held.get(None) if isinstance(held, contextvars.ContextVar) else held for held in around]
            found += _within(around)
            parts += [held for held in around if isinstance(held, torch.nn.Module) and held not in parts]
            around.clear()
        if buffers or NOT_MADE_YET in attributes:
            of_all.owners.append(part)
        if isinstance(part, talking) or are_spread(parameters.values()):
            of_all.talkers.append(part)
        if is_compiled(part):
            of_all.compiled.append(part)
        if attributes.get("_forward_pre_hooks"):
            _refuse_sharded(part)
        if hasattr(type(part), "stands_for"):  # an offloaded expert
            stand_in: Any = part
            parts.append(stand_in.stands_for)
        if children:
            if parametrize._cache_enabled and "parametrizations" in children:
                # What is computed now stands for all calls inside of `parametrize.cached()`.
                weights = [getattr(part, name) for name in children["parametrizations"]._modules]
                found += [weight for weight in weights if weight.grad_fn is not None]
            parts += [child for child in children.values() if child is not None]
    of_all.parts.extend(parts)
    return found


def _modules_in(attributes: dict[str, Any], but: Sequence[object]) -> list[torch.nn.Module]:
    """Return the modules that stand as attributes and in lists of them, as they may do unregistered."""
    values = [attributes[name] for name in sorted(attributes.keys() - _OF_TORCH)]
    for value in values:  # grows
        if type(value) in _CONTAINERS and len(values) < MOST_LOOKED_AT:
            values += _first(value.values() if type(value) is dict else value)
    return [value for value in values if isinstance(value, torch.nn.Module) and value not in but]


def _with_history(tensors: Sequence[Tensor | None]) -> list[Tensor]:
    """Return those that were computed; of several in one go, as every call of a module asks."""
    try:
        return [tensor for tensor in tensors if tensor is not None and tensor.grad_fn is not None]
    except RuntimeError:
        return [tensor for tensor in tensors if tensor is not None and _has_history(tensor)]


def _has_history(tensor: Tensor) -> bool:
    """Whether a held tensor was computed.

    One that shows memory which was changed under it, as `FullyShardedDataParallel` does with its flat parameter, has a
    history that PyTorch refuses to tell: nothing can be computed from it either.
    """
    try:
        return tensor.grad_fn is not None
    except RuntimeError:
        return False


def _refuse_sharded(module: torch.nn.Module) -> None:
    """Raise for what `fully_shard` has wrapped: it reduces gradients in the call's backward, before they are added."""
    if hasattr(type(module), "set_reshard_after_backward") and torch.is_grad_enabled():
        raise TypeError(
            "parallel_apply: expected calls without modules that `fully_shard` has wrapped, got "
            f"{type(module).__name__}, whose gradients would be a step late. Shard what makes the map, not its calls."
        )


def _of_script(module: torch.nn.Module) -> dict[str, Any]:
    """Return what a traced module, whose parts are those of another, keeps elsewhere."""
    return {name: getattr(module, name) for name in ("_parameters", "_buffers", "_modules")}


def _within(container: Any) -> list[Tensor]:
    """Return the tensors with history in nested lists, tuples and dictionaries."""
    found = []
    containers = [container]
    for held in containers:  # grows
        for value in _first(held.values() if type(held) is dict else held):
            kind = type(value)
            if kind is Tensor:
                if _has_history(value):
                    found.append(value)
            elif kind in _CONTAINERS and len(containers) < MOST_LOOKED_AT:
                containers.append(value)
    return found


def _around_all(function: Any, of_all: Held) -> list[Any]:
    """Return what stands around a function, and around the functions there: it may be decorated."""
    functions, values = [function], list[Any]()
    for each in functions:  # grows
        for value in _around(each):
            if not isinstance(value, types.FunctionType):
                values.append(value)
            elif value not in functions and len(functions) < MOST_LOOKED_AT:
                functions.append(value)
    for one in functions:
        _note(one, telling_names(one), of_all)
    return values


def _note(held: object, telling: frozenset[str], of_all: Held) -> None:
    if telling:
        of_all.changing.extend([held] if telling & CHANGING else ())
        of_all.setting.extend([held] if telling & SETTING else ())


def _around(function: types.FunctionType) -> list[Any]:
    """Return what stands in a function's closure, and of the globals that it names what may be followed."""
    namespace, values = function.__globals__, _in_closure(function)
    for name in () if is_torchs(namespace) else names_of(function.__code__).of_globals:
        value = namespace.get(name)
        # Functions and objects of other files would lead through whole libraries.
        if isinstance(value, _FOLLOWED_BY_NAME) or is_function_of(namespace, value):
            values.append(value)
    return values


def _in_closure(function: Any) -> list[Any]:
    return [cell.cell_contents for cell in function.__closure__ or () if not _is_empty(cell)]


def _first(values: Iterable[Any]) -> tuple[Any, ...]:
    """Return the first of them, at once: other threads may change the container meanwhile."""
    return tuple(itertools.islice(values, MOST_LOOKED_AT))


def _is_empty(cell: types.CellType) -> bool:
    try:
        _ = cell.cell_contents  # a cell tells only this way
    except ValueError:
        return True
    return False
