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
from types import FrameType
from typing import TypeVar

T = TypeVar("T")


def on_each_thread(look: Callable[[FrameType], T]) -> dict[int, T]:
    """Return what `look` returns for the innermost frame of each thread, by its `ident`.

    Args:
        look: may follow `f_back`; short, since others wait for its end.
    """
    with _looking:
        collects = gc.isenabled()
        gc.disable()
        try:
            return {thread: look(frame) for thread, frame in sys._current_frames().items()}
        finally:
            if collects:
                gc.enable()


_looking = threading.Lock()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_looking._at_fork_reinit)  # type: ignore[attr-defined]  # not in the stub
