"""What a method of a module names, where it does nothing but arithmetic, as its bytecode tells.

Rule 1. It has no functions of its own, changes nothing in place, and has no loops but those over parts of `self`:
        `for layer in self.layers`, with or without `enumerate` or `zip`, and none within another.
Rule 2. Of `self` it calls and takes attributes, and it calls the parts that it loops over. What these are is for the
        instance to say (`arithmetic`).
Rule 3. Of globals it names torch's modules and functions of theirs that compute (`FUNCTIONS`), numbers, and functions
        of Python's that it calls, and which by these rules do no more themselves, nor call others.
Rule 4. Of all that comes of these, tensors and numbers, it names only what tensors have for arithmetic (`METHODS`,
        `OPERATORS`).

What is not known here is more than arithmetic: another function, such as one that somebody has put in the place of
torch's, and an instruction of a Python that is not known.
"""

from __future__ import annotations

import builtins
import inspect
import itertools
import math
import re
import types
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from moe_autograd.autograd.bytecode import Step, steps_of
from moe_autograd.autograd.known_arithmetic import (
    DRAWING,
    FUNCTIONS,
    IN_PLACE,
    METHODS,
    MODULES,
    OPERATORS,
    RESHAPING,
    is_torchs_own,
)

PLAIN = frozenset([bool, int, float, type(None), torch.dtype])
LISTS = frozenset([nn.ModuleList, nn.Sequential])  # whose parts may be looped over

# What needs no look at what it names.
_HARMLESS = frozenset(
    [
        *("BINARY_OP", "BINARY_SLICE", "BINARY_SUBSCR", "BUILD_LIST", "BUILD_SLICE", "BUILD_STRING"),
        *("BUILD_TUPLE", "CALL", "COMPARE_OP", "CONVERT_VALUE", "COPY", "END_FOR", "FORMAT_SIMPLE"),
        *("FORMAT_VALUE", "FORMAT_WITH_SPEC", "FORWARD", "IS_OP", "KW_NAMES", "LOAD_ASSERTION_ERROR"),
        *("LOAD_CONST", "LOAD_SMALL_INT", "NOP", "NOT_TAKEN", "POP_ITER", "POP_TOP", "PUSH_NULL"),
        *("RAISE_VARARGS", "RESUME", "RETURN_CONST", "RETURN_VALUE", "SWAP", "TO_BOOL"),
        *("UNARY_NEGATIVE", "UNARY_NOT", "UNPACK_SEQUENCE"),
    ]
)
# What takes from below, leaves more than one on the stack, or goes elsewhere.
_LEAVES_ORDER = ("COPY", "FORWARD", "FOR_ITER", "JUMP_BACKWARD", "SWAP", "UNPACK_SEQUENCE")
_LOOP = re.compile(  # how one begins
    r"\b(LOAD_GLOBAL (LOAD ATTRIBUTE )+((LOAD_CONST|KW_NAMES) )*CALL |LOAD ATTRIBUTE )"
    r"GET_ITER FOR_ITER (UNPACK_SEQUENCE )?(STORE )+"
)
_WRAPPERS = (enumerate, zip)  # as long as nobody has put something else under these names
_BUILTINS = "__builtins__"  # of a function; typeshed does not always know of it
_OF_LOOPS = ("ATTRIBUTE", "LOAD", "LOAD_GLOBAL", "STORE", "UNPACK_SEQUENCE")
_TAKES_ANY = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS


class FunctionReading(NamedTuple):
    """What a method names that only computes.

    It holds no function, which would hold its file's globals, and these the class: a class that was read can go.

    Args:
        code: of the method. What reloads a file that was edited may put another into the same function.
        called: attributes of `self` that it calls, each time with how many arguments.
        taken: those whose value it takes.
        looped: those whose parts it calls in a loop.
        repeated: those that it calls or takes within a loop.
        of_globals: globals, and what they were.
        functions: globals that are functions of Python's which it calls, and what these do.
        of_others: attributes of torch's modules and classes, and of Python's own: whose, the name, and what they were.
        draws: whether it names a function that may draw random numbers.
        reshapes: whether it names what may put columns into the place of rows.
    """

    code: types.CodeType
    called: Mapping[str, Sequence[float]]
    taken: frozenset[str]
    looped: frozenset[str]
    repeated: frozenset[str]
    of_globals: Mapping[str, object]
    functions: Mapping[str, FunctionReading]
    of_others: Collection[tuple[object, str, object]]
    draws: bool
    reshapes: bool

    def is_true_of(self, function: types.FunctionType) -> bool:
        """Whether it still has that code, and its file, torch and Python what it names."""
        if function.__code__ is not self.code or getattr(function, _BUILTINS) is not vars(builtins):
            return False
        namespace = function.__globals__
        return (
            takes_no_functions(function)
            and all(namespace.get(name) is value for name, value in self.of_globals.items())
            and all(getattr(owner, name, None) is value for owner, name, value in self.of_others)
            and all(_is_still(reading, namespace.get(name)) for name, reading in self.functions.items())
        )


def _is_still(reading: FunctionReading, function: object) -> bool:
    return isinstance(function, types.FunctionType) and reading.is_true_of(function)


def read_function(function: types.FunctionType, *, is_method: bool = True) -> FunctionReading | None:
    """Return what a method names, or a function; `None` if it may do more than arithmetic."""
    code = function.__code__
    if code.co_argcount < is_method or code.co_flags & _TAKES_ANY:
        return None
    if any(map(_may_change, code.co_consts)) or not takes_no_functions(function):
        return None
    return _Reader(function, is_method=is_method).reading()


def takes_no_functions(function: types.FunctionType) -> bool:
    """Whether those of its arguments that need not be given are numbers then."""
    defaults = (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values())
    return all(type(one) in PLAIN for one in defaults)


def _may_change(constant: object) -> bool:
    """Whether a constant names an argument by which functions change what they are given."""
    return isinstance(constant, tuple) and not IN_PLACE.isdisjoint(
        one for one in constant if isinstance(one, str)
    )


def is_function(value: object, num_arguments: float, known: Mapping[Any, float] = FUNCTIONS) -> bool:
    """Whether it is one of those that are known, called with so many arguments."""
    if not isinstance(value, types.FunctionType | types.BuiltinFunctionType):
        return False
    return num_arguments <= known.get(value, -1)


class _Reader:
    """Reads one method, or a function."""

    def __init__(self, function: types.FunctionType, *, is_method: bool) -> None:
        self._function = function
        self._this = function.__code__.co_varnames[0] if is_method else None
        self._steps = [*steps_of(function.__code__)]
        self._called = dict[str, list[float]]()
        self._taken, self._looped, self._repeated = set[str](), set[str](), set[str]()
        self._of_globals: dict[str, object] = {}
        self._functions: dict[str, FunctionReading] = {}
        self._of_others: dict[tuple[object, str], object] = {}
        self._draws = False
        # places of attributes of `self` and of modules, and of what begins loops
        self._understood = set[int]()
        self._parts = set[str]()  # variables for parts
        self._loops: list[Step] = []  # where each takes its next part

    def reading(self) -> FunctionReading | None:
        """Return what it names, or `None` if there is something else in it."""
        self._find_loops()
        if any(loop.value > later.offset for loop, later in itertools.pairwise(self._loops)):
            return None  # one within another
        if not all(self._is_arithmetic(place, step) for place, step in enumerate(self._steps)):
            return None
        named = [name for _, name in self._of_others]
        named += [getattr(value, "__name__", "") for value in self._of_globals.values()]
        functions = self._functions.values()
        return FunctionReading(
            self._function.__code__,
            self._called,
            frozenset(self._taken),
            frozenset(self._looped),
            frozenset(self._repeated),
            self._of_globals,
            self._functions,
            [(owner, name, value) for (owner, name), value in self._of_others.items()],
            self._draws or any(one.draws for one in functions),
            not RESHAPING.isdisjoint(named) or any(one.reshapes for one in functions),
        )

    def _is_arithmetic(self, place: int, step: Step) -> bool:
        if place in self._understood:
            return True
        match step.name:
            case "LOAD":
                return self._is_used_as_what_it_is(place, step.value)
            case "STORE":
                return bool(step.value != self._this)
            case "LOAD_GLOBAL":
                return self._names_function(place)
            case "ATTRIBUTE" | "METHOD":
                return step.value in METHODS and self._is_torchs_own(step.value)
            case "JUMP_BACKWARD":
                return any(step.value == loop.offset for loop in self._loops)
        operator = step.value if step.name in ("BINARY_OP", "COMPARE_OP") else step.name
        return step.name in _HARMLESS and all(map(self._is_torchs_own, OPERATORS.get(operator, ())))

    def _is_used_as_what_it_is(self, place: int, variable: str) -> bool:
        """Whether a variable on the stack is asked for an attribute if it is `self`, and called if it is a part."""
        if variable == self._this:
            return self._names_attribute(place + 1)
        return variable not in self._parts or self._num_arguments(place) < math.inf

    def _names_attribute(self, place: int) -> bool:
        """Note which attribute of `self` is looked up next."""
        if (step := self._attribute_at(place)) is None:
            return False
        name = step.value
        if any(loop.offset < step.offset < loop.value for loop in self._loops):
            self._repeated.add(name)
        if step.name == "METHOD":
            self._called.setdefault(name, []).append(self._num_arguments(place))
        else:
            self._taken.add(name)
        return True

    def _names_function(self, place: int) -> bool:
        """Note the global that is named here, and see that it is, or leads to, a function or a number."""
        name = self._steps[place].value
        value = self._function.__globals__.get(name)
        if isinstance(value, types.FunctionType) and not is_torchs_own(value):
            return self._calls_function(place, value)
        self._of_globals[name] = value
        while any(value is module for module in MODULES):
            place += 1
            if (step := self._attribute_at(place)) is None:
                return False
            value = self._what_is(value, step.value)
        if value is not None and type(value) in PLAIN:
            return True
        num_arguments = self._num_arguments(place)
        if is_function(value, num_arguments, DRAWING):
            self._draws = True
            return True
        return is_function(value, num_arguments)

    def _calls_function(self, place: int, function: types.FunctionType) -> bool:
        """Note that a function of somebody's is called here, and see that it only computes."""
        if self._this is None or self._num_arguments(place) == math.inf:
            return False
        name = self._steps[place].value
        reading = self._functions.get(name) or read_function(function, is_method=False)
        if reading is None:
            return False
        self._functions[name] = reading
        return True

    def _is_torchs_own(self, method: str) -> bool:
        """Note what a tensor has under that name, and see that nobody has put it there."""
        return is_torchs_own(self._what_is(Tensor, method))

    def _what_is(self, owner: object, name: str) -> object:
        """Return an attribute, of which note is taken."""
        value = self._of_others[owner, name] = getattr(owner, name, None)
        return value

    def _num_arguments(self, place: int) -> float:
        """Return how many arguments are given to what is put on the stack there; infinity: not known."""
        height = 0  # of what lies above it
        for step in self._steps[place + 1 :]:
            if step.name == "CALL" and height == step.value[1] and not step.is_target:
                return float(step.value[0])
            height += step.effect
            is_beside = height > 0 or step.name in ("KW_NAMES", "PUSH_NULL")  # what it leaves lies above
            if not is_beside or step.is_target or step.name in _LEAVES_ORDER:
                break  # something else may be done with it
        return math.inf

    def _attribute_at(self, place: int) -> Step | None:
        """Return the step there, if it looks up an attribute of what the one before it has put on the stack."""
        step = self._steps[place]
        if step.name not in ("ATTRIBUTE", "METHOD") or step.is_target:
            return None
        self._understood.add(place)
        return step

    # ---- loops

    def _find_loops(self) -> None:
        """Find the loops over parts of `self`; those over anything else are not understood."""
        sentence = "".join([f"{step.name} " for step in self._steps])
        for found in _LOOP.finditer(sentence):
            begin, end = (sentence.count(" ", 0, at) for at in found.span())
            if self._begins_loop(self._steps[begin:end]):
                self._understood.update(range(begin, end))

    def _begins_loop(self, steps: Sequence[Step]) -> bool:
        """Whether a loop that begins so is over parts of `self`, each in a variable of its own; note which."""
        named = {name: [step.value for step in steps if step.name == name] for name in _OF_LOOPS}
        lists, variables, unpacked = named["ATTRIBUTE"], named["STORE"], named["UNPACK_SEQUENCE"]
        wrapper = next(iter(named["LOAD_GLOBAL"]), None)
        given = {None: 1, "enumerate": 2, "zip": len(lists)}.get(wrapper)  # how many at a time
        if {*named["LOAD"]} != {self._this} or self._this in variables:
            return False
        if unpacked != [given] * (wrapper is not None) or len(variables) != given:  # else a part is unpacked
            return False
        if any(step.is_target for step in steps[1:] if step.name != "FOR_ITER"):
            return False
        if wrapper is not None and not self._is_pythons_own(wrapper):
            return False
        if not all(is_torchs_own(self._what_is(kind, "__iter__")) for kind in LISTS):
            return False
        self._looped.update(lists)
        self._parts.update(variables[wrapper == "enumerate" :])
        self._loops += [step for step in steps if step.name == "FOR_ITER"]
        return True

    def _is_pythons_own(self, wrapper: str) -> bool:
        """Note what `enumerate` or `zip` is, and see that nobody has put something else in its place."""
        in_file = self._of_globals[wrapper] = self._function.__globals__.get(wrapper)
        return in_file is None and self._what_is(builtins, wrapper) in _WRAPPERS
