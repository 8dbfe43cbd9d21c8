"""Ctrl-C at a chosen point of a program: wherever CPython may run the handler of a signal, one after the other.

It does so when a function of Python begins, and when one of C has returned (and where a loop jumps back, which is not
tried). Just these are told to a profile function; what that raises is raised there. It runs the handler as CPython
would.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Collection, Iterator
from types import FrameType, ModuleType
from typing import Any


class _Interrupt:
    def __init__(self, num_before: int, files: Collection[str | None]) -> None:
        self._num_left = num_before
        self._files = files
        self.point = ""  # where it came

    def look(self, frame: FrameType, event: str, function: Any) -> None:
        if event not in ("call", "c_return") or (self._files and frame.f_code.co_filename not in self._files):
            return
        if self._num_left == 0:
            sys.setprofile(None)
            self.point = f"{frame.f_code.co_qualname}, line {frame.f_lineno}, {event}"
            handler: Any = signal.getsignal(signal.SIGINT)
            handler(signal.SIGINT, frame)
            return
        self._num_left -= 1


def interrupted_everywhere(
    program: Callable[[], object], *, every: int = 1, within: Collection[ModuleType] = ()
) -> Iterator[str]:
    """Run a program again and again, each time with Ctrl-C at a later point; yield where that was.

    Args:
        program: what is interrupted; the same on each run.
        every: how many points lie from one that is tried to the next.
        within: modules to whose own code it comes; by default to any.

    Raises:
        BaseException: what the program made of Ctrl-C, where that is another error.
    """
    num_before = 0
    files = {module.__file__ for module in within}
    kept: list[KeyboardInterrupt] = []  # the last one, and with it all frames, as in a notebook
    while True:
        interrupt = _Interrupt(num_before, files)
        sys.setprofile(interrupt.look)
        try:
            program()
        except KeyboardInterrupt as error:
            kept.append(error)
        finally:
            sys.setprofile(None)
        if not interrupt.point:
            return
        yield interrupt.point
        kept.clear()
        num_before += every
