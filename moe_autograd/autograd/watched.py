"""Modules that calls of a map share are left as they are, or the map raises.

What a callable names tells mostly which calls change a module for as long as they run (`named`): those take turns.
Where nothing tells, as with `setattr`, or where it is hidden deeper than the look goes, calls would compute with each
other's changes. So each call that shares a module looks at it when it begins and when it ends: is it as the map found
it? A change that lies within another call as a whole, and is undone there, is not seen; but calls of a map are mostly
alike, and one of many begins or ends within another.

Threads: any; what is looked at are single dictionaries, each in one operation that the interpreter makes atomic.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import nn

State = tuple[list[object], list[object]]  # what modules consist of, and facts about their parameters


class Watched:
    """The shared modules of one call that do not take turns, as the map has found them.

    Args:
        name: of the call.
        modules: those.
        states: of the modules of other calls, by their `id`s; those that are new are added.
    """

    def __init__(self, name: str, modules: Sequence[nn.Module], states: dict[tuple[int, ...], State]) -> None:
        self._name, self._modules = name, modules
        key = tuple(map(id, modules))
        self._state = states.get(key) or states.setdefault(key, _state_of(modules))

    def run(self, call: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Make the call.

        Raises:
            RuntimeError: a module is not as it was, before the call or after it. An error of the call's own, which
                that may bring about, gets the text as a note.
        """
        if not self._is_as_before():
            raise RuntimeError(self._complaint())
        try:
            returned = call(*args, **kwargs)
        except Exception as error:
            if not self._is_as_before():
                error.add_note(self._complaint())
            raise
        if not self._is_as_before():
            raise RuntimeError(self._complaint())
        return returned

    def _is_as_before(self) -> bool:
        parts, facts = _state_of(self._modules)
        before, facts_before = self._state
        return len(parts) == len(before) and all(map(operator.is_, parts, before)) and facts == facts_before

    def _complaint(self) -> str:
        kinds = ", ".join(dict.fromkeys(type(module).__qualname__ for module in self._modules[:3]))
        return (
            f"parallel_apply: expected what {self._name} shares with others ({kinds}) to be as it was when the map "
            "began, got a mode, a `forward`, hooks, parts or parameters of a module changed meanwhile. What calls "
            "compute depends on who came first. Pass max_concurrency=1, or give each call a module of its own; where a "
            "lock of yours guards the change, set keeps_statistics = False on the module."
        )


def _state_of(modules: Iterable[nn.Module]) -> State:
    parts, facts = list[object](), list[object]()
    for module in modules:
        own = module.__dict__
        parameters = [*own["_parameters"].values()]
        parts += (own["training"], own.get("forward"), *own["_modules"].values(), *parameters)
        before, after = own["_forward_pre_hooks"], own["_forward_hooks"]
        backward_before, backward = own["_backward_pre_hooks"], own["_backward_hooks"]
        if before or after or backward_before or backward:
            for hooks in (before, after, backward_before, backward):
                parts += (len(hooks), *hooks.values())
        for one in parameters:
            if (
                one is not None
            ):  # their memory is not looked at: to cast a bias once, or to flatten a GRU, harms nobody
                facts += (one.requires_grad, one.is_inference() or one._version)
    return parts, facts
