"""What functions name: globals and attributes, and with them what they may reach, or do.

Among it are three things that can be done for one thread at a time only:

1. Changes of a module for as long as it runs: `torch.func.functional_call` puts other weights into it, others switch it
   to `eval`, its adapters off (as `peft` does), freeze it, or put a hook on it. Another call that runs the module
   meanwhile would compute with the change: calls that share it take turns (`turns`).
2. `torch.nn.attention.sdpa_kernel`, `torch.set_default_dtype`, `torch.nn.utils.parametrize.cached`, `torch.backends`,
   forward-mode differentiation (`torch.func.jvp` and its like), `FlopCounterMode` (its hooks on all modules), tracing,
   by which `torch.cond` and its like have gradients, what Python warns of, standard output, the working directory and
   the terminal that a debugger reads are of the whole process. Side by side, calls would have each other's, and might
   leave it behind: a map with such a call makes one after the other.
3. Collectives (`torch.distributed.all_reduce` and its like), which all ranks have to come to in one order (`ranks`).

Three looks, each of which uses the one before it::

    told_by         which names in the code of a function tell of 1, 2 or 3 (`telling`)
    telling_names   which names of a function, and of functions that it names, tell
    globals_of      which do of all that the `forward` of a class calls in its file; and the globals that it names
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import types
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch.autograd.function import Function
from torch.nn.utils import parametrize

from moe_autograd.autograd.contents.lookups import in_closure
from moe_autograd.autograd.contents.telling import (
    CACHED,
    SURE,
    TORCHS,
    Names,
    names_of,
    told_by,
    told_by_named,
)

# globals of these kinds are not looked up again: no tensor will ever stand in their place
_NEVER_TENSORS = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)
_BOUND = (staticmethod, classmethod, types.MethodType)
_MAY_WRAP = (types.FunctionType, functools.partial)
_WAYS = ("forward", "setup_context", "backward", "vjp")  # of an autograd function

# a global of the file of a function, which may hold the class
_Place = tuple["weakref.ref[types.FunctionType]", str]
_Followed = tuple["weakref.ref[types.FunctionType]", str, "weakref.ref[Any]"]  # likewise, and what it is

# of the globals that modules name, by the `id` of their class, as long as that lives
_places: dict[int, Places] = {}


class Places(NamedTuple):
    """What the `forward` of a class names, and the backward of an autograd function.

    Args:
        of: the class.
        forward: its code.
        places: of the globals.
        followed: those that are functions, which a notebook may define anew.
        attributes: that it names, and so do the methods and functions of its file that it calls.
        telling: those of `CHANGING`, `SETTING` and `TALKING`.
    """

    of: weakref.ref[type]
    forward: Any
    places: Sequence[_Place]
    followed: Sequence[_Followed]
    attributes: Sequence[str]
    telling: frozenset[str]

    def is_up_to_date(self, kind: type, forward: Any) -> bool:
        """Whether all of it is still so."""
        if self.of() is not kind or self.forward is not forward:
            return False
        for function, name, value in self.followed:
            if (one := function()) is None or one.__globals__.get(name) is not value():
                return False
        return True


def is_torchs(namespace: dict[str, Any]) -> bool:
    """Whether these are the globals of a file of torch's."""
    return str(namespace.get("__name__")).startswith(TORCHS)


def functions_in(namespace: dict[str, Any], value: object) -> list[types.FunctionType]:
    """Return a function of the file that has these globals, or those of an autograd function there."""
    if isinstance(value, types.FunctionType):
        return [value] if any(one.__globals__ is namespace for one in (value, *_functions_of(value))) else []
    return [one for one in _functions_of(value) if one.__globals__ is namespace]


def unwrapped(value: object) -> list[object]:
    """Return the function that decorators such as `torch.no_grad` or a `partial` have wrapped, and makers of such.

    The latter are those of contexts that decorate, as `sdpa_kernel` is, and others that `contextmanager` has made.
    """
    makers = list[object]()
    while isinstance(value, _MAY_WRAP):
        if isinstance(value, functools.partial):
            value = value.func
        elif "__wrapped__" not in value.__dict__:
            break
        else:
            contexts = [held for held in in_closure(value) if isinstance(held, contextlib.ContextDecorator)]
            makers += [getattr(held, "func", None) for held in contexts]
            value = value.__dict__["__wrapped__"]
    return [value, *makers]


def telling_names(function: types.FunctionType) -> frozenset[str]:
    """Return those of `CHANGING`, `SETTING` and `TALKING` that a function names, or another that it names."""
    names = names_of(function.__code__)
    named = [function.__globals__.get(name) for name in names.of_globals]
    functions = [own for one in named for own in _functions_of(one)]
    # imported under another name, perhaps
    own = [one.__name__ for one in (function, *functions) if f"{one.__module__}.".startswith(TORCHS)]
    own += [TORCHS + name for name in own]
    cached = [CACHED] if _names_cached(names, named) else []
    return told_by(function, names).union(SURE.intersection(own), cached, *map(told_by_named, functions))


def _functions_of(value: object) -> list[types.FunctionType]:
    """Return a function, or those that an autograd function consists of, each without its decorators and with these."""
    if isinstance(value, type(Function)):
        values = [one for way in _WAYS for one in functions_within(getattr(value, way, None))]
    elif isinstance(value, _MAY_WRAP):
        values = unwrapped(value)
    else:  # mostly
        return []
    return [one for one in values if isinstance(one, types.FunctionType)]


def _names_cached(names: Names, named: Sequence[object]) -> bool:
    if any(one is parametrize.cached for one in named):
        return True
    is_of_module = "parametrize" in names.of_attributes or any(one is parametrize for one in named)
    return is_of_module and "cached" in names.of_attributes


def globals_of(kind: type, forward: Any) -> Places:
    """Return the globals that the `forward` of a class names; every call of a module asks, and every map."""
    key, code = id(kind), getattr(forward, "__code__", None)
    known = _places.get(key)
    if known is None or not known.is_up_to_date(kind, code):
        told = weakref.ref(kind, lambda _: _places.pop(key, None))
        known = _places[key] = Places(told, code, *_find_globals_of(kind, forward))
    return known


def _find_globals_of(
    kind: type, forward: Any
) -> tuple[Sequence[_Place], Sequence[_Followed], Sequence[str], frozenset[str]]:
    """Look at the forward of a class, those of its bases, and the methods and functions of its file that they call."""
    functions = _functions_of(kind if issubclass(kind, Function) else forward)
    owners = [vars(owner) for owner in kind.__mro__ if not owner.__module__.startswith(TORCHS)]
    places, followed, attributes = {}, list[_Followed](), dict[str, None]()
    for function in functions:  # grows
        namespace, names = function.__globals__, names_of(function.__code__)
        if not is_torchs(namespace):
            attributes |= dict.fromkeys(names.of_attributes)
        called = [
            one
            for name in ("forward", *names.of_attributes)
            for owner in owners
            for one in functions_within(owner.get(name))
        ]
        for name in () if is_torchs(namespace) else names.of_globals:
            value = namespace.get(name)
            if _functions_of(value):
                followed.append((weakref.ref(function), name, weakref.ref(value)))
            if own := functions_in(namespace, value):
                called += [inner for one in own for inner in unwrapped(one)]
            elif not isinstance(value, _NEVER_TENSORS) and (name in namespace or not hasattr(builtins, name)):
                places[id(namespace), name] = weakref.ref(function), name
        functions += [f for f in called if isinstance(f, types.FunctionType) and f not in functions]
    told = frozenset[str]().union(*map(telling_names, functions))
    telling = told - {"data"}  # set in methods that are named, and mostly never run
    return tuple(places.values()), tuple(followed), tuple(attributes), telling


def functions_within(value: object) -> list[object]:
    """Return the function that a class runs for a property, or a static or class method; see `unwrapped`."""
    if isinstance(value, property):
        value = value.fget
    return unwrapped(value.__func__ if isinstance(value, _BOUND) else value)
