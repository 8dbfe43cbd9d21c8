"""What functions lead to, by their closures and the globals that they name, and what containers hold.

The words of `closures`, which looks into callables with this.
"""

from __future__ import annotations

import contextvars
import dataclasses
import itertools
import types
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any, TypeAlias, TypeGuard

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from moe_autograd.autograd.contents.lookups import in_closure
from moe_autograd.autograd.contents.named import functions_in, is_torchs, telling_names
from moe_autograd.autograd.contents.ranks import has_other_ranks
from moe_autograd.autograd.contents.telling import CHANGING, SETTING, TALKING, names_of

MOST_LOOKED_AT = 256  # objects that one callable holds
CONTAINERS = frozenset([list, tuple, dict])
_FOLLOWED_BY_NAME = (Tensor, torch.nn.Module, torch.Generator, contextvars.ContextVar, list, tuple, dict)

Cut = tuple[GradientEdge, Tensor]  # where an inner graph ends, and the outer tensor that stands there
# what a module holds, and the tensors with history among it, by its `id` and whether its caller `changes` modules
Known: TypeAlias = "dict[tuple[int, bool], tuple[Held, list[Tensor]]]"


@dataclasses.dataclass(slots=True)
class Held:
    """What a callable holds, as far as it was found.

    Args:
        cuts: the tensors with history (Rule 3 of `module_calls`).
        parts: all modules.
        generators: of random numbers, which calls that share them draw from one after the other.
        compiled: the modules and functions that `torch.compile` has made (`compiled`).
        talks: whether something runs collectives, by itself or for its weights, or a tensor is for one call (`ranks`).
        changes: whether something changes a module for as long as it runs (`named`, rule 1).
        sets: whether something sets what is there once for the whole process (`named`, rule 2).
        known: what modules hold, for all calls of a map: several may reach a large one.
    """

    cuts: list[Cut] = dataclasses.field(default_factory=list)
    parts: list[torch.nn.Module] = dataclasses.field(default_factory=list)
    generators: list[torch.Generator] = dataclasses.field(default_factory=list)
    compiled: list[object] = dataclasses.field(default_factory=list)
    talks: bool = False
    changes: bool = False
    sets: bool = False
    known: Known = dataclasses.field(default_factory=dict)

    def add(self, module: Held) -> None:
        """Add what a module holds."""
        self.parts += module.parts
        self.generators += module.generators
        self.compiled += module.compiled
        self.talks, self.changes = self.talks or module.talks, self.changes or module.changes
        self.sets = self.sets or module.sets

    def note(self, telling: Collection[str]) -> None:
        """Take note of names, some of `CHANGING`, `SETTING` or `TALKING`."""
        if telling:
            self.changes = self.changes or not CHANGING.isdisjoint(telling)
            self.sets = self.sets or not SETTING.isdisjoint(telling)
            self.talks = self.talks or (not TALKING.isdisjoint(telling) and has_other_ranks())


def has_history(tensor: Tensor) -> bool:
    """Whether a held tensor was computed.

    One that shows memory which was changed under it, as `FullyShardedDataParallel` does with its flat parameter, has a
    history that PyTorch refuses to tell: nothing can be computed from it either.
    """
    try:
        return tensor.grad_fn is not None
    except RuntimeError:
        return False


def is_generator(value: object) -> TypeGuard[torch.Generator]:
    """Whether it is a generator of random numbers, and not the process's, of which calls draw their own."""
    return issubclass(type(value), torch.Generator) and value is not torch.default_generator


def within(container: Any) -> list[Tensor]:
    """Return the tensors with history in nested lists, tuples and dictionaries."""
    return [value for value in flattened(container) if type(value) is Tensor and has_history(value)]


def flattened(container: Any) -> Iterator[Any]:
    """Yield what is in nested lists, tuples and dictionaries, these included."""
    containers = [container]
    for held in containers:  # grows
        for value in first(dict.values if type(held) is dict else iter, held):
            if type(value) in CONTAINERS and len(containers) < MOST_LOOKED_AT:
                containers.append(value)
            yield value


def first(iterate: Callable[[Any], Iterable[Any]], container: Any) -> tuple[Any, ...]:
    """Return the first of what `iterate` finds in a container, as `at_once`."""
    return at_once(iterate, container, MOST_LOOKED_AT)


def at_once(
    iterate: Callable[[Any], Iterable[Any]], container: Any, most: int | None = None
) -> tuple[Any, ...]:
    """Return what `iterate`, one of Python's own, finds in a container, though other threads change that meanwhile.

    Its iterator raises where the container has changed since it was made. They may come between these two steps, which
    are seldom the same twice: so it is asked again.
    """
    while True:
        try:
            return tuple(itertools.islice(iterate(container), most))
        except RecursionError:
            raise
        except RuntimeError:
            continue


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
        of_all.note(telling_names(one))
    return values


def around_function(function: types.FunctionType) -> list[Any]:
    """Return what is in a function's closure, and of the globals that it names those that are worth following."""
    namespace, values = function.__globals__, in_closure(function)
    for name in () if is_torchs(namespace) else names_of(function.__code__).of_globals:
        value = namespace.get(name)
        # Functions and objects of other files would lead through whole libraries.
        if isinstance(value, _FOLLOWED_BY_NAME):
            values.append(value)
        else:
            values += functions_in(namespace, value)
    return values
