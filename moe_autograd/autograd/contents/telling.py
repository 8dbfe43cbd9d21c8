"""The names that tell of what can be done for one thread at a time only, and how code has them; see `named`."""

from __future__ import annotations

import contextlib
import dis
import inspect
import types
import weakref
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from torch import nn

from moe_autograd.autograd.contents.lookups import NotYet, follow, looked_up, value_of
from moe_autograd.autograd.reading.bytecode import looks_up_method

TORCHS = "torch."  # how the names of its files begin
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
_UNSURE = _METHODS | _SET  # `_done_in` looks what is done with it
_ADAPTERS = "adapter_names"  # a keyword of `peft`
# rule 1: names of what changes modules, as users' code and torch's own have them
CHANGING = frozenset(
    [
        *("functional_call", "_functional_call", "_reparametrize_module", "_swap_state", _ADAPTERS),
        *("register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook"),
        *("register_full_backward_pre_hook", "register_parametrization", "remove_parametrizations"),
        *_METHODS,
        *_SET,
    ]
)
CACHED = "parametrize.cached"  # looked for by itself: others may call something `cached`
_BACKENDS = "torch.backends"  # where they are set: mostly they are read
_FLAGS = frozenset(["flags", "set_flags"])  # which do so
_FORWARD_MODE = "forward-mode"  # the strategy of a `torch.autograd.functional.jacobian`
_TRACING = frozenset(["cond", "scan", "map"])  # others have such names, but not of torch
_TORCHS_OWN = frozenset([TORCHS + name for name in _TRACING])
# for attributes of modules, keywords and functions of a file these are ordinary words
_ORDINARY = frozenset(
    ["breakpoint", "set_trace", "chdir", "jvp", "jacfwd", "hessian", "linearize", "dual_level", "while_loop"]
)
SETTING = frozenset(  # rule 2
    [
        *("sdpa_kernel", "sdp_kernel", "set_default_dtype"),
        *(CACHED, _BACKENDS),
        *("enable_flash_sdp", "enable_math_sdp", "enable_mem_efficient_sdp", "enable_cudnn_sdp"),
        *("set_float32_matmul_precision", "use_deterministic_algorithms", "set_deterministic_debug_mode"),
        *("detect_anomaly", "set_detect_anomaly"),
        *("catch_warnings", "redirect_stdout", "redirect_stderr"),
        *("allow_mutation_on_saved_tensors", "FlopCounterMode"),
        *("make_fx", "symbolic_trace", _FORWARD_MODE),
        *_TORCHS_OWN,
        *_ORDINARY,
    ]
)
TALKING = frozenset(  # rule 3; not `gather`, `scatter` and others that tensors have, too
    [
        *("all_reduce", "all_reduce_coalesced", "broadcast", "broadcast_object_list"),
        *("all_gather", "all_gather_coalesced", "all_gather_into_tensor", "all_gather_object"),
        *("all_gather_single", "all_gather_tensor"),
        *("reduce_scatter", "reduce_scatter_single", "reduce_scatter_tensor"),
        *("all_to_all", "all_to_all_single", "gather_into_tensor", "gather_object", "gather_single"),
        *("scatter_object_list", "send_object_list", "recv_object_list", "monitored_barrier"),
        *("all_gather_single_autograd", "all_gather_tensor_autograd", "all_to_all_single_autograd"),
        *("reduce_scatter_single_autograd", "reduce_scatter_tensor_autograd"),
        *("isend", "irecv", "batch_isend_irecv"),
    ]
)
_TELLING = CHANGING | SETTING | TALKING
SURE = _TELLING - _UNSURE
_BY_NAME = SURE - _ORDINARY
_BY_PATH = _ORDINARY | _TRACING | _FLAGS
_MAY_TELL = _TELLING | _BY_PATH | {"backends"}

_names: dict[int, Names] = {}  # what functions name, by the `id` of their code, as long as that lives


class Names(NamedTuple):
    """What a function names, and the functions in it; see `names_of`.

    Args:
        code: its code.
        of_globals: the globals.
        of_attributes: the attributes.
        telling: those of `CHANGING`, `SETTING` and `TALKING` that tell by themselves.
        asked: methods among them, and of what they are called (`_done_in`).
        paths: which lead to something that may tell.
        stored: which lead to what is set.
    """

    code: weakref.ref[types.CodeType]
    of_globals: tuple[str, ...]
    of_attributes: tuple[str, ...]
    telling: frozenset[str]
    asked: Sequence[tuple[str, str]]
    paths: Sequence[str]
    stored: Sequence[str]


def names_of(code: types.CodeType) -> Names:
    """Return what a function names; its code hashes slowly, and there is one for all functions that a line makes."""
    key = id(code)
    names = _names.get(key)
    if names is None or names.code() is not code:
        names = _names[key] = _find_names(code, weakref.ref(code, lambda _: _names.pop(key, None)))
    return names


def told_by(function: types.FunctionType, names: Names) -> frozenset[str]:
    """Return those of `CHANGING`, `SETTING` and `TALKING` that the code of a function, by its names, tells of."""
    telling = names.telling - _harmless(function, names.asked) if names.asked else names.telling
    if names.paths or names.stored:
        telling = telling.union(_meant_by(function, names))
    return telling


def told_by_named(function: types.FunctionType) -> frozenset[str]:
    """Return likewise what another function is told of that names this one: not by the functions in it."""
    named = _MAY_TELL.intersection(function.__code__.co_names)
    if not named:  # mostly
        return named
    return told_by(function, names_of(function.__code__)) & (named | _TORCHS_OWN | {_BACKENDS})


def _meant_by(function: types.FunctionType, names: Names) -> Iterator[str]:
    """Yield what paths tell by that to which they lead; what is not there yet is taken at its word."""
    for path in names.stored:
        if _is_of_backends(follow(function, path)[0]):
            yield _BACKENDS
    for path in names.paths:
        word = path.rpartition(".")[2]
        module, value = follow(function, path)
        origin = module if value is NotYet else str(getattr(value, "__module__", ""))
        if word in _FLAGS:
            if _is_of_backends(origin):
                yield _BACKENDS
        elif word in _TRACING:
            if f"{origin}.".startswith(TORCHS):
                yield TORCHS + word
        elif callable(value) and getattr(value, "__globals__", None) is not function.__globals__:
            yield word


def _is_of_backends(module: str) -> bool:
    return f"{module}.".startswith(f"{_BACKENDS}.")


def _find_names(code: types.CodeType, told: weakref.ref[types.CodeType]) -> Names:
    of_globals, of_attributes, telling = dict[str, None](), dict[str, None](), set[str]()
    asked, paths, stored = list[tuple[str, str]](), dict[str, None](), dict[str, None]()
    codes = [(code, {name: name for name in code.co_freevars})]
    for one, variables in codes:  # grows
        for step, path in looked_up(one, variables):
            if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                of_globals[step.argval] = None
            elif step.opname in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR"):
                of_attributes[step.argval] = None
            if step.opname == "STORE_ATTR" and path:
                stored[path] = None
            elif path.rpartition(".")[2] in _BY_PATH:
                paths[path] = None
        for held in one.co_consts:
            if isinstance(held, types.CodeType):
                codes.append((held, {name: variables.get(name, "") for name in held.co_freevars}))
        telling |= _BY_NAME.intersection((*one.co_names, *one.co_freevars))
        telling.update(_told_by_keywords(one))
        if _UNSURE.intersection(one.co_names):
            done, asked_there = _done_in(one)
            telling |= done
            asked += asked_there if one is code else [(method, "") for method, _ in asked_there]
    looked = tuple(of_globals), tuple(of_attributes)
    return Names(told, *looked, frozenset(telling), asked, tuple(paths), tuple(stored))


def _told_by_keywords(code: types.CodeType) -> Iterator[str]:
    """Yield what the names of keyword arguments tell, which stand in tuples among the constants of code."""
    keywords = {text for held in code.co_consts if isinstance(held, tuple) for text in held}
    if _ADAPTERS in keywords:
        yield _ADAPTERS
    if "strategy" in keywords and _FORWARD_MODE in code.co_consts:
        yield _FORWARD_MODE


def _harmless(function: types.FunctionType, asked: Iterable[tuple[str, str]]) -> set[str]:
    """Return those methods that are called only of objects that are no modules, and whose own they are."""
    methods = {method for method, _ in asked}
    for method, name in asked:
        if not _is_of_its_own(value_of(function, name), method):
            methods.discard(method)
    return methods


def _is_of_its_own(value: object, method: str) -> bool:
    """Whether a method is one of a user's class that is no module, holds none, and does nothing telling there."""
    own = inspect.getattr_static(type(value), method, None)
    if not isinstance(own, types.FunctionType):
        return False
    names = names_of(own.__code__)
    if names.telling.union(_meant_by(own, names)):
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
        if step.opname in ("LOAD_CONST", "LOAD_SMALL_INT"):
            constant = step.argval
        elif step.starts_line:
            constant = None
        if step.opname == "STORE_ATTR" and step.argval in _SET:
            # the value is put on the stack, then what it is set of: `b.requires_grad = a.requires_grad`
            is_passed_on = (steps[i - 2].opname, steps[i - 2].argval) == ("LOAD_ATTR", "requires_grad")
            if constant is not True and not (is_passed_on and step.argval == "requires_grad"):
                done.add(step.argval)
        elif step.argval in _METHODS and looks_up_method(step) and not _unfreezes(step, steps[i + 1]):
            done.add(step.argval)
            asked.append((step.argval, _outside(steps[i - 1], code)))
    return done, asked


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
