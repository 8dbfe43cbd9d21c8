"""What code looks up, by its instructions: paths such as `torch.func.jvp`, and to what they lead.

A path begins with a global, a variable of a closure, or what the code imports itself, and goes on with attributes. A
local variable stands for the path that was put into it. What begins with anything else, as with `self`, has none.
"""

from __future__ import annotations

import builtins
import contextlib
import dis
import sys
import types
from collections.abc import Iterator
from typing import Any

from moe_autograd.autograd.reading.bytecode import variables_of


class NotYet:
    """Stands for what is not there yet: a module that is imported when the code runs, or what is in it."""


def looked_up(code: types.CodeType, variables: dict[str, str]) -> Iterator[tuple[dis.Instruction, str]]:
    """Yield the instructions of code, and with each the path that ends there, or "".

    Args:
        code: of a function.
        variables: for each variable of its closure the path that it stands for. Those of its own are added.
    """
    path = imported = ""
    is_whole, constant = False, None
    for step in dis.get_instructions(code):
        names = variables_of(step)
        if step.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            path = step.argval
        elif step.opname == "IMPORT_NAME":
            # as a whole, `import a.b`, it is `a`, and `a.b` where that has a name
            imported, is_whole = step.argval, constant is None
            path = imported.split(".")[0] if is_whole else imported
        elif step.opname == "IMPORT_FROM":
            path = imported if is_whole else f"{imported}.{step.argval}"
        elif step.opname in ("LOAD_ATTR", "LOAD_METHOD", "STORE_ATTR"):
            path = path and f"{path}.{step.argval}"
        elif step.opname.startswith(("STORE_FAST", "STORE_DEREF")):
            variables[names[0]] = path
            path = variables.get(names[-1], "") if "LOAD" in step.opname else ""
        elif step.opname.startswith(("LOAD_FAST", "LOAD_DEREF")):
            path = variables.get(names[-1], "")
        elif step.opname not in ("CACHE", "EXTENDED_ARG"):
            path = ""
        constant = step.argval if step.opname == "LOAD_CONST" else None
        yield step, path


def value_of(function: types.FunctionType, name: str) -> object:
    """Return what a global of a function, or a variable of its closure, or a module of this name is."""
    if name in function.__code__.co_freevars:
        cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
        with contextlib.suppress(ValueError):  # nothing is in the cell yet
            return cells[name].cell_contents
    for there in (function.__globals__, vars(builtins), sys.modules):
        if (value := there.get(name, NotYet)) is not NotYet:  # others may change them meanwhile
            return value
    return NotYet


def follow(function: types.FunctionType, path: str) -> tuple[str, object]:
    """Return to what a path leads, and the name of the last module on the way; nothing behind other objects."""
    first, *names = path.split(".")
    module, value = "", value_of(function, first)
    for name in names:
        if not isinstance(value, types.ModuleType):
            return module, NotYet if value is NotYet else None
        # nothing that a module defines is to run
        module, value = value.__name__, vars(value).get(name, NotYet)
    return module, value


def in_closure(function: Any) -> list[Any]:
    """Return what the cells of a function's closure hold."""
    values = []
    for cell in getattr(function, "__closure__", None) or ():
        with contextlib.suppress(ValueError):  # nothing is in it yet; a cell tells only this way
            values.append(cell.cell_contents)
    return values
