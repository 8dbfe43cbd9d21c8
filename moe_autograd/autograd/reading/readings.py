"""What was read of a function, and whether it is still so (`function_reading`)."""

from __future__ import annotations

import builtins
import dataclasses
import types
import weakref

import torch
from torch import Tensor, nn

PLAIN = frozenset([bool, int, float, str, type(None), torch.dtype])
_BUILTINS = "__builtins__"  # of a function; typeshed does not always know of it


@dataclasses.dataclass(slots=True, kw_only=True)
class Named:
    """What code that only computes names of `self`, and what that comes to.

    Args:
        asked: attributes, and a method or a part of each that it calls; of functions alone (`callees`).
        taken: attributes whose value it takes.
        of_parts: parts, and an attribute of each, whose value it takes.
        looped: those with whose parts it goes round in a loop.
        listed: those of whose parts it takes one, or the number.
        numbers: those which say how often it goes round.
        num_rounds: how often it does besides.
        repeated: those that it calls or takes within a loop.
        draws: whether it names a function that may draw random numbers.
        reshapes: whether it names what may put columns into the place of rows.
    """

    asked: set[tuple[str, str]] = dataclasses.field(default_factory=set)
    taken: set[str] = dataclasses.field(default_factory=set)
    of_parts: set[tuple[str, str]] = dataclasses.field(default_factory=set)
    looped: set[str] = dataclasses.field(default_factory=set)
    listed: set[str] = dataclasses.field(default_factory=set)
    numbers: set[str] = dataclasses.field(default_factory=set)
    num_rounds: int = 0
    repeated: set[str] = dataclasses.field(default_factory=set)
    draws: bool = False
    reshapes: bool = False

    @property
    def has_loops(self) -> bool:
        """Whether it goes round in a loop."""
        return bool(self.looped or self.numbers or self.num_rounds)

    def add(self, other: Named) -> None:
        """Add what other code names of the same `self`."""
        self.asked |= other.asked
        self.taken |= other.taken
        self.of_parts |= other.of_parts
        self.looped |= other.looped
        self.listed |= other.listed
        self.numbers |= other.numbers
        self.num_rounds += other.num_rounds
        self.repeated |= other.repeated
        self.draws = self.draws or other.draws
        self.reshapes = self.reshapes or other.reshapes


@dataclasses.dataclass(slots=True, kw_only=True)
class FunctionReading(Named):
    """What a method names that only computes, as `function_reading` finds it.

    It holds no function, which would hold its file's globals, and these the class: a class that was read can go.

    Args:
        code: of the method, if it is still there. What reloads a file that was edited may put another into the same
            function.
        is_method: whether it takes `self`; others are static methods, and functions.
        around: arguments and globals that a function of rule 5 takes from around itself; `None`: it is none.
        called: attributes of `self` that it calls, each time with how many arguments.
        of_bases: those of `super()`, likewise.
        of_globals: globals, and what they were.
        functions: globals that are functions of Python's which it calls, and what these do.
        of_others: attributes of torch's modules and classes, and of Python's own: whose, the name, and what they were.
    """

    code: weakref.ref[types.CodeType]
    is_method: bool
    around: frozenset[str] | None
    called: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    of_bases: dict[str, list[float]] = dataclasses.field(default_factory=dict)
    of_globals: dict[str, object] = dataclasses.field(default_factory=dict)
    functions: dict[str, FunctionReading] = dataclasses.field(default_factory=dict)
    of_others: dict[tuple[object, str], object] = dataclasses.field(default_factory=dict)

    def is_true_of(self, function: types.FunctionType) -> bool:
        """Whether it still has that code, and its file, torch and Python what it names."""
        if function.__code__ != self.code() or getattr(function, _BUILTINS) is not vars(builtins):
            return False
        namespace = function.__globals__
        has_same = takes_no_functions(function) if self.around is None else self.around == around_of(function)
        return (
            has_same
            and all(namespace.get(name) is value for name, value in self.of_globals.items())
            and all(getattr(owner, name, None) is value for (owner, name), value in self.of_others.items())
            and all(_is_still(reading, namespace.get(name)) for name, reading in self.functions.items())
        )


def _is_still(reading: FunctionReading, function: object) -> bool:
    return isinstance(function, types.FunctionType) and reading.is_true_of(function)


def takes_no_functions(function: types.FunctionType) -> bool:
    """Whether those of its arguments that need not be given are numbers then."""
    return all(type(value) in PLAIN for _, value in defaults_of(function))


def around_of(function: types.FunctionType) -> frozenset[str]:
    """Return which arguments that need not be given, and which globals, are to be looked at as attributes."""
    return globals_around(function) | defaults_around(function)


def globals_around(function: types.FunctionType) -> frozenset[str]:
    """Return the globals that are to be looked at as attributes: modules and tensors."""
    code, namespace = function.__code__, function.__globals__
    names = [name for name in code.co_names if name not in code.co_varnames]  # of attributes, too
    # By its class: `isinstance` asks a value, which may be a proxy that is not to be resolved.
    return frozenset(name for name in names if issubclass(type(namespace.get(name)), nn.Module | Tensor))


def defaults_around(function: types.FunctionType) -> frozenset[str]:
    """Return the arguments that need not be given, and are to be looked at as attributes: those that are no numbers."""
    if function.__defaults__ is None and function.__kwdefaults__ is None:  # mostly
        return frozenset()
    return frozenset(name for name, value in defaults_of(function) if type(value) not in PLAIN)


def defaults_of(function: types.FunctionType) -> list[tuple[str, object]]:
    """Return those of its arguments that need not be given, and what they are then."""
    code = function.__code__
    by_place = zip(
        code.co_varnames[: code.co_argcount][::-1], (function.__defaults__ or ())[::-1], strict=False
    )
    return [*by_place, *(function.__kwdefaults__ or {}).items()]
