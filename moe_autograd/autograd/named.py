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

    names_of        what the code of a function names, and which of these names tell of 1, 2 or 3
    telling_names   which names of a function, and of functions that it names, tell
    globals_of      which do of all that the `forward` of a class calls in its file; and the globals that it names
"""

from __future__ import annotations

import builtins
import contextlib
import dis
import inspect
import itertools
import sys
import types
import weakref
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from torch import nn
from torch.autograd.function import Function
from torch.nn.utils import parametrize

# globals of these kinds are not looked up again: no tensor will ever stand in their place
_NEVER_TENSORS = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType)
_BOUND = (staticmethod, classmethod, types.MethodType)
_TORCHS = "torch."  # how the names of its files begin
# only where they are called as methods: `config.train` is something else
_METHODS = frozenset(
    [
        *("eval", "train", "requires_grad_", "load_state_dict", "update_parameters"),
        *("disable_adapter", "disable_adapters", "disable_adapter_layers", "set_adapter", "set_adapters"),
        *("enable_adapters", "enable_adapter_layers", "merge_adapter", "unmerge_adapter"),
        *("average_parameters", "apply_shadow"),  # of moving averages
    ]
)
# only where they are set: mostly they are read
_SET = frozenset(["training", "requires_grad", "forward", "data"])
# only where they lead to what is set, or to `flags`: mostly they are read
_BACKENDS = frozenset(["backends", "cudnn", "mkldnn"])
_UNSURE = _METHODS | _SET | _BACKENDS  # `_done_in` looks what is done with it
# rule 1: names of what changes modules, as users' code and torch's own have them
CHANGING = frozenset(
    [
        *("functional_call", "_functional_call", "_reparametrize_module", "_swap_state", "adapter_names"),
        *("register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"),
        *("register_full_backward_pre_hook", "register_parametrization", "remove_parametrizations"),
        *_METHODS,
        *_SET,
    ]
)
_CACHED = "parametrize.cached"  # looked for by itself (`_names_cached`): others may call something `cached`
_FORWARD_MODE = "forward-mode"  # the strategy of a `torch.autograd.functional.jacobian`
_TORCHS_OWN = frozenset(["torch.cond", "torch.scan", "torch.map"])  # others have such names, but not of torch
SETTING = frozenset(  # rule 2
    [
        *("sdpa_kernel", "sdp_kernel", "set_default_dtype"),
        _CACHED,
        *_BACKENDS,
        *("enable_flash_sdp", "enable_math_sdp", "enable_mem_efficient_sdp", "enable_cudnn_sdp"),
        *("set_float32_matmul_precision", "use_deterministic_algorithms", "set_deterministic_debug_mode"),
        *("detect_anomaly", "set_detect_anomaly"),
        *("catch_warnings", "redirect_stdout", "redirect_stderr", "chdir"),
        *("breakpoint", "set_trace"),
        *("jvp", "jacfwd", "hessian", "linearize", "dual_level", _FORWARD_MODE),
        *("allow_mutation_on_saved_tensors", "FlopCounterMode"),
        *("make_fx", "symbolic_trace", "while_loop"),
        *_TORCHS_OWN,
    ]
)
TALKING = frozenset(  # rule 3; not `gather`, `scatter` and others that tensors have, too
    [
        *("all_reduce", "all_reduce_coalesced", "broadcast", "broadcast_object_list"),
        *("all_gather", "all_gather_into_tensor", "all_gather_object", "all_gather_single"),
        *("all_gather_tensor", "reduce_scatter", "reduce_scatter_single", "reduce_scatter_tensor"),
        *("all_to_all", "all_to_all_single"),
        *("all_gather_single_autograd", "all_gather_tensor_autograd", "all_to_all_single_autograd"),
        *("reduce_scatter_single_autograd", "reduce_scatter_tensor_autograd"),
        *("isend", "irecv", "batch_isend_irecv"),
    ]
)
_TELLING = CHANGING | SETTING | TALKING
_ASKED = _UNSURE | {"cond", "scan", "map"}  # the name alone does not tell
_WAYS = ("forward", "setup_context", "backward", "vjp")  # of an autograd function
SURE = _TELLING - _UNSURE

# a global of the file of a function, which may hold the class
_Place = tuple["weakref.ref[types.FunctionType]", str]
_Followed = tuple["weakref.ref[types.FunctionType]", str, "weakref.ref[Any]"]  # likewise, and what it is

_names: dict[int, Names] = {}  # what functions name, by the `id` of their code, as long as that lives
_places: dict[int, Places] = {}  # of the globals that modules name, by the `id` of their class, likewise


class Places(NamedTuple):
    """What the `forward` of a class names, and the backward of an autograd function.

    Args:
        of: the class.
        forward: its code.
        places: of the globals.
        followed: those that are functions, which a notebook may define anew.
        telling: those of `CHANGING`, `SETTING` and `TALKING`.
    """

    of: weakref.ref[type]
    forward: Any
    places: Sequence[_Place]
    followed: Sequence[_Followed]
    telling: frozenset[str]

    def is_up_to_date(self, kind: type, forward: Any) -> bool:
        """Whether all of it is still so."""
        if self.of() is not kind or self.forward is not forward:
            return False
        for function, name, value in self.followed:
            if (one := function()) is None or one.__globals__.get(name) is not value():
                return False
        return True


class Names(NamedTuple):
    """What a function names, and the functions in it; see `names_of`."""

    code: weakref.ref[types.CodeType]
    of_globals: tuple[str, ...]
    of_attributes: tuple[str, ...]
    telling: frozenset[str]
    asked: Sequence[tuple[str, str]]  # methods among them, and of what they are called (`_done_in`)


def is_torchs(namespace: dict[str, Any]) -> bool:
    """Whether these are the globals of a file of torch's."""
    return str(namespace.get("__name__")).startswith(_TORCHS)


def functions_in(namespace: dict[str, Any], value: object) -> list[types.FunctionType]:
    """Return a function of the file that has these globals, or those of an autograd function there."""
    if isinstance(value, types.FunctionType):
        return [value] if any(one.__globals__ is namespace for one in (value, *_functions_of(value))) else []
    return [one for one in _functions_of(value) if one.__globals__ is namespace]


def unwrapped(value: object) -> object:
    """Return the function that decorators such as `contextmanager` and `torch.no_grad` have wrapped."""
    while isinstance(value, types.FunctionType) and "__wrapped__" in value.__dict__:
        value = value.__dict__["__wrapped__"]
    return value


def telling_names(function: types.FunctionType) -> frozenset[str]:
    """Return those of `CHANGING`, `SETTING` and `TALKING` that a function names, or another that it names."""
    names = names_of(function.__code__)
    named = [function.__globals__.get(name) for name in names.of_globals]
    functions = [own for one in named for own in _functions_of(one)]
    # imported under another name, perhaps
    own = [one.__name__ for one in (function, *functions) if f"{one.__module__}.".startswith(_TORCHS)]
    own += [_TORCHS + name for name in own]
    cached = [_CACHED] if _names_cached(names, named) else []
    told = [_told_by(one.__code__) for one in functions]
    telling = names.telling - _harmless(function, names.asked) if names.asked else names.telling
    return telling.union(SURE.intersection(own), cached, *told)


def _functions_of(value: object) -> list[types.FunctionType]:
    """Return a function, or those that an autograd function consists of."""
    if isinstance(value, type) and issubclass(value, Function):
        values = [function_in(getattr(value, way, None)) for way in _WAYS]
    else:
        values = [unwrapped(value)]
    return [one for one in values if isinstance(one, types.FunctionType)]


def _told_by(code: types.CodeType) -> frozenset[str]:
    told = _TELLING.intersection(code.co_names)
    return told if _ASKED.isdisjoint(code.co_names) else names_of(code).telling & (told | _TORCHS_OWN)


def _harmless(function: types.FunctionType, asked: Iterable[tuple[str, str]]) -> set[str]:
    """Return those methods that are called only of objects that are no modules, and whose own they are."""
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=False))
    methods = {method for method, _ in asked}
    for method, name in asked:
        value = function.__globals__.get(name)
        with contextlib.suppress(ValueError):  # nothing is in the cell yet
            value = cells[name].cell_contents if name in cells else value
        if not _is_of_its_own(value, method):
            methods.discard(method)
    return methods


def _is_of_its_own(value: object, method: str) -> bool:
    """Whether a method is one of a user's class that is no module, holds none, and does nothing telling there."""
    own = inspect.getattr_static(type(value), method, None)
    if not isinstance(own, types.FunctionType) or names_of(own.__code__).telling:
        return False
    with contextlib.suppress(AttributeError):  # what has slots is not looked into
        held = object.__getattribute__(value, "__dict__").values()  # nothing that its class defines is to run
        return not any(isinstance(one, nn.Module) for one in (value, *held))
    return False


def _done_in(code: types.CodeType) -> tuple[set[str], list[tuple[str, str]]]:
    """Return which of `_UNSURE` code calls as a method, or sets other than to `True`, which mostly ends a change.

    To pass on a tensor's `requires_grad`, as `torch.utils.checkpoint` does, freezes no module. And for each method
    the global or variable of a closure of which it is called; "" where it is something else.
    """
    done, asked, constant = set[str](), list[tuple[str, str]](), None
    steps = [*dis.get_instructions(code)]
    for i, step in enumerate(steps):
        if step.opname == "LOAD_CONST":
            constant = step.argval
        elif step.starts_line:
            constant = None
        if step.opname == "STORE_ATTR" and step.argval in _SET:
            # the value is put on the stack, then what it is set of: `b.requires_grad = a.requires_grad`
            is_passed_on = (steps[i - 2].opname, steps[i - 2].argval) == ("LOAD_ATTR", "requires_grad")
            if constant is not True and not (is_passed_on and step.argval == "requires_grad"):
                done.add(step.argval)
        elif step.argval in _METHODS and _is_method(step) and not _unfreezes(step, steps[i + 1]):
            done.add(step.argval)
            asked.append((step.argval, _outside(steps[i - 1], code)))
        elif step.argval in _BACKENDS and _leads_to_setting(steps[i + 1 :]):
            done.add(step.argval)
    return done, asked


def _leads_to_setting(steps: Iterable[dis.Instruction]) -> bool:
    """Whether the attributes that are looked up one of the other here end in one that is set, or in `flags`."""
    path = itertools.takewhile(lambda step: step.opname.endswith(("_ATTR", "LOAD_METHOD")), steps)
    return any(step.opname == "STORE_ATTR" or step.argval == "flags" for step in path)


def _outside(step: dis.Instruction, code: types.CodeType) -> str:
    """Return the global or variable of a closure that a step puts on the stack; "" if something else."""
    is_free = step.opname == "LOAD_DEREF" and step.argval in code.co_freevars
    return step.argval if is_free or step.opname == "LOAD_GLOBAL" else ""


def _unfreezes(method: dis.Instruction, argument: dis.Instruction) -> bool:
    """Whether `requires_grad_` is called without an argument, or with `True`."""
    if method.argval != "requires_grad_":
        return False
    if argument.opname == "LOAD_CONST":
        return argument.argval is True
    return argument.opname in ("PRECALL", "CALL") and argument.arg == 0


def _is_method(step: dis.Instruction) -> bool:
    """Whether an instruction looks up what is called next, as a method of something."""
    if step.opname == "LOAD_ATTR":
        return sys.version_info >= (3, 12) and bool((step.arg or 0) & 1)
    if step.opname == "LOAD_SUPER_ATTR":  # from 3.12 on: of `super()`
        return bool((step.arg or 0) & 1)
    return step.opname == "LOAD_METHOD"


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
) -> tuple[Sequence[_Place], Sequence[_Followed], frozenset[str]]:
    """Look at the forward of a class, those of its bases, and the methods and functions of its file that they call."""
    functions = _functions_of(kind if issubclass(kind, Function) else forward)
    owners = [vars(owner) for owner in kind.__mro__ if not owner.__module__.startswith(_TORCHS)]
    places, followed = {}, list[_Followed]()
    for function in functions:  # grows
        namespace, names = function.__globals__, names_of(function.__code__)
        called = [
            function_in(owner.get(name)) for name in ("forward", *names.of_attributes) for owner in owners
        ]
        for name in () if is_torchs(namespace) else names.of_globals:
            value = namespace.get(name)
            if _functions_of(value):
                followed.append((weakref.ref(function), name, weakref.ref(value)))
            if own := functions_in(namespace, value):
                called += map(unwrapped, own)
            elif not isinstance(value, _NEVER_TENSORS) and (name in namespace or not hasattr(builtins, name)):
                places[id(namespace), name] = weakref.ref(function), name
        functions += [f for f in called if isinstance(f, types.FunctionType) and f not in functions]
    told = frozenset[str]().union(*map(telling_names, functions))
    telling = told - {"data"}  # set in methods that are named, and mostly never run
    return tuple(places.values()), tuple(followed), telling


def function_in(value: object) -> object:
    """Return the function that a class runs for a property, or a static or class method."""
    if isinstance(value, property):
        value = value.fget
    return unwrapped(value.__func__ if isinstance(value, _BOUND) else value)


def names_of(code: types.CodeType) -> Names:
    """Return what a function names; its code hashes slowly, and there is one for all functions that a line makes."""
    key = id(code)
    names = _names.get(key)
    if names is None or names.code() is not code:
        names = _names[key] = _find_names(code, weakref.ref(code, lambda _: _names.pop(key, None)))
    return names


def _find_names(code: types.CodeType, told: weakref.ref[types.CodeType]) -> Names:
    of_globals, of_attributes, telling = dict[str, None](), dict[str, None](), set[str]()
    asked = list[tuple[str, str]]()
    for one in (codes := [code]):  # grows
        codes += [held for held in one.co_consts if isinstance(held, types.CodeType)]
        before, dotted = "", list[str]()
        for step in dis.get_instructions(one):
            if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                of_globals[step.argval] = None
            elif step.opname in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"):
                of_attributes[step.argval] = None
                dotted.append(f"{before}.{step.argval}")
            before = step.argval
        telling |= SURE.intersection((*one.co_names, *one.co_freevars, *_texts_in(one), *dotted))
        if _UNSURE.intersection(one.co_names):
            done, asked_there = _done_in(one)
            telling |= done
            asked += asked_there if one is code else [(method, "") for method, _ in asked_there]
    return Names(told, tuple(of_globals), tuple(of_attributes), frozenset(telling), asked)


def _texts_in(code: types.CodeType) -> list[str]:
    """Return the texts in tuples among the constants of code, as the names of keyword arguments are; and a strategy."""
    held = [one for one in code.co_consts if isinstance(one, tuple)]
    strategy = [_FORWARD_MODE] if _FORWARD_MODE in code.co_consts else []
    return [*strategy, *[text for own in held for text in own if isinstance(text, str)]]
