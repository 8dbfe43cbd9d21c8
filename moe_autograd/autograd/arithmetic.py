"""Whether the `forward` of a user's class does nothing but arithmetic on its input, as its bytecode tells.

Most experts are classes of a few lines, such as `self.w2(F.silu(self.w1(x)) * self.w3(x))`. One that can neither wait
nor be waited for may be called in turn (`in_turn`). So a forward is read, once for each class, and only computes where

1. it takes one argument besides `self`, and has no loops, no functions of its own, and changes nothing in place;
2. of `self` it calls only parts, and functions of rule 3, and takes only parameters, buffers and numbers: of an
   instance, since what the class defines under a name may be a property;
3. of globals it names only torch's modules and functions of theirs that compute (`FUNCTIONS`);
4. of all that comes of these, tensors and numbers, it names only what tensors have for arithmetic (`METHODS`).

What is not known here is more than arithmetic: another function, such as one that somebody has put in the place of
torch's, and an instruction of a Python that is not known.
"""

from __future__ import annotations

import dis
import inspect
import itertools
import math
import sys
import types
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from moe_autograd.autograd.known_arithmetic import FUNCTIONS, IN_PLACE, METHODS, MODULES, is_torchs_own

_PLAIN = frozenset([bool, int, float, type(None), torch.dtype])

# What instructions of CPython 3.11 to 3.14 do: put variables on the stack, store them, look up attributes of what lies
# on top, or something with what lies there. The jumps all go forward: those back, of loops, have other names.
_LOADS = ("LOAD_FAST", "LOAD_FAST_BORROW", "LOAD_FAST_LOAD_FAST", "LOAD_FAST_BORROW_LOAD_FAST_BORROW")
_STORES = ("STORE_FAST", "STORE_FAST_LOAD_FAST", "STORE_FAST_STORE_FAST")
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")
_OTHERS = frozenset(
    [
        *("BINARY_OP", "BINARY_SLICE", "BINARY_SUBSCR", "BUILD_LIST", "BUILD_SLICE", "BUILD_TUPLE"),
        *("CALL", "CALL_KW", "COMPARE_OP", "COPY", "IS_OP", "JUMP_FORWARD", "KW_NAMES", "LOAD_CONST"),
        *("LOAD_SMALL_INT", "NOP", "NOT_TAKEN", "POP_JUMP_FORWARD_IF_FALSE", "POP_JUMP_FORWARD_IF_NONE"),
        *("POP_JUMP_FORWARD_IF_NOT_NONE", "POP_JUMP_FORWARD_IF_TRUE", "POP_JUMP_IF_FALSE"),
        *("POP_JUMP_IF_NONE", "POP_JUMP_IF_NOT_NONE", "POP_JUMP_IF_TRUE", "POP_TOP", "PRECALL"),
        *("PUSH_NULL", "RESUME", "RETURN_CONST", "RETURN_VALUE", "SWAP", "TO_BOOL", "UNARY_NEGATIVE"),
        *("UNARY_NOT", "UNPACK_SEQUENCE"),
    ]
)
_CALLS = ("PRECALL", "CALL", "CALL_KW")
_JUMPS = frozenset([*dis.hasjrel, *dis.hasjabs])
_NOT_PLAIN = (
    inspect.CO_VARARGS
    | inspect.CO_VARKEYWORDS
    | inspect.CO_GENERATOR
    | inspect.CO_COROUTINE
    | inspect.CO_ASYNC_GENERATOR
    | inspect.CO_ITERABLE_COROUTINE
)


class Reading(NamedTuple):
    """What a forward names, where it only computes.

    It holds no function, which would hold its file's globals, and these the class: a class that was read can go.

    Args:
        code: of the forward. What reloads a file that was edited may put another into the same function.
        called: attributes of `self` that it calls, with how many arguments by place at most.
        taken: those whose value it takes.
        of_globals: globals, and what they were.
        of_torch: attributes of torch's modules and of its tensors: whose, the name, and what they were.
    """

    code: types.CodeType
    called: Mapping[str, float]
    taken: frozenset[str]
    of_globals: Mapping[str, object]
    of_torch: Collection[tuple[object, str, object]]

    def is_true_of(self, kind: Any) -> bool:
        """Whether the class still has that forward, and its file and torch what it names."""
        forward = _forward_of(kind)
        if forward is None or forward.__code__ is not self.code or not _is_called_as_usual(kind):
            return False
        namespace = forward.__globals__
        return (
            all(namespace.get(name) is value for name, value in self.of_globals.items())
            and all(getattr(owner, name, None) is value for owner, name, value in self.of_torch)
            and not any(hasattr(kind, name) for name in (*self.called, *self.taken))
        )

    def fits(self, module: nn.Module) -> bool:
        """Whether an instance has what the forward takes of it. Written out: it is asked before each call."""
        own = module.__dict__
        if "_modules" not in own:  # its `__init__` was not called
            return False
        parts, parameters, buffers = own["_modules"], own["_parameters"], own["_buffers"]
        for name, num_arguments in self.called.items():
            if not (_is_function(own[name], num_arguments) if name in own else name in parts):
                return False
        for name in self.taken:
            if name in own:
                if type(own[name]) not in _PLAIN:
                    return False
            elif (
                name not in parameters and type(buffers.get(name)) is not Tensor
            ):  # `in_turn` sees to parameters
                return False
        return True


_readings: WeakKeyDictionary[type, Reading | None] = WeakKeyDictionary()


def reading_of(kind: type) -> Reading | None:
    """Return what the forward of a class names if it does nothing but arithmetic, as long as its parts do not either.

    Threads: any.
    """
    if not issubclass(kind, nn.Module):
        return None
    try:
        reading = _readings[kind]
    except KeyError:
        reading = _readings[kind] = _read(kind)
    if reading is not None and not reading.is_true_of(kind):
        reading = _readings[kind] = _read(kind)
    return reading


def _is_function(value: object, num_arguments: float) -> bool:
    """Whether it is one that only computes, called with so many arguments by place."""
    if not isinstance(value, types.FunctionType | types.BuiltinFunctionType):
        return False
    return num_arguments <= FUNCTIONS.get(value, -1)


def _forward_of(kind: type[nn.Module]) -> types.FunctionType | None:
    """Return the function; `None` if it is something else, such as what TorchScript has there, which a class lacks."""
    forward = getattr(kind, "forward", None)
    return forward if type(forward) is types.FunctionType else None


def _read(kind: type[nn.Module]) -> Reading | None:
    """Read the forward of a class; return `None` if it may do more than arithmetic."""
    forward = _forward_of(kind)
    if forward is None:
        return None
    code = forward.__code__
    if code.co_argcount != 2 or code.co_kwonlyargcount or code.co_flags & _NOT_PLAIN:
        return None
    if code.co_freevars or code.co_cellvars or any(map(_may_change, code.co_consts)):
        return None
    reading = _Reader(forward).reading()
    return reading if reading is not None and reading.is_true_of(kind) else None


def _is_called_as_usual(kind: type[nn.Module]) -> bool:
    names = ("__call__", "_call_impl", "_wrapped_call_impl", "__getattr__", "__getattribute__")
    return all(getattr(kind, name) is getattr(nn.Module, name) for name in names)


def _may_change(constant: object) -> bool:
    """Whether a constant names an argument by which functions change what they are given."""
    return isinstance(constant, tuple) and not IN_PLACE.isdisjoint(
        one for one in constant if isinstance(one, str)
    )


class _Reader:
    """Reads one forward."""

    def __init__(self, forward: types.FunctionType) -> None:
        self._forward = forward
        self._this = forward.__code__.co_varnames[0]
        self._steps = [*dis.get_instructions(forward)]
        self._called, self._taken = dict[str, float](), set[str]()
        self._of_globals: dict[str, object] = {}
        self._of_torch: dict[tuple[object, str], object] = {}
        self._understood = set[int]()  # places of attributes of `self` and of modules

    def reading(self) -> Reading | None:
        """Return what it names, or `None` if there is something else in it."""
        if not all(self._is_arithmetic(place, step) for place, step in enumerate(self._steps)):
            return None
        code = self._forward.__code__
        of_torch = [(owner, name, value) for (owner, name), value in self._of_torch.items()]
        return Reading(code, self._called, frozenset(self._taken), self._of_globals, of_torch)

    def _is_arithmetic(self, place: int, step: dis.Instruction) -> bool:
        if step.opname in _LOADS:
            *others, last = _names_in(step)
            return self._this not in others and (last != self._this or self._names_attribute(place + 1))
        if step.opname in _STORES:
            return self._this not in _names_in(step)
        if step.opname == "LOAD_GLOBAL":
            return self._names_function(place)
        if step.opname in _ATTRIBUTES:
            return place in self._understood or self._names_method(step.argval)
        if step.opname == "BINARY_OP":
            return not step.argrepr.endswith("=")  # in place
        return step.opname in _OTHERS

    def _names_attribute(self, place: int) -> bool:
        """Note which attribute of `self` is looked up next."""
        if (step := self._attribute_at(place)) is None:
            return False
        if _is_method(step):
            called, name = self._called, step.argval
            called[name] = max(called.get(name, 0), self._num_arguments(place))
        else:
            self._taken.add(step.argval)
        return True

    def _names_function(self, place: int) -> bool:
        """Note the global that is named here, and see that it is, or leads to, a function or a number."""
        name = self._steps[place].argval
        value = self._of_globals[name] = self._forward.__globals__.get(name)
        while any(value is module for module in MODULES):
            place += 1
            if (step := self._attribute_at(place)) is None:
                return False
            owner, value = value, getattr(value, step.argval, None)
            self._of_torch[owner, step.argval] = value
        if value is not None and type(value) in _PLAIN:
            return True
        return _is_function(value, self._num_arguments(place))

    def _names_method(self, name: str) -> bool:
        """Note what a tensor has under that name, and see that it is known and torch's own."""
        value = self._of_torch[Tensor, name] = getattr(Tensor, name, None)
        return name in METHODS and (not isinstance(value, types.FunctionType) or is_torchs_own(value))

    def _num_arguments(self, place: int) -> float:
        """Return how many arguments are given by place to what is put on the stack there; infinity: not known."""
        height = 0  # of what lies above it
        for before, step in itertools.pairwise(self._steps[place:]):
            if step.is_jump_target or step.opcode in _JUMPS:
                break
            if step.opname in _CALLS and before.opname != "PRECALL":  # which is the call, too
                names: Any = ()
                if step.opname == "CALL_KW" or before.opname == "KW_NAMES":
                    names = self._forward.__code__.co_consts[before.arg or 0]
                if height == (step.arg or 0) + (step.opname == "CALL_KW"):  # the names lie there, too
                    return (step.arg or 0) - len(names)
            if step.opname != "PUSH_NULL" or before is not self._steps[place]:
                height += dis.stack_effect(step.opcode, step.arg)
            if height < 0:
                break
        return math.inf

    def _attribute_at(self, place: int) -> dis.Instruction | None:
        """Return the instruction there, if it looks up an attribute of what the one before it has put on the stack."""
        step = self._steps[place]
        if step.opname not in _ATTRIBUTES or step.is_jump_target:
            return None
        self._understood.add(place)
        return step


def _names_in(step: dis.Instruction) -> Sequence[str]:
    """Return the variables of an instruction; some have two."""
    return step.argval if isinstance(step.argval, tuple) else (step.argval,)


def _is_method(step: dis.Instruction) -> bool:
    """Whether an instruction looks up what is called next."""
    if step.opname == "LOAD_ATTR":
        return sys.version_info >= (3, 12) and bool((step.arg or 0) & 1)
    return True
