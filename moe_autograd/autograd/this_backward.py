"""Keep something for as long as one backward runs, however that ends.

Of a backward that failed the engine keeps gradients until the thread's next one, but drops its callbacks at once. So
one callback holds what belongs to the backward, and nothing else does.

Threads: any; a backward has one number on all of them.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.autograd import Variable

T = TypeVar("T")


class _Hold:
    """What the engine holds as long as one backward runs."""

    def __init__(self) -> None:
        self.things: dict[object, Any] = {}

    def __call__(self) -> None:
        """Do nothing at the end of a backward that went well."""


_holds: weakref.WeakValueDictionary[int, _Hold] = weakref.WeakValueDictionary()  # by the engine's number


def kept_by_this_backward(key: object, make: Callable[[], T]) -> T:
    """Return what this backward keeps under `key`, made by its first call; only for a node that the engine runs."""
    number = torch._C._current_graph_task_id()
    hold = _holds.get(number)
    if hold is None:
        hold = _holds[number] = _Hold()
        Variable._execution_engine.queue_callback(hold)
    thing: T | None = hold.things.get(key)
    if thing is None:
        thing = hold.things[key] = make()
    return thing
