"""What a method of a module names, where it does nothing but arithmetic, as its bytecode tells.

Rule 1. It has no functions of its own, changes nothing in place, and has no loops but those over parts of `self` or
        over numbers (`bytecode_loops`), and none within another.
Rule 2. Of `self` it calls and takes attributes and attributes of parts, it calls the parts that it loops over, or takes
        from a list by their number, and by `super()` methods of bases. What all these are is for the instance and its
        class to say (`arithmetic`).
Rule 3. Of globals it names torch's modules and functions of theirs that compute (`FUNCTIONS`), numbers, errors to
        raise, what Python has for numbers (`PYTHONS`), and functions of a file that it calls, and which by these rules
        do no more themselves, nor call others.
Rule 4. Of all that comes of these, tensors and numbers, it names only what tensors have for arithmetic (`METHODS`,
        `OPERATORS`).
Rule 5. A function that a map is to call has no `self`. What it takes from around itself (free variables, arguments that
        need not be given, modules and tensors among its globals) is looked at as attributes of one would be, and
        methods of what is there may be called, too (`callees`).

What is not known here is more than arithmetic: another function, such as one that somebody has put in the place of
torch's, and an instruction of a Python that is not known.
"""

from __future__ import annotations

import builtins
import inspect
import itertools
import math
import types
import weakref
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from moe_autograd.autograd.reading.bytecode import Step, steps_of, with_attributes
from moe_autograd.autograd.reading.bytecode_loops import Loop, is_index, loops_of
from moe_autograd.autograd.reading.known_arithmetic import (
    DRAWING,
    FUNCTIONS,
    IN_PLACE,
    METHODS,
    MODULES,
    OF_PARTS,
    OPERATORS,
    PYTHONS,
    RESHAPING,
    is_torchs_own,
)
from moe_autograd.autograd.reading.readings import PLAIN, FunctionReading, around_of, takes_no_functions

AROUND = "<around>"  # stands for `self` in a function that has none
LISTS = frozenset([nn.ModuleList, nn.Sequential])  # whose parts may be looped over

# What needs no look at what it names.
_HARMLESS = frozenset(
    [
        *("BINARY_OP", "BINARY_SLICE", "BINARY_SUBSCR", "BUILD_CONST_KEY_MAP", "BUILD_LIST", "BUILD_MAP"),
        *("BUILD_SLICE", "BUILD_STRING", "BUILD_TUPLE", "CALL", "CALL_FUNCTION_EX", "COMPARE_OP"),
        *("CONTAINS_OP", "CONVERT_VALUE", "COPY", "COPY_FREE_VARS", "END_FOR", "FORMAT_SIMPLE"),
        *("FORMAT_VALUE", "FORMAT_WITH_SPEC", "FORWARD", "IS_OP", "KW_NAMES", "LIST_APPEND", "LIST_EXTEND"),
        *("LIST_TO_TUPLE", "LOAD_ASSERTION_ERROR", "LOAD_CONST", "LOAD_SMALL_INT", "NOP", "NOT_TAKEN"),
        *("POP_ITER", "POP_TOP", "PUSH_NULL", "RAISE_VARARGS", "RESUME", "RETURN_CONST", "RETURN_VALUE"),
        *("SWAP", "TO_BOOL", "UNARY_INVERT", "UNARY_NEGATIVE", "UNARY_NOT", "UNPACK_SEQUENCE"),
    ]
)
# What takes from below, leaves more than one on the stack, or goes elsewhere.
_LEAVES_ORDER = ("COPY", "FORWARD", "FOR_ITER", "JUMP_BACKWARD", "SWAP", "UNPACK_SEQUENCE")
_WRAPPERS = (enumerate, range, zip)  # as long as nobody has put something else under these names
_MAPS = ("BUILD_CONST_KEY_MAP", "BUILD_MAP")
_OF_TENSORS = METHODS - OF_PARTS
_TAKES_ANY = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS


def read_function(function: types.FunctionType, *, is_method: bool) -> FunctionReading | None:
    """Return what a method names, or a function; `None` if it may do more than arithmetic."""
    code = function.__code__
    if code.co_argcount < is_method or not _is_plain(function) or not takes_no_functions(function):
        return None
    return _Reader(function, code.co_varnames[0] if is_method else None, [*steps_of(code)]).reading()


def read_callee(function: types.FunctionType) -> FunctionReading | None:
    """Return what a function names that a map is to call (rule 5); `None` if it may do more than arithmetic."""
    if not _is_plain(function):
        return None
    around = around_of(function)
    steps = [*with_attributes(steps_of(function.__code__), around, AROUND)]
    return _Reader(function, AROUND, steps, around).reading()


def _is_plain(function: types.FunctionType) -> bool:
    code = function.__code__
    if code.co_flags & _TAKES_ANY or type(function.__globals__) is not dict:
        return False
    return not any(map(_may_change, code.co_consts))


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
    """Reads one method, or a function.

    Args:
        function: is read.
        this: the name of `self`; `None`: there is none.
        steps: what the function does.
        around: what it takes from around itself, by rule 5.
    """

    def __init__(
        self,
        function: types.FunctionType,
        this: str | None,
        steps: Sequence[Step],
        around: frozenset[str] | None = None,
    ) -> None:
        self._function, self._this, self._steps = function, this, steps
        is_method = this is not None and around is None
        code = weakref.ref(function.__code__)
        self._reading = FunctionReading(code=code, is_method=is_method, around=around)  # filled step by step
        # places of attributes of `self` and of modules, and of what begins loops
        self._understood = set[int]()
        self._loops = [loop for loop in loops_of(self._steps, self._this) if self._is_understood(loop)]
        self._parts = {variable for loop in self._loops for variable in loop.parts}

    def reading(self) -> FunctionReading | None:
        """Return what it names, or `None` if there is something else in it."""
        if any(loop.next.value > later.next.offset for loop, later in itertools.pairwise(self._loops)):
            return None  # one within another
        if not all(self._is_arithmetic(place, step) for place, step in enumerate(self._steps)):
            return None
        names = {step.name for step in self._steps}
        if "CALL_FUNCTION_EX" in names and not names.isdisjoint(_MAPS):
            return None  # it may be given arguments by any name
        reading = self._reading
        named = [name for _, name in reading.of_others]
        named += [getattr(value, "__name__", "") for value in reading.of_globals.values()]
        reading.reshapes = not RESHAPING.isdisjoint(named)
        for function in reading.functions.values():
            reading.add(function)
        return reading

    def _is_arithmetic(self, place: int, step: Step) -> bool:
        if place in self._understood:
            return True
        match step.name:
            case "LOAD":
                return self._is_used_as_what_it_is(place, step.value)
            case "STORE":
                return bool(step.value != self._this)
            case "LOAD_GLOBAL" if step.value == "super":
                return self._calls_base(place)
            case "LOAD_GLOBAL":
                return self._names_function(place)
            case "ATTRIBUTE" | "METHOD":
                return step.value in METHODS and self._is_torchs_own(step.value)
            case "JUMP_BACKWARD":
                return any(step.value == loop.next.offset for loop in self._loops)
            case "CALL_FUNCTION_EX" if step.value:  # with arguments by name
                return False
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
        name, num_arguments = step.value, self._num_arguments(place)
        if step.name == "METHOD" or (self._reading.around is not None and num_arguments < math.inf):
            self._reading.called.setdefault(name, []).append(num_arguments)
        elif self._is_measured(place):
            self._reading.listed.add(name)
            return True
        elif self._takes_one_of(place):
            self._reading.listed.add(name)
            if self._steps[place + 1].value in [loop.counter for loop in self._loops]:
                return True  # in each round another
        elif self._is_of_a_part(place + 1):
            self._reading.of_parts.add((name, self._steps[place + 1].value))
        elif self._is_asked(place + 1):
            self._reading.asked.add((name, self._steps[place + 1].value))
        else:
            self._reading.taken.add(name)
        if any(loop.next.offset < step.offset < loop.next.value for loop in self._loops):
            self._reading.repeated.add(name)
        return True

    def _calls_base(self, place: int) -> bool:
        """Note which method of a base is called by `super()`."""
        of_self = [("LOAD_DEREF", "__class__"), ("LOAD", self._this)]  # which Python 3.11 leaves out
        before = [("CALL", (0, 0))] if self._steps[place + 1].name == "CALL" else of_self
        *given, method = self._steps[place + 1 : place + 2 + len(before)]
        if [(step.name, step.value) for step in given] != before or method.name not in ("METHOD", "OF_BASES"):
            return False
        if any(step.is_target for step in (*given, method)) or not self._is_from_python("super", (super,)):
            return False
        last = place + 1 + len(before)
        self._understood.update(range(place, last + 1))
        num_arguments = self._num_arguments(last)
        self._reading.of_bases.setdefault(method.value, []).append(num_arguments)
        return self._reading.is_method and num_arguments < math.inf

    def _is_asked(self, place: int) -> bool:
        """Whether a method that tensors do not have is called there, of what a function takes from around itself."""
        step = self._steps[place]
        if self._reading.around is None or step.name != "METHOD" or step.value in _OF_TENSORS:
            return False
        return self._num_arguments(place) < math.inf and self._attribute_at(place) is not None

    def _is_of_a_part(self, place: int) -> bool:
        """Whether an attribute is looked up there that tensors do not have."""
        step = self._steps[place]
        is_of_it = step.name == "ATTRIBUTE" and step.value not in _OF_TENSORS
        return is_of_it and self._attribute_at(place) is not None

    def _is_measured(self, place: int) -> bool:
        """Whether `len` is called of the attribute that is looked up there."""
        if place < 2:
            return False
        function, this, _, call = self._steps[place - 2 : place + 2]
        if (function.name, function.value) != ("LOAD_GLOBAL", "len") or this.is_target or call.is_target:
            return False
        return call.name == "CALL" and call.value == (1, 1) and self._have_lists("__len__")

    def _takes_one_of(self, place: int) -> bool:
        """Whether of the parts in the list that is looked up there one is taken by its number, and called."""
        taken = self._steps[place + 1 : place + 3]
        if not is_index(taken[-1]) or any(step.is_target for step in taken):
            return False
        number = taken[0]
        if number.name == "LOAD":
            is_number = number.value != self._this and number.value not in self._parts
        else:
            is_number = type(number.value) is int
        if not is_number or self._num_arguments(place + 2) == math.inf or not self._have_lists("__getitem__"):
            return False
        self._understood.update([place + 1, place + 2])
        return True

    def _have_lists(self, name: str) -> bool:
        """Note what lists of parts have under that name, and see that nobody has put it there."""
        return all(is_torchs_own(self._what_is(kind, name)) for kind in LISTS)

    def _names_function(self, place: int) -> bool:
        """Note the global that is named here, and see that it is, or leads to, a function or a number."""
        name = self._steps[place].value
        value = self._function.__globals__.get(name)
        if isinstance(value, types.FunctionType) and not is_torchs_own(value):
            return self._calls_function(place, value)
        self._reading.of_globals[name] = value
        if value is None and hasattr(builtins, name):
            return self._is_pythons_own(name)
        while any(value is module for module in MODULES):
            place += 1
            if (step := self._attribute_at(place)) is None:
                return False
            value = self._what_is(value, step.value)
        if value is Tensor or (value is not None and type(value) in PLAIN):
            return True
        num_arguments = self._num_arguments(place)
        if is_function(value, num_arguments, DRAWING):
            self._reading.draws = True
            return True
        return is_function(value, num_arguments)

    def _calls_function(self, place: int, function: types.FunctionType) -> bool:
        """Note that a function of somebody's is called here, and see that it only computes."""
        if self._this is None or self._num_arguments(place) == math.inf:
            return False
        name = self._steps[place].value
        reading = self._reading.functions.get(name) or read_function(function, is_method=False)
        if reading is None or reading.has_loops:
            return False
        self._reading.functions[name] = reading
        return True

    def _is_torchs_own(self, method: str) -> bool:
        """Note what a tensor has under that name, and see that nobody has put it there."""
        return is_torchs_own(self._what_is(Tensor, method))

    def _what_is(self, owner: object, name: str) -> object:
        """Return an attribute, of which note is taken."""
        value = self._reading.of_others[owner, name] = getattr(owner, name, None)
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

    def _is_understood(self, loop: Loop) -> bool:
        """Whether what is named in the beginning of a loop is Python's and torch's own; then take note of it."""
        wrapper = loop.wrapper
        if wrapper is not None and not self._is_from_python(wrapper, _WRAPPERS):
            return False
        if loop.lengths and not (self._is_pythons_own("len") and self._have_lists("__len__")):
            return False
        if loop.lists and not (self._have_lists("__iter__") and self._have_lists("__getitem__")):
            return False
        self._understood.update(range(loop.begin, loop.end))
        self._reading.looped.update(loop.lists, loop.lengths)
        self._reading.numbers.update(loop.numbers)
        self._reading.num_rounds += loop.num_rounds
        return True

    def _is_pythons_own(self, name: str) -> bool:
        """Whether a global is one of Python's for numbers, and does to tensors what torch has for it."""
        value = getattr(builtins, name)
        return self._is_from_python(name, PYTHONS) and all(map(self._is_torchs_own, PYTHONS[value]))

    def _is_from_python(self, name: str, known: Iterable[object]) -> bool:
        """Note what Python has under that name, and see that nobody has put something else in its place."""
        in_file = self._reading.of_globals[name] = self._function.__globals__.get(name)
        value = self._what_is(builtins, name)
        return in_file is None and any(value is one for one in known)
