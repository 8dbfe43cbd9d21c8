"""The instructions of a function, told alike for CPython 3.11 to 3.14.

They differ in small things: some Pythons load or store two variables by one instruction, look up by one of its own what
is called next, or announce a call before it.
"""

from __future__ import annotations

import dis
import sys
import types
from collections.abc import Collection, Iterable, Iterator
from typing import Any, NamedTuple

_LOADS = (
    *("LOAD_FAST", "LOAD_FAST_BORROW", "LOAD_FAST_LOAD_FAST", "LOAD_FAST_BORROW_LOAD_FAST_BORROW"),
    "LOAD_FAST_CHECK",  # from 3.12 on: of a variable that may not be there yet
)
_STORES = ("STORE_FAST", "STORE_FAST_STORE_FAST")
_LIST_TO_TUPLE = 6  # the number of a function within the interpreter, from 3.12 on
_FORWARD = ("JUMP_FORWARD", "POP_JUMP_FORWARD_IF_", "POP_JUMP_IF_")


class Step(NamedTuple):
    """One thing that a function does.

    Args:
        name: `LOAD` and `STORE` of a variable, `ATTRIBUTE`, `METHOD` (an attribute that is called next), `OF_BASES`
            (one of `super()`, from 3.12 on), `CALL`, `IN_PLACE` and `FORWARD` (a jump); of all else that of the
            instruction.
        value: what it names; of a call how many arguments it has, and how high the stack is above what is called;
            of an operator its symbol.
        effect: how much higher the stack is after it.
        offset: where the instruction is.
        is_target: whether a jump leads to it.
    """

    name: str
    value: Any
    effect: int
    offset: int
    is_target: bool


def steps_of(code: types.CodeType) -> Iterator[Step]:
    """Return what a function does, in order."""
    for one in dis.get_instructions(code):
        if one.opname != "PRECALL":
            for place, (name, value, effect) in enumerate(_told_alike(one)):
                yield Step(name, value, effect, one.offset, one.is_jump_target and place == 0)


def with_attributes(steps: Iterable[Step], names: Collection[str], this: str) -> Iterator[Step]:
    """Return the steps with free variables, and other variables of these names, as attributes of a variable `this`."""
    for step in steps:
        is_one = step.name == "LOAD_DEREF" or (step.name in ("LOAD", "LOAD_GLOBAL") and step.value in names)
        if is_one:
            yield step._replace(name="LOAD", value=this)
            yield Step("ATTRIBUTE", step.value, 0, step.offset, False)
        elif step.name == "STORE" and step.value in names:
            yield step._replace(value=this)
        else:
            yield step


def _told_alike(one: dis.Instruction) -> list[tuple[str, Any, int]]:
    """Return name, value and effect of what an instruction does.

    What is called counts as one on the stack: some Pythons have the other half of it above, and some below.
    """
    arg = one.arg or 0
    match one.opname:
        case name if name in _LOADS:
            return [("LOAD", variable, 1) for variable in variables_of(one)]
        case name if name in _STORES:
            return [("STORE", variable, -1) for variable in variables_of(one)]
        case "STORE_FAST_LOAD_FAST":
            stored, loaded = variables_of(one)
            return [("STORE", stored, -1), ("LOAD", loaded, 1)]
        case "LOAD_GLOBAL":
            return [("LOAD_GLOBAL", one.argval, 1)]
        case "LOAD_ATTR" | "LOAD_METHOD":
            return [("METHOD" if looks_up_method(one) else "ATTRIBUTE", one.argval, 0)]
        case "LOAD_COMMON_CONSTANT" if one.argrepr == "AssertionError":  # from 3.14 on; `all` is another
            return [("LOAD_ASSERTION_ERROR", None, 1)]
        case "LOAD_SUPER_ATTR":
            return [("OF_BASES", one.argval, -2)]
        case "PUSH_NULL":
            return [("PUSH_NULL", None, 0)]
        case "CALL":
            return [("CALL", (arg, arg), -arg)]
        case "CALL_INTRINSIC_1" if arg == _LIST_TO_TUPLE:
            return [("LIST_TO_TUPLE", None, 0)]
        case "CALL_KW":  # the names lie on the stack, too
            return [("CALL", (arg, arg + 1), -arg - 1)]
    effect = dis.stack_effect(one.opcode, one.arg)
    if one.opname == "BINARY_OP" and one.argrepr.endswith("="):
        return [("IN_PLACE", one.argval, effect)]
    if one.opname == "BINARY_OP":
        return [("BINARY_OP", one.argrepr, effect)]
    if one.opname.startswith(_FORWARD):
        return [("FORWARD", one.argval, effect)]
    return [(one.opname, one.argval, effect)]


def looks_up_method(one: dis.Instruction) -> bool:
    """Whether an instruction looks up what is called next, as a method of something, or (from 3.12 on) of `super()`."""
    if one.opname in ("LOAD_ATTR", "LOAD_SUPER_ATTR"):
        return sys.version_info >= (3, 12) and bool((one.arg or 0) & 1)
    return one.opname == "LOAD_METHOD"


def variables_of(one: dis.Instruction) -> tuple[Any, ...]:
    """Return the variables of an instruction that has some; from 3.13 on several have two."""
    return one.argval if isinstance(one.argval, tuple) else (one.argval,)
