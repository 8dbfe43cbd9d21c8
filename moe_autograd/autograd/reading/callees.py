"""Whether a function, or a method of a module, that a map is to call does nothing but arithmetic on its arguments.

Where experts are slices of one weight, a call is mostly a function, and others are methods of modules, or either with
arguments given beforehand::

    def expert(x, up, down): return F.linear(F.silu(F.linear(x, up)), down)
    lambda x: expert(x) * scale              lambda x, expert=expert: expert(x)
    block.mlp                                functools.partial(expert, down=down)

What a function takes from around itself is looked at anew for each call, by rules 2 and 3 of `arithmetic`: it calls
only modules, functions that compute, and methods of modules that are read as these are; it takes only tensors and
numbers. A module's parts are looked at where it is called (`work`).
"""

from __future__ import annotations

import functools
import types
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, TypeGuard
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from moe_autograd.autograd.reading.arithmetic import (
    Reading,
    in_class,
    is_called_as_usual,
    is_of_class,
    reading_of,
    summed,
)
from moe_autograd.autograd.reading.function_reading import is_function, read_callee
from moe_autograd.autograd.reading.known_arithmetic import IN_PLACE, RESHAPING
from moe_autograd.autograd.reading.readings import defaults_around, defaults_of, globals_around


class Callee(NamedTuple):
    """What a callable does that only computes.

    Args:
        parts: modules that it calls, or goes through in a loop.
        taken: tensors and numbers that it takes from around itself, or is given beforehand.
        num_read: how many functions and methods were read, and how often they go round in loops.
        num_times: how often it calls a part at most.
        draws: whether it may draw random numbers.
        reshapes: whether it may put columns into the place of rows.
        defaults: arguments that must not be given, or all this would be of something else.
    """

    parts: list[nn.Module]
    taken: list[Any]
    num_read: int
    num_times: int
    draws: bool
    reshapes: bool
    defaults: frozenset[str] = frozenset()


_FUNCTION = 0, "()"  # the place of one that is no method, under a name that nothing it names has

_readings: WeakKeyDictionary[types.CodeType, dict[frozenset[str], Reading | None]] = WeakKeyDictionary()


class Callees:
    """What the callables of one map do that are no modules. Many are the same function, or made of the same code."""

    def __init__(self) -> None:
        self._known: dict[types.FunctionType, Callee | None] = {}
        self._globals: dict[tuple[types.CodeType, int], frozenset[str]] = {}
        self._readings: dict[tuple[types.CodeType, int, frozenset[str]], Reading | None] = {}

    def callee(self, call: Any, args: Sequence[object], kwargs: Mapping[str, object]) -> Callee | None:
        """Return what a callable does; `None` if it may do more than arithmetic."""
        given: list[object] = []
        while type(call) is functools.partial:
            args, kwargs = (*call.args, *args), {**call.keywords, **kwargs}
            given += (*call.args, *call.keywords.values())
            call = call.func
        callee = None
        if issubclass(type(call), nn.Module):
            callee = _called(call)
        elif type(call) is types.MethodType:
            callee = _of_method(call.__self__, call.__name__, call.__func__)
        elif type(call) is types.FunctionType:
            callee = self._of_function(call, args, kwargs)
        if callee is None and is_function(call, len(args) + len(kwargs)) and IN_PLACE.isdisjoint(kwargs):
            callee = _COMPUTES._replace(reshapes=call.__name__ in RESHAPING)
        return callee._replace(taken=[*callee.taken, *given]) if callee is not None and given else callee

    def _of_function(
        self, function: types.FunctionType, args: Sequence[object], kwargs: Mapping[str, object]
    ) -> Callee | None:
        if function not in self._known:
            self._known[function] = self._look_at(function)
        callee = self._known[function]
        if callee is None or not callee.defaults:
            return callee
        given = function.__code__.co_varnames[: len(args)]  # these would be taken instead
        return callee if callee.defaults.isdisjoint(given) and callee.defaults.isdisjoint(kwargs) else None

    def _look_at(self, function: types.FunctionType) -> Callee | None:
        file = function.__code__, id(function.__globals__)
        if file not in self._globals:
            self._globals[file] = globals_around(function)
        names = self._globals[file] | defaults_around(function)
        key = *file, names
        if key not in self._readings:
            self._readings[key] = _reading_of(function, names)
        reading = self._readings[key]
        around = None if reading is None else _what_is_around(function, names)
        if reading is None or around is None or not reading.fits(around):
            return None
        callee = _callee(reading, around, _used_of(reading, names) if names else names)
        for name, method in reading.asked:
            asked = _of_part_or_method(around._modules.get(name), method)
            if asked is None:
                return None
            callee = Callee(
                [*callee.parts, *asked.parts],
                [*callee.taken, *asked.taken],
                callee.num_read + asked.num_read,
                callee.num_times * asked.num_times,
                callee.draws or asked.draws,
                callee.reshapes or asked.reshapes,
                callee.defaults,
            )
        return callee


_COMPUTES = Callee([], [], 1, 1, draws=False, reshapes=False)


def _called(module: nn.Module) -> Callee:
    return _COMPUTES._replace(parts=[module], num_read=0)


def _of_part_or_method(module: object, name: str) -> Callee | None:
    """Return what is done by what a module has under a name."""
    if not _is_usual(module) or name in module.__dict__:
        return None
    if not is_of_class(type(module), name):
        part = module._modules.get(name)
        return None if part is None else _called(part)
    return _of_method(module, name, in_class(type(module), (0, name))[1])


def _of_method(module: object, name: str, function: object) -> Callee | None:
    """Return what a method does; `None` too where it is not what the module's class has under that name."""
    if not _is_usual(module) or type(function) is not types.FunctionType:
        return None
    if in_class(type(module), (0, name))[1] is not function:
        return None
    if name == "forward":
        return _called(module)
    reading = reading_of(type(module), name)
    return _callee(reading, module) if reading is not None and reading.fits(module) else None


def _is_usual(module: object) -> TypeGuard[nn.Module]:
    return issubclass(type(module), nn.Module) and is_called_as_usual(type(module))


def _reading_of(function: types.FunctionType, names: frozenset[str]) -> Reading | None:
    """Return what was read of a function's code, as long as all that it names is still so."""
    known = _readings.setdefault(function.__code__, {})
    if names not in known or (
        (own := known[names]) is not None and not own.methods[_FUNCTION].is_true_of(function)
    ):
        read = read_callee(function)
        is_whole = read is not None and read.is_true_of(function)
        known[names] = summed({_FUNCTION: read}, object) if read is not None and is_whole else None
    return known[names]


def _what_is_around(function: types.FunctionType, names: frozenset[str]) -> Any:
    """Return an object that has what a function takes from around itself as a module has its parts.

    `None` if some of it is not there yet.
    """
    values: dict[str, Any] = {}
    if names:
        values = {name: function.__globals__.get(name) for name in names}
        values |= {name: value for name, value in defaults_of(function) if name in names}
    if function.__closure__:
        for name, cell in zip(function.__code__.co_freevars, function.__closure__, strict=True):
            try:
                values[name] = cell.cell_contents
            except ValueError:
                return None
    parts, tensors, others = dict[str, Any](), dict[str, Any](), dict[str, Any]()
    for name, value in values.items():
        kind = type(value)
        alike = parts if issubclass(kind, nn.Module) else tensors if issubclass(kind, Tensor) else others
        alike[name] = value
    around = types.SimpleNamespace(**others)
    around._modules, around._parameters, around._buffers = parts, tensors, {}
    return around


def _used_of(reading: Reading, names: frozenset[str]) -> frozenset[str]:
    """Return those of the names that stand for what is called or asked."""
    used = {*reading.called, *reading.looped, *reading.listed, *reading.numbers}
    used.update(name for name, _ in (*reading.asked, *reading.of_parts))
    return names & used


def _callee(reading: Reading, holder: Any, defaults: frozenset[str] = frozenset()) -> Callee:
    """Return what is done by a method of `holder`, or by a function that takes it from around itself."""
    own, parts = holder.__dict__, holder._modules
    num_rounds, num_times = reading.rounds(holder) if reading.has_loops else (0, 1)
    names = (*reading.called, *reading.looped, *reading.listed)
    taken = [_found(own, name) for name in reading.taken - reading.of_class]
    taken += [_found(parts[part].__dict__, name) for part, name in reading.of_parts]
    return Callee(
        [part for name in names if (part := parts.get(name)) is not None],
        taken,
        1 + num_rounds,
        max(1, num_times),
        reading.draws,
        reading.reshapes,
        defaults,
    )


def _found(own: Mapping[str, Any], name: str) -> Any:
    """Return what a module has under a name, or its parameter or buffer."""
    if name in own:
        return own[name]
    parameters: Mapping[str, Any] = own["_parameters"]
    return parameters[name] if name in parameters else own["_buffers"].get(name)
