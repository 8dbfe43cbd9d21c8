"""Find what a callable holds, before it is called: tensors with history, and modules with buffers."""

from __future__ import annotations

import builtins
import collections
import contextvars
import dis
import functools
import itertools
import types
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn.utils import parametrize

from moe_autograd.autograd.compiled import is_compiled
from moe_autograd.autograd.ranks import are_spread, modules_that_talk

MOST_LOOKED_AT = 256  # objects that one callable holds
NOT_MADE_YET = "_initialize_hook"  # attribute of a lazy module until its first call has made its parameters

Cut = tuple[GradientEdge, Tensor]  # where an inner graph ends, and the outer tensor that stands there

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
_NEVER_TENSORS = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)  # nor will they be
_FOLLOWED_BY_NAME = (Tensor, torch.nn.Module, contextvars.ContextVar, list, tuple, dict)
_CONTAINERS = frozenset([list, tuple, dict])
_TORCHS = "torch."  # how the names of its files begin
_OF_TORCH = frozenset(vars(torch.nn.Module()))  # attributes of every module

# a global of the file of a function, which may hold the class
_Place = tuple["weakref.ref[types.FunctionType]", str]

_names: dict[int, _Names] = {}  # what functions name, by the `id` of their code, as long as that lives
_places: dict[int, _Places] = {}  # of the globals that modules name, by the `id` of their class, likewise


class _Places(NamedTuple):
    of: weakref.ref[type]
    forward: Any  # its code
    places: Sequence[_Place]


class _Names(NamedTuple):
    code: weakref.ref[types.CodeType]
    of_globals: tuple[str, ...]
    of_attributes: tuple[str, ...]


class Held(NamedTuple):
    """What a callable holds.

    Args:
        cuts: the tensors with history (Rule 3 of `module_calls`).
        owners: the modules that have buffers themselves.
        talkers: the modules that run collectives, by themselves or for their weights, and such tensors (`ranks`).
        compiled: the modules and functions that `torch.compile` has made (`compiled`).
    """

    cuts: list[Cut]
    owners: list[torch.nn.Module]
    talkers: list[object]
    compiled: list[object]


def look_into(module: object) -> Held:
    """Return what a callable holds.

    It is looked for in its closure, its bound arguments, and what these lead to: containers, attributes, modules,
    context variables; nearest first. Every call of a map asks, and the objects that a callable leads to may be a whole
    program: so there is a bound, and of the globals that a function names only `_FOLLOWED_BY_NAME` are followed, and
    functions of the same file.
    """
    own = Held([], [], [], [])
    if isinstance(module, torch.nn.Module):
        return own._replace(cuts=_cuts(_held_by_module(module, own)))
    found: list[Tensor] = []
    seen = {id(module)}
    to_visit = [module]
    for held in to_visit:  # grows
        if isinstance(held, types.FunctionType) and is_compiled(held):
            own.compiled.append(held)
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
    return own._replace(cuts=_cuts(found))


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
    if isinstance(value, list | tuple | set | frozenset | collections.deque):
        return _first(value)
    if isinstance(value, dict):
        return _first(value.values())
    attributes = getattr(value, "__dict__", None)
    slots = [getattr(value, name, None) for name in getattr(type(value), "__slots__", ())]
    return (*attributes.values(), *slots) if isinstance(attributes, dict) else slots


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
                around += _around_all(held)
        found += _with_history((*parameters.values(), *buffers.values()))
        forward = getattr(type(part), "forward", None)
        if getattr(forward, "__closure__", None):
            around += _around_all(forward)
        if places := _globals_of(type(part), forward):
            around += [
                one.__globals__.get(name) for function, name in places if (one := function()) is not None
            ]
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
    return found


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


def _around_all(function: Any) -> list[Any]:
    """Return what stands around a function, and around the functions there: it may be decorated."""
    functions, values = [function], list[Any]()
    for each in functions:  # grows
        for value in _around(each):
            if not isinstance(value, types.FunctionType):
                values.append(value)
            elif value not in functions and len(functions) < MOST_LOOKED_AT:
                functions.append(value)
    return values


def _around(function: types.FunctionType) -> list[Any]:
    """Return what stands in a function's closure, and of the globals that it names what may be followed."""
    namespace, values = function.__globals__, _in_closure(function)
    for name in () if _is_torchs(namespace) else _names_of(function.__code__).of_globals:
        value = namespace.get(name)
        # Functions and objects of other files would lead through whole libraries.
        if isinstance(value, _FOLLOWED_BY_NAME) or _is_function_of(namespace, value):
            values.append(value)
    return values


def _is_torchs(namespace: dict[str, Any]) -> bool:
    return str(namespace.get("__name__")).startswith(_TORCHS)


def _is_function_of(namespace: dict[str, Any], value: object) -> bool:
    return isinstance(value, types.FunctionType) and value.__globals__ is namespace


def _globals_of(kind: type, forward: Any) -> Sequence[_Place]:
    """Return the globals that the `forward` of a class names; every call of a module asks."""
    key, code = id(kind), getattr(forward, "__code__", None)
    known = _places.get(key)
    if known is None or known.forward is not code or known.of() is not kind:
        told = weakref.ref(kind, lambda _: _places.pop(key, None))
        known = _places[key] = _Places(told, code, _find_globals_of(kind, forward))
    return known.places


def _find_globals_of(kind: type, forward: Any) -> Sequence[_Place]:
    """Look at the forward of a class, those of its bases, and the methods and functions of its file that they call."""
    functions = [forward] if isinstance(forward, types.FunctionType) else []
    owners = [vars(owner) for owner in kind.__mro__ if not owner.__module__.startswith(_TORCHS)]
    places = {}
    for function in functions:  # grows
        namespace, names = function.__globals__, _names_of(function.__code__)
        called = [
            _function_in(owner.get(name)) for name in ("forward", *names.of_attributes) for owner in owners
        ]
        for name in () if _is_torchs(namespace) else names.of_globals:
            value = namespace.get(name)
            if _is_function_of(namespace, value):
                called.append(value)
            elif not isinstance(value, _NEVER_TENSORS) and (name in namespace or not hasattr(builtins, name)):
                places[id(namespace), name] = weakref.ref(function), name
        functions += [f for f in called if isinstance(f, types.FunctionType) and f not in functions]
    return tuple(places.values())


def _function_in(value: object) -> object:
    """Return the function that a class runs for a property, or a static or class method."""
    if isinstance(value, property):
        return value.fget
    return value.__func__ if isinstance(value, staticmethod | classmethod) else value


def _names_of(code: types.CodeType) -> _Names:
    """Return what a function names; its code hashes slowly, and there is one for all functions that a line makes."""
    key = id(code)
    names = _names.get(key)
    if names is None or names.code() is not code:
        told = weakref.ref(code, lambda _: _names.pop(key, None))
        of_globals, of_attributes = dict[str, None](), dict[str, None]()
        for one in (codes := [code]):  # grows
            codes += [held for held in one.co_consts if isinstance(held, types.CodeType)]
            for step in dis.get_instructions(one):
                if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                    of_globals[step.argval] = None
                elif step.opname in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"):
                    of_attributes[step.argval] = None
        names = _names[key] = _Names(told, tuple(of_globals), tuple(of_attributes))
    return names


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
