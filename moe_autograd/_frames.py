"""What other threads of the process execute.

CPython 3.11 makes a frame's object when somebody asks for it, and may collect garbage as it makes one. A finalizer then
gives away the interpreter lock, and the thread whose frame it was goes on: the object is left with memory that is
another's by now. Frames came out cut off, or as lists; some crashed. `sys._current_frames` has the lock of the list of
threads meanwhile as well: a thread that starts just then waits for it with the interpreter lock, and nothing ever runs
again. (Later versions collect only between bytecodes.) So nothing is collected while others' frames are looked at.

Threads: any; one looks at a time.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Callable
from types import CodeType, FrameType
from typing import TypeVar

T = TypeVar("T")


def on_each_thread(look: Callable[[FrameType], T]) -> dict[int, T]:
    """Return what `look` returns for the innermost frame of each thread, by its `ident`.

    Args:
        look: may follow `f_back`; short, since others wait for its end.
    """
    global _is_paused
    with _looking:
        _is_paused = gc.isenabled()
        gc.disable()
        try:
            return {thread: look(frame) for thread, frame in sys._current_frames().items()}
        finally:
            _go_on()


def beneath(frame: FrameType | None, code: CodeType) -> FrameType | None:
    """Return the innermost frame from here outwards that runs a function of this code; `None` if there is none."""
    while frame is not None and frame.f_code is not code:
        frame = frame.f_back
    return frame


_looking = threading.Lock()
_is_paused = False  # whether the collector is off, and would not be but for us


def _go_on() -> None:
    global _is_paused
    if _is_paused:
        gc.enable()
        _is_paused = False


def _go_on_in_child() -> None:
    """Who looked when a child was forked is not in it."""
    global _looking
    _looking = threading.Lock()
    _go_on()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_go_on_in_child)
