"""How the loops of a function begin that go over parts of `self`, or as often as a number says.

for layer in self.layers            for i, layer in enumerate(self.layers[:-1])
for _ in range(self.depth)          for i in range(len(self.layers) - 1)
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from moe_autograd.autograd.reading.bytecode import Step

_CONST = "(LOAD_CONST|LOAD_SMALL_INT) "
_LIST = f"LOAD ATTRIBUTE (({_CONST})+(BUILD_SLICE BINARY_SUBSCR|BINARY_SLICE|BINARY_OP) )?"
_NUMBER = f"({_CONST}|(LOAD_GLOBAL LOAD ATTRIBUTE CALL |LOAD ATTRIBUTE )({_CONST}BINARY_OP )?)"
_LOOP = re.compile(
    rf"\b(LOAD_GLOBAL ({_NUMBER})+CALL |LOAD_GLOBAL ({_LIST})+((LOAD_CONST|KW_NAMES) )*CALL |{_LIST})"
    r"GET_ITER FOR_ITER (UNPACK_SEQUENCE )?(STORE )+"
)


class Loop(NamedTuple):
    """How a loop begins.

    Args:
        begin: the place of the first step that belongs to it.
        end: that behind the last.
        wrapper: the function it calls for what it goes over: `enumerate`, `zip` or `range`; `None`: none.
        lists: attributes of `self` with the parts that it goes over.
        lengths: those of whose parts it only takes the number.
        numbers: those that say how often it goes round.
        num_rounds: constants that say so, added up.
        parts: variables for parts.
        counter: that for a number.
        next: the step that takes the next part or number.
    """

    begin: int
    end: int
    wrapper: str | None
    lists: Sequence[str]
    lengths: Sequence[str]
    numbers: Sequence[str]
    num_rounds: int
    parts: Sequence[str]
    counter: str | None
    next: Step


def loops_of(steps: Sequence[Step], this: str | None) -> Iterator[Loop]:
    """Return the loops that are understood; in them `this` is the name of `self`."""
    sentence = "".join([f"{step.name} " for step in steps])
    for found in _LOOP.finditer(sentence):
        begin, end = (sentence.count(" ", 0, at) for at in found.span())
        of_loop = steps[begin:end]
        if any(step.is_target for step in of_loop[1:] if step.name != "FOR_ITER"):
            continue
        if any(step.value != this for step in of_loop if step.name == "LOAD"):
            continue
        loop = _understood(begin, end, of_loop)
        if loop is not None and this not in (*loop.parts, loop.counter):
            yield loop


def is_index(step: Step) -> bool:
    """Whether it takes from what lies below on the stack the part with a number, or some parts."""
    return step.name == "BINARY_SUBSCR" or (step.name == "BINARY_OP" and step.value == "[]")


def _understood(begin: int, end: int, steps: Sequence[Step]) -> Loop | None:
    wrapper = steps[0].value if steps[0].name == "LOAD_GLOBAL" else None
    next_place = next(place for place, step in enumerate(steps) if step.name == "FOR_ITER")
    source, taken = steps[wrapper is not None : next_place - 1], steps[next_place + 1 :]
    variables = [step.value for step in taken if step.name == "STORE"]
    unpacked = [step.value for step in taken if step.name == "UNPACK_SEQUENCE"]
    if wrapper == "range":
        if len(variables) != 1 or unpacked:
            return None
        return _of_numbers(begin, end, source, variables[0], steps[next_place])
    lists = [step.value for step in source if step.name == "ATTRIBUTE"]
    num_variables = {None: 1, "enumerate": 2, "zip": len(lists)}.get(wrapper)
    if len(variables) != num_variables or unpacked != [num_variables] * (wrapper is not None):
        return None  # else a part is unpacked
    if not all(map(_is_of_a_slice, source, source[1:])) or any(step.name == "LOAD_GLOBAL" for step in source):
        return None
    is_counted = wrapper == "enumerate"
    counter, parts = variables[0] if is_counted else None, variables[is_counted:]
    return Loop(begin, end, wrapper, lists, [], [], 0, parts, counter, steps[next_place])


def _is_of_a_slice(before: Step, step: Step) -> bool:
    """Whether an operator takes some parts, and not one, by a constant before it."""
    return step.name != "BINARY_OP" or (step.value == "[]" and isinstance(before.value, slice))


def _of_numbers(begin: int, end: int, source: Sequence[Step], counter: str, taken: Step) -> Loop | None:
    """Return a loop over `range`: it goes round at most as often as all numbers together, without their signs, say."""
    lengths, numbers, num_rounds = list[str](), list[str](), 0
    for place, step in enumerate(source):
        match step.name:
            case "LOAD_GLOBAL" if step.value != "len":
                return None
            case "BINARY_OP" if step.value not in ("+", "-"):
                return None
            case "ATTRIBUTE":
                is_length = place > 1 and source[place - 2].name == "LOAD_GLOBAL"
                (lengths if is_length else numbers).append(step.value)
            case "LOAD_CONST" | "LOAD_SMALL_INT":
                if type(step.value) is not int:
                    return None
                num_rounds += abs(step.value)
    return Loop(begin, end, "range", [], lengths, numbers, num_rounds, [], counter, taken)
