"""What functions name: globals and attributes, and with them what they may reach, or do.

Among it are two things that can be done for one thread at a time only:

1. Changes of a module for as long as it runs: `torch.func.functional_call` puts other weights into it, others switch it
   to `eval`, its adapters off (as `peft` does), or put a hook on it. Another call that runs the module meanwhile would
   compute with the change: calls that share it take turns (`statistics`).
2. `torch.nn.attention.sdpa_kernel`, `torch.set_default_dtype`, `torch.nn.utils.parametrize.cached` and forward-mode
   differentiation (`torch.func.jvp` and its like) are of the whole process. Side by side, calls would have each
   other's, and might leave it behind: a map with such a call makes one after the other.
"""

from __future__ import annotations

import builtins
import dis
import sys
import types
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch.nn.utils import parametrize

# nor will they be
_NEVER_TENSORS = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)
_TORCHS = "torch."  # how the names of its files begin
# rule 1: how torch's ways to do so are named, by their callers and by themselves, and others' by their callers
CHANGING = frozenset(
    [
        *("functional_call", "_functional_call", "_reparametrize_module", "_swap_state"),
        *("eval", "train", "register_forward_hook", "register_forward_pre_hook"),
        *("disable_adapter", "set_adapter", "merge_adapter"),
    ]
)
_CACHED = "parametrize.cached"  # found in another way: others may call something so, too
SETTING = frozenset(  # rule 2
    [
        *("sdpa_kernel", "sdp_kernel", "set_default_dtype"),
        _CACHED,
        *("jvp", "jacfwd", "hessian", "linearize", "dual_level"),
    ]
)
_TELLING = CHANGING | SETTING
# what is called so otherwise than as a method, such as `config.train`, is something else
_METHODS = frozenset(["eval", "train"])

# a global of the file of a function, which may hold the class
_Place = tuple["weakref.ref[types.FunctionType]", str]

_names: dict[int, Names] = {}  # what functions name, by the `id` of their code, as long as that lives
_places: dict[int, Places] = {}  # of the globals that modules name, by the `id` of their class, likewise


class Places(NamedTuple):
    """What the `forward` of a class names.

    Args:
        of: the class.
        forward: its code.
        places: of the globals.
        telling: those of `CHANGING` and `SETTING`.
    """

    of: weakref.ref[type]
    forward: Any
    places: Sequence[_Place]
    telling: frozenset[str]


class Names(NamedTuple):
    """What a function names, and the functions in it; see `names_of`."""

    code: weakref.ref[types.CodeType]
    of_globals: tuple[str, ...]
    of_attributes: tuple[str, ...]
    telling: frozenset[str]


def is_torchs(namespace: dict[str, Any]) -> bool:
    """Whether these are the globals of a file of torch's."""
    return str(namespace.get("__name__")).startswith(_TORCHS)


def is_function_of(namespace: dict[str, Any], value: object) -> bool:
    """Whether something is a function of the file that has these globals."""
    return isinstance(value, types.FunctionType) and value.__globals__ is namespace


def telling_names(function: types.FunctionType) -> frozenset[str]:
    """Return those of `CHANGING` and `SETTING` that a function names, or another that it names."""
    names = names_of(function.__code__)
    named = [function.__globals__.get(name) for name in names.of_globals]
    codes = [one.__code__ for one in named if isinstance(one, types.FunctionType)]
    cached = [_CACHED] if _names_cached(names, named) else []
    return names.telling.union(cached, *[_told_by(code) for code in codes])


def _told_by(code: types.CodeType) -> frozenset[str]:
    told = _TELLING.intersection(code.co_names)
    return told & names_of(code).telling if told & _METHODS else told


def _is_method(step: dis.Instruction) -> bool:
    """Whether an instruction looks up what is called next, as a method of something."""
    if step.opname == "LOAD_ATTR":
        return sys.version_info >= (3, 12) and bool((step.arg or 0) & 1)
    return step.opname == "LOAD_METHOD"


def _names_cached(names: Names, named: Sequence[object]) -> bool:
    if any(one is parametrize.cached for one in named):
        return True
    is_of_module = "parametrize" in names.of_attributes or any(one is parametrize for one in named)
    return is_of_module and "cached" in names.of_attributes


def globals_of(kind: type, forward: Any) -> Places:
    """Return the globals that the `forward` of a class names; every call of a module asks."""
    key, code = id(kind), getattr(forward, "__code__", None)
    known = _places.get(key)
    if known is None or known.forward is not code or known.of() is not kind:
        told = weakref.ref(kind, lambda _: _places.pop(key, None))
        known = _places[key] = Places(told, code, *_find_globals_of(kind, forward))
    return known


def _find_globals_of(kind: type, forward: Any) -> tuple[Sequence[_Place], frozenset[str]]:
    """Look at the forward of a class, those of its bases, and the methods and functions of its file that they call."""
    functions = [forward] if isinstance(forward, types.FunctionType) else []
    owners = [vars(owner) for owner in kind.__mro__ if not owner.__module__.startswith(_TORCHS)]
    places = {}
    for function in functions:  # grows
        namespace, names = function.__globals__, names_of(function.__code__)
        called = [
            _function_in(owner.get(name)) for name in ("forward", *names.of_attributes) for owner in owners
        ]
        for name in () if is_torchs(namespace) else names.of_globals:
            value = namespace.get(name)
            if is_function_of(namespace, value):
                called.append(value)
            elif not isinstance(value, _NEVER_TENSORS) and (name in namespace or not hasattr(builtins, name)):
                places[id(namespace), name] = weakref.ref(function), name
        functions += [f for f in called if isinstance(f, types.FunctionType) and f not in functions]
    return tuple(places.values()), frozenset[str]().union(*map(telling_names, functions))


def _function_in(value: object) -> object:
    """Return the function that a class runs for a property, or a static or class method."""
    if isinstance(value, property):
        return value.fget
    return value.__func__ if isinstance(value, staticmethod | classmethod) else value


def names_of(code: types.CodeType) -> Names:
    """Return what a function names; its code hashes slowly, and there is one for all functions that a line makes."""
    key = id(code)
    names = _names.get(key)
    if names is None or names.code() is not code:
        told = weakref.ref(code, lambda _: _names.pop(key, None))
        of_globals, of_attributes, methods = dict[str, None](), dict[str, None](), set[str]()
        for one in (codes := [code]):  # grows
            codes += [held for held in one.co_consts if isinstance(held, types.CodeType)]
            for step in dis.get_instructions(one):
                if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                    of_globals[step.argval] = None
                elif step.opname in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"):
                    of_attributes[step.argval] = None
                    if _is_method(step):
                        methods.add(step.argval)
        telling = frozenset[str]().union(*[_TELLING.intersection(one.co_names) for one in codes])
        telling -= _METHODS - methods
        names = _names[key] = Names(told, tuple(of_globals), tuple(of_attributes), telling)
    return names
