"""Let Ctrl-C wait while state is changed that has to fit together.

Python runs the handler of a signal after almost any instruction of the main thread. What it raises, as Ctrl-C does,
may come between two changes that belong together; just when a lock has been taken, and nobody knows yet who is to
release it; or just when a context is to be left, which then is not. Inside of `uninterrupted` the handler waits for the
end, or for the next `let_through`::

        with uninterrupted() as section:
            take()
            try:
                with section.opened():    # as outside: what takes long is here
                    work()
            finally:
                give_back()

Sections may be nested: the outermost ends the wait, or `let_through`, which is for those who wait within one.

Threads: any; on others than the main thread nothing is to be done, since handlers do not run there.

Mutable state: `_Main` is the main thread's alone.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # of CPython and PyPy; typeshed leaves it out
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, ClassVar

# What `signal` is made of, without the enums around it, which take 2 us.
_get_handler, _set_handler = _signal.getsignal, _signal.signal


class _Main:
    """What the main thread holds back."""

    is_held: ClassVar[bool] = False
    handler: ClassVar[Callable[[int, FrameType | None], Any] | None] = None  # which waits
    has_come: ClassVar[bool] = False
    frame: ClassVar[FrameType | None] = None  # where that was


class uninterrupted:
    """Inside, the handler of SIGINT waits."""

    __slots__ = ("_began_here",)

    def __enter__(self) -> uninterrupted:
        self._began_here = (
            threading.get_ident() == threading.main_thread().ident and not _Main.is_held and _hold()
        )
        return self

    def __exit__(self, *exc_info: object) -> None:
        if self._began_here:
            _release()

    def opened(self) -> _Opened:
        """Return a context in which handlers run as they did outside of the section."""
        return _Opened(self._began_here)


class _Opened:
    __slots__ = ("_is_open",)

    def __init__(self, is_open: bool) -> None:
        self._is_open = is_open

    def __enter__(self) -> None:
        if self._is_open:
            _release()

    def __exit__(self, *exc_info: object) -> None:
        if self._is_open:
            _hold()


def let_through() -> None:
    """Run the handler now, if it waits: where state fits together, and whatever is raised is heard."""
    if _Main.has_come and threading.get_ident() == threading.main_thread().ident:
        handler, frame = _Main.handler, _Main.frame
        assert handler is not None
        _Main.has_come, _Main.frame = False, None
        _set_handler(signal.SIGINT, handler)  # which may look who handles it, and let others do
        try:
            handler(signal.SIGINT, frame)
        finally:
            _hold()


def _hold() -> bool:
    """Hold the handler back; return whether there is one."""
    handler = _get_handler(signal.SIGINT)
    if handler is _note:  # whoever was interrupted has not given it back
        handler = _Main.handler
    if not callable(handler):
        return False
    _set_handler(signal.SIGINT, _note)
    _Main.handler, _Main.is_held = handler, True
    return True


def _note(_: int, frame: FrameType | None) -> None:
    _Main.has_come, _Main.frame = True, frame


def _release() -> None:
    handler, frame, has_come = _Main.handler, _Main.frame, _Main.has_come
    _Main.is_held, _Main.has_come, _Main.frame = False, False, None
    if handler is None:
        return
    _set_handler(signal.SIGINT, handler)
    if has_come:
        handler(signal.SIGINT, frame)
