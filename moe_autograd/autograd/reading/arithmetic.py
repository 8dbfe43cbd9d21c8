"""Whether the `forward` of a user's class does nothing but arithmetic on its arguments.

Most experts are classes of a few lines, such as `self.w2(F.silu(self.w1(x)) * self.w3(x))`. One that can neither wait
nor be waited for may be called in turn (`in_turn`). So a class is read, once, and its forward only computes where

1. it takes arguments besides `self`, which are tensors, numbers and tuples of them, and its bytecode names nothing
   that does more (`function_reading`);
2. of `self` it calls only parts, functions that compute and methods that are read as it is, those of bases by `super()`
   too, with loops in one of all these at most, and none beside `super()`;
3. of `self` it takes only parameters, buffers and numbers, of an instance or its parts: what a class defines under such
   a name may be a property, unless it is a number.
"""

from __future__ import annotations

import dataclasses
import functools
import types
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from moe_autograd.autograd.reading.function_reading import LISTS, is_function, read_function
from moe_autograd.autograd.reading.known_arithmetic import IN_PLACE, RESHAPING, is_torchs_own
from moe_autograd.autograd.reading.readings import PLAIN, FunctionReading, Named

Place = tuple[int, str]  # of a method: where in the order of the bases the search begins, and the name

# Of parts and methods. Ten methods of which each calls the next one twice are a thousand calls.
MOST_CALLS = 1 << 6


@dataclasses.dataclass(slots=True, kw_only=True)
class Reading(Named):
    """What a class's forward names, where it only computes, and the methods that it calls.

    Args:
        methods: what `forward` names, and what the methods do that it calls.
        names: of those that an instance must have nothing else under.
        called: attributes of an instance that these call, with how many arguments at most.
        of_class: those whose value they take, and which the class has.
        again: what these call at more than one place.
    """

    methods: Mapping[Place, FunctionReading]
    names: frozenset[str]
    called: Mapping[str, float]
    of_class: frozenset[str] = frozenset()
    again: frozenset[str]

    def is_true_of(self, kind: Any) -> bool:
        """Whether the class still has these methods, and nothing of its own under the other names."""
        if not is_called_as_usual(kind):
            return False
        for place, reading in self.methods.items():
            method, is_method = _method_of(kind, place)
            if method is None or is_method is not reading.is_method or not reading.is_true_of(method):
                return False
            if not self.methods.keys() >= {*_of_bases(kind, method, reading)}:
                return False
        if self.of_class != _plain_of(kind, self.taken):
            return False
        names = {*self.called, *self.looped, *self.listed, *self.numbers, *(self.taken - self.of_class)}
        names.update(part for part, _ in self.of_parts)
        return not any(is_of_class(kind, name) for name in names)

    def fits(self, module: Any) -> bool:
        """Whether an instance has what the forward takes of it. Written out: it is asked before each call."""
        own = module.__dict__
        if "_modules" not in own:  # its `__init__` was not called
            return False
        parts, parameters, buffers = own["_modules"], own["_parameters"], own["_buffers"]
        for name, num_arguments in self.called.items():
            if not (_computes(own[name], num_arguments) if name in own else name in parts):
                return False
        for name in self.taken:
            if name in own:
                if type(own[name]) not in PLAIN:
                    return False
            elif name in parameters or name in self.of_class:
                continue  # `in_turn` sees to parameters
            elif type(buffers.get(name)) is not Tensor:
                return False
        for name in self.looped | self.listed if self.listed else self.looped:
            if name in own or type(parts.get(name)) not in LISTS:
                return False
        for name in self.numbers:
            if type(own.get(name)) is not int:
                return False
        for name, attribute in self.of_parts:
            if name in own or not _has_plain(parts.get(name), attribute):
                return False
        return self.names.isdisjoint(own)

    def rounds(self, module: Any) -> tuple[int, int]:
        """Return how often the loops of an instance that fits go round, and how often they use the same part again."""
        lists = [module._modules[name] for name in self.looped]
        num_rounds = sum([len(one._modules) for one in lists if one is not None]) + self.num_rounds
        for name in self.numbers:
            num_rounds += abs(module.__dict__[name])
        return num_rounds, 1 if self.repeated <= module.__dict__.keys() else num_rounds


_readings: WeakKeyDictionary[type, dict[str, Reading | None]] = WeakKeyDictionary()


def reading_of(kind: type, method: str = "forward") -> Reading | None:
    """Return what a method of a class names if it does nothing but arithmetic, as long as its parts do not either.

    Threads: any.
    """
    if not issubclass(kind, nn.Module):
        return None
    known = _readings.setdefault(kind, {})
    if method not in known or ((reading := known[method]) is not None and not reading.is_true_of(kind)):
        known[method] = _read(kind, method)
    return known[method]


def _read(kind: type[nn.Module], method: str) -> Reading | None:
    """Read a method of a class, and those that it calls; return `None` if it may do more than arithmetic."""
    methods = dict[Place, FunctionReading]()
    if not _num_calls(kind, (0, method), methods, {}):
        return None
    read = methods.values()
    num_with_loops = sum(one.has_loops for one in read)
    if num_with_loops > 1 or (num_with_loops and any(one.of_bases for one in read)):
        return None  # one of them may be called in the other's loop
    reading = summed(methods, kind)
    return reading if reading.is_true_of(kind) else None


def summed(methods: Mapping[Place, FunctionReading], kind: type) -> Reading:
    """Return what methods of a class name together."""
    read = methods.values()
    by_name = {name: one for (begin, name), one in methods.items() if begin == 0}
    called = dict[str, float]()
    for one in read:
        for name in one.called.keys() - by_name.keys():
            called[name] = max(called.get(name, 0), *one.called[name])
    reading = Reading(methods=methods, names=frozenset(by_name), called=called, again=_again(read))
    for one in read:
        reading.add(one)
    reading.of_class = _plain_of(kind, reading.taken)
    reading.repeated = _used(by_name, reading.repeated)
    return reading


def _again(read: Collection[FunctionReading]) -> frozenset[str]:
    """Return the names of what is called at more than one place."""
    num_places = Counter[str]()
    for one in read:
        for called in (one.called, one.of_bases):
            num_places.update({name: len(places) for name, places in called.items()})
    return frozenset(name for name, number in num_places.items() if number > 1)


def _num_calls(
    kind: type[nn.Module], place: Place, methods: dict[Place, FunctionReading], known: dict[Place, int]
) -> int:
    """Add a method and those that it calls, unless they are read already.

    Return how many calls it makes, itself and by methods; 0 if one may do more than compute, or if there are too many.
    """
    if place in known:
        return known[place]
    known[place] = 0  # a method that calls itself finds this
    method, is_method = _method_of(kind, place)
    reading = None if method is None else read_function(method, is_method=is_method)
    if method is None or reading is None:
        return 0
    methods[place] = reading
    num_calls = 1
    others = [((0, name), len(times)) for name, times in reading.called.items()]
    others += [(other, len(reading.of_bases[other[1]])) for other in _of_bases(kind, method, reading)]
    for other, num_times in others:
        each = _num_calls(kind, other, methods, known) if other[0] or is_of_class(kind, other[1]) else 1
        num_calls += each * num_times
        if not each or num_calls > MOST_CALLS:
            return 0
    known[place] = num_calls
    return num_calls


def _of_bases(kind: type, method: types.FunctionType, reading: FunctionReading) -> list[Place]:
    """Return the methods that a method calls by `super()`: of bases behind the class that it is defined in."""
    if not reading.of_bases:
        return []
    cells = dict(zip(method.__code__.co_freevars, method.__closure__ or (), strict=True))
    order = kind.__mro__
    defined_in = cells["__class__"].cell_contents
    begin = order.index(defined_in) + 1 if defined_in in order else len(order)
    return [(begin, name) for name in reading.of_bases]


def _used(methods: Mapping[str, FunctionReading], names: Collection[str]) -> set[str]:
    """Return the names that are no methods, and those that methods among them use."""
    used = [
        _used(methods, {*methods[name].called, *methods[name].taken}) if name in methods else {name}
        for name in names
    ]
    return set[str]().union(*used)


def _method_of(kind: type[nn.Module], place: Place) -> tuple[types.FunctionType | None, bool]:
    """Return a method, and whether it takes `self`; `None` if it is something else, or torch's own."""
    base, method = in_class(kind, place)
    is_method = type(method) is not staticmethod
    if not is_method:
        method = method.__func__
    if type(method) is not types.FunctionType or base is nn.Module:
        return None, is_method
    return method, is_method


def _plain_of(kind: type[nn.Module], names: Collection[str]) -> frozenset[str]:
    """Return the names under which the class has a number."""
    return frozenset([name for name in names if type(in_class(kind, (0, name))[1]) in PLAIN])


def in_class(kind: type, place: Place) -> tuple[type | None, Any]:
    """Return what a class has there, and which of its bases; `NotImplemented` if there is nothing."""
    begin, name = place
    for base in kind.__mro__[begin:]:
        if name in base.__dict__:
            return base, base.__dict__[name]
    return None, NotImplemented


def is_of_class(kind: type, name: str) -> bool:
    """Whether a class has something under that name. It is not asked for it: a descriptor may do anything then."""
    return in_class(kind, (0, name))[0] is not None


def _computes(function: Any, num_arguments: float) -> bool:
    """Whether what an instance has to call is known, numbers that it was given beforehand among its arguments."""
    if type(function) is functools.partial:
        names, given = function.keywords, (*function.args, *function.keywords.values())
        if not all(type(one) in PLAIN for one in given) or not all(type(name) is str for name in names):
            return False
        if not IN_PLACE.isdisjoint(names):
            return False
        function, num_arguments = function.func, num_arguments + len(given)
    return is_function(function, num_arguments) and function.__name__ not in RESHAPING


def _has_plain(part: nn.Module | None, name: str) -> bool:
    """Whether a part has a parameter or a number of its own under that name."""
    if part is None or is_of_class(type(part), name) or not is_called_as_usual(type(part)):
        return False
    own = part.__dict__
    return type(own[name]) in PLAIN if name in own else name in own.get("_parameters", ())


def is_called_as_usual(kind: type) -> bool:
    """Whether modules of a class are called, and asked for what they have, as torch has them."""
    called = ("__call__", "_call_impl", "_wrapped_call_impl", "_compiled_call_impl")
    names = (*called, "__getattr__", "__getattribute__")
    are_usual = all(getattr(kind, name) is getattr(nn.Module, name) for name in names)
    return is_torchs_own(nn.Module.__getattr__) and are_usual
