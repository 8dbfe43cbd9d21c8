"""The backward that runs now: what is kept for as long as it does, however it ends.

Of a backward that failed the engine keeps gradients until the thread's next one, but drops its callbacks at once. So
one callback holds what belongs to the backward, and nothing else does.

Threads: any; a backward has one number on all of them. No locks, which a forked child might never get back: where
threads come at once, one of them makes what all get, by an operation that the interpreter makes atomic.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch.autograd import Variable

T = TypeVar("T")
_ANY_THREAD = contextlib.nullcontext()


class _Hold:
    """What the engine holds as long as one backward runs."""

    def __init__(self) -> None:
        self.things: dict[object, Any] = {}

    def __call__(self) -> None:
        """Do nothing at the end of a backward that went well."""


_holds: dict[int, weakref.ref[_Hold]] = {}  # by the engine's number, as long as that backward runs


def keeps_graph() -> bool:
    """Whether there may be another backward through the same graph."""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def kept_by_this_backward(key: object, make: Callable[[], T]) -> T:
    """Return what this backward keeps under `key`, made by its first call; only for a node that the engine runs."""
    number = torch._C._current_graph_task_id()
    known = _holds.get(number)
    hold = None if known is None else known()
    if hold is None:
        made = _Hold()
        hold = _holds.setdefault(number, weakref.ref(made, lambda _: _holds.pop(number, None)))()
        if hold is made:  # else another thread's was first
            Variable._execution_engine.queue_callback(hold)
    assert hold is not None  # the engine has it
    thing: T | None = hold.things.get(key)
    return hold.things.setdefault(key, make()) if thing is None else thing


def on_this_thread() -> contextlib.AbstractContextManager[object]:
    """Keep an inner backward on its worker.

    On a GPU the engine hands nodes to a thread of the device. That thread is the one which runs the join, and waits
    there for the workers.
    """
    if torch.accelerator.current_accelerator() is None:
        return _ANY_THREAD
    return torch.autograd.set_multithreading_enabled(False)
