"""Modules that calls of a map share are left as they are, or the map raises.

What a callable names tells mostly which calls change a module for as long as they run (`named`): those take turns.
Where nothing tells, as with `setattr`, or where it is hidden deeper than the look goes, calls would compute with each
other's changes. So each call that shares a module looks at it when it begins and when it ends: is it as the map found
it? A change that lies within another call as a whole, and is undone there, is not seen; but calls of a map are mostly
alike, and one of many begins or ends within another.

Calls that take turns with each other, or are made one after the other, change what they share as in a loop: they do
not look.

Threads: any; what is looked at are single dictionaries, each in one operation that the interpreter makes atomic.
"""

from __future__ import annotations

import itertools
import operator
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from moe_autograd.autograd.notes import add_note

# A call that begins so soon after the last look, mostly that at the end of the call before it, does not look again.
AT_ONCE_S = 1e-4

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_CONTENTS = operator.itemgetter("_modules", "_parameters", *_HOOKS)
_MODE, _PARAMETERS = operator.itemgetter("training"), operator.itemgetter("_parameters")
_VALUES = operator.methodcaller("values")
_FACTS = operator.attrgetter("requires_grad", "_version")


class State:
    """What some modules consist of, as it is now. Every call compares all of it, so there are no loops in Python.

    The memory of parameters is not looked at: to cast a bias once, or to flatten a GRU, harms nobody.

    Args:
        modules: whose.
    """

    def __init__(self, modules: Sequence[nn.Module]) -> None:
        self._owns = [module.__dict__ for module in modules]
        self._parts = self._parts_now()
        parameters = [one for one in [*_all_in(map(_PARAMETERS, self._owns))] if one is not None]
        with torch._C.DisableTorchFunction():  # neither modes nor classes of parameters see it
            self._counting = [one for one in parameters if not one.is_inference()]
        self._facts = self._facts_now()
        self.looked_s = time.perf_counter()

    def is_as_before(self) -> bool:
        """Whether all of it is still so."""
        parts = self._parts_now()
        is_same = len(parts) == len(self._parts) and all(map(operator.is_, parts, self._parts))
        is_same = is_same and self._facts_now() == self._facts
        if is_same:
            self.looked_s = time.perf_counter()
        return is_same

    def _parts_now(self) -> list[object]:
        forwards = [own.get("forward") for own in self._owns]
        contents = itertools.chain.from_iterable(map(_CONTENTS, self._owns))
        return [*map(_MODE, self._owns), *forwards, *_all_in(contents)]

    def _facts_now(self) -> list[object]:
        with torch._C.DisableTorchFunction():
            return [*map(_FACTS, self._counting)]


def _all_in(contents: Iterable[Any]) -> Iterable[Any]:
    return itertools.chain.from_iterable(map(_VALUES, filter(None, contents)))


class Watched:
    """The shared modules of one call that do not take turns, as the map has found them.

    Args:
        name: of the call.
        modules: the shared ones.
        states: what other calls of the map share, by the `id`s of the modules; this call's is added if it is new.
    """

    def __init__(self, name: str, modules: Sequence[nn.Module], states: dict[tuple[int, ...], State]) -> None:
        self._name, self._modules = name, modules
        key = tuple(map(id, modules))
        self._state = states.get(key) or states.setdefault(key, State(modules))

    def run(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Make the call.

        Raises:
            RuntimeError: a module is not as it was, before the call or after it. An error of the call's own, which
                that may bring about, gets the text as a note.
        """
        state = self._state
        if time.perf_counter() - state.looked_s > AT_ONCE_S and not state.is_as_before():
            raise RuntimeError(self._complaint())
        try:
            returned = call(*args, **kwargs)
        except Exception as error:
            if not state.is_as_before():
                add_note(error, self._complaint())
            raise
        if not state.is_as_before():
            raise RuntimeError(self._complaint())
        return returned

    def _complaint(self) -> str:
        kinds = ", ".join(dict.fromkeys(type(module).__qualname__ for module in self._modules[:3]))
        return (
            f"parallel_apply: expected what {self._name} shares with others ({kinds}) to be as it was when the map "
            "began, got a mode, a `forward`, hooks, parts or parameters of a module changed meanwhile. What calls "
            "compute depends on who came first. Pass max_concurrency=1, or give each call a module of its own; where "
            "any state will do (a lock of yours guards the change, another thread trains the module), set "
            "keeps_statistics = False on each of its parts."
        )
