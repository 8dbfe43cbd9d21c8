"""Hold back Ctrl-C while something begins that would be lost if it came in the middle.

The main thread of Python runs the handler of a signal after any instruction. One that raises, as that of Ctrl-C does,
may come when grpc has begun a call, which it keeps alive, and has not returned it: then nobody can cancel it, and the
server works in vain.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # of CPython and PyPy; typeshed leaves it out
import signal
import threading
from types import FrameType, TracebackType
from typing import Any

# What `signal` is made of, without the enums around it: looking up a handler that is a function in an enum of constants
# takes 2 us, and there are three such looks for each stream.
_get_handler, _set_handler = _signal.getsignal, _signal.signal


class interrupts_held_back:
    """Inside, SIGINT waits; at the end its handler runs, which may raise.

    Threads: any; on others than the main thread nothing is to be done, since handlers do not run there.
    """

    __slots__ = ("_came", "_frame", "_handler")

    def __enter__(self) -> None:
        self._came = False
        self._frame: FrameType | None = None
        self._handler: Any = None
        if threading.get_ident() == threading.main_thread().ident:
            handler = _get_handler(signal.SIGINT)
            if callable(handler):
                self._handler = handler
                _set_handler(signal.SIGINT, self._note)

    def _note(self, _: int, frame: FrameType | None) -> None:
        self._came, self._frame = True, frame

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._handler is None:
            return
        _set_handler(signal.SIGINT, self._handler)
        frame, self._frame = self._frame, None
        if self._came:
            self._handler(signal.SIGINT, frame)
