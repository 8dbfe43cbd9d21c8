"""What functions lead to, by their closures and the globals that they name, and what containers hold.

The words of `closures`, which looks into callables with this.
"""

from __future__ import annotations

import contextvars
import itertools
import types
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from moe_autograd.autograd.named import CHANGING, SETTING, functions_in, is_torchs, names_of, telling_names

MOST_LOOKED_AT = 256  # objects that one callable holds
CONTAINERS = frozenset([list, tuple, dict])
_FOLLOWED_BY_NAME = (Tensor, torch.nn.Module, contextvars.ContextVar, list, tuple, dict)

Cut = tuple[GradientEdge, Tensor]  # where an inner graph ends, and the outer tensor that stands there


class Held(NamedTuple):
    """What a callable holds.

    Args:
        cuts: the tensors with history (Rule 3 of `module_calls`).
        talkers: the modules that run collectives, by themselves or for their weights, and such tensors (`ranks`).
        compiled: the modules and functions that `torch.compile` has made (`compiled`).
        changing: what changes a module for as long as it runs (`named`, rule 1).
        setting: what sets something for the whole process (`named`, rule 2).
        parts: all modules.
    """

    cuts: list[Cut]
    talkers: list[object]
    compiled: list[object]
    changing: list[object]
    setting: list[object]
    parts: list[torch.nn.Module]


def holds_nothing() -> Held:
    """Return lists to be filled."""
    return Held([], [], [], [], [], [])


def has_history(tensor: Tensor) -> bool:
    """Whether a held tensor was computed.

    One that shows memory which was changed under it, as `FullyShardedDataParallel` does with its flat parameter, has a
    history that PyTorch refuses to tell: nothing can be computed from it either.
    """
    try:
        return tensor.grad_fn is not None
    except RuntimeError:
        return False


def within(container: Any) -> list[Tensor]:
    """Return the tensors with history in nested lists, tuples and dictionaries."""
    found = []
    containers = [container]
    for held in containers:  # grows
        for value in first(held.values() if type(held) is dict else held):
            kind = type(value)
            if kind is Tensor:
                if has_history(value):
                    found.append(value)
            elif kind in CONTAINERS and len(containers) < MOST_LOOKED_AT:
                containers.append(value)
    return found


def first(values: Iterable[Any]) -> tuple[Any, ...]:
    """Return the first of them, at once: other threads may change the container meanwhile."""
    return tuple(itertools.islice(values, MOST_LOOKED_AT))


def around_all(function: Any, of_all: Held) -> list[Any]:
    """Return what a function leads to, also by way of other functions there: it may be decorated."""
    functions, values = [function], list[Any]()
    for each in functions:  # grows
        for value in around_function(each):
            if not isinstance(value, types.FunctionType):
                values.append(value)
            elif value not in functions and len(functions) < MOST_LOOKED_AT:
                functions.append(value)
    for one in functions:
        note(one, telling_names(one), of_all)
    return values


def around_function(function: types.FunctionType) -> list[Any]:
    """Return what is in a function's closure, and of the globals that it names those that are worth following."""
    namespace, values = function.__globals__, _in_closure(function)
    for name in () if is_torchs(namespace) else names_of(function.__code__).of_globals:
        value = namespace.get(name)
        # Functions and objects of other files would lead through whole libraries.
        if isinstance(value, _FOLLOWED_BY_NAME):
            values.append(value)
        else:
            values += functions_in(namespace, value)
    return values


def _in_closure(function: Any) -> list[Any]:
    return [cell.cell_contents for cell in function.__closure__ or () if not _is_empty(cell)]


def _is_empty(cell: types.CellType) -> bool:
    try:
        _ = cell.cell_contents  # a cell tells only this way
    except ValueError:
        return True
    return False


def note(held: object, telling: frozenset[str], of_all: Held) -> None:
    """Add `held` to the lists of `of_all` that it belongs into, by what it names (`telling`)."""
    if telling:
        of_all.changing.extend([held] if telling & CHANGING else ())
        of_all.setting.extend([held] if telling & SETTING else ())
