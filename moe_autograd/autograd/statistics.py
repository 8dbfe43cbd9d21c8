"""Modules that keep running statistics, and stand in several places of a map: their calls take turns.

`BatchNorm` and its like add to their buffers in the forward. In a plain loop each call adds to what the one before
it left; side by side, additions get lost, and which ones is left to chance. So the forward of such a call begins when
the one before it, of the same module, is over. Calls of other modules do not wait, and backwards change no statistics.

Only a module that is itself in several places is looked at: what else calls share is for their author to guard.

Threads: calls of a map begin in the order of their index (`_workers`), so whoever is waited for has begun.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.nn.modules.batchnorm import _NormBase


class _Turn:
    """A call that begins when the one before it is over."""

    def __init__(self, call: Callable[..., Any], before: _Turn | None) -> None:
        self._call, self._before = call, before
        self._is_over = threading.Event()

    def __call__(self, /, *args: Any, **kwargs: Any) -> Any:
        try:
            if self._before is not None:
                self._before._is_over.wait()
                self._before = None
            return self._call(*args, **kwargs)
        finally:  # also when Ctrl-C ends the wait: the next one must not wait for ever
            self._is_over.set()


def in_turns(modules: Sequence[object], called: Sequence[Callable[..., Any]]) -> list[Callable[..., Any]]:
    """Return `called`, where calls of one module that keeps statistics wait for each other.

    Args:
        modules: for each call the module that it calls.
        called: how each is called.
    """
    if len(set(map(id, modules))) == len(modules):
        return list(called)
    keeps = {id(module): _keeps_statistics(module) for module in {id(m): m for m in modules}.values()}
    last: dict[int, _Turn] = {}
    taking_turns: list[Callable[..., Any]] = []
    for module, call in zip(modules, called, strict=True):
        if keeps[id(module)]:
            call = last[id(module)] = _Turn(call, last.get(id(module)))
        taking_turns.append(call)
    return taking_turns


def _keeps_statistics(module: object) -> bool:
    return isinstance(module, nn.Module) and any(
        isinstance(part, _NormBase) and part.training and part.running_mean is not None
        for part in module.modules()
    )
