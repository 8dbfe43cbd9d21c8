"""Hold back what Ctrl-C raises while grpc begins a call or waits for one, until that is over.

The main thread of Python runs the handler of a signal after any instruction. What it raises, as Ctrl-C does, may
come when grpc

- has begun a call, which it keeps alive, and has not returned it: then nobody can cancel it, and the server works in
  vain;
- waits for the next event of a call: then it gives up the queue where that comes, and the call that nobody can end any
  more keeps its connection's socket open until the process ends.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

from moe_autograd._interrupts import get_handler, set_handler


class interrupts_held_back:
    """Inside, SIGINT waits until `cancel_with`, or the end: whatever begins may hold locks that its handler needs.

    From `cancel_with` on its handler runs when that comes, as ever, and what it raises is raised at the end.

    Threads: any; on others than the main thread nothing is to be done, since handlers do not run there.
    """

    __slots__ = ("_came", "_cancel", "_error", "_frame", "_handler")

    def __enter__(self) -> interrupts_held_back:
        self._came = False
        self._frame: FrameType | None = None
        self._error: BaseException | None = None
        self._cancel: Callable[[], object] | None = None
        self._handler: Any = None
        if threading.get_ident() == threading.main_thread().ident:
            self._hold()
        return self

    def cancel_with(self, cancel: Callable[[], object]) -> None:
        """Let the handler run; where it raises, have `cancel` called, so that the end comes soon."""
        self._cancel = cancel
        if self._came:
            self._came = False
            self._handle(signal.SIGINT, self._frame)
            self._frame = None

    def _hold(self) -> None:
        handler = get_handler(signal.SIGINT)
        self._handler = handler if callable(handler) else None
        if self._handler is not None:
            set_handler(signal.SIGINT, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._cancel is None:
            self._came, self._frame = True, frame
            return
        try:
            try:
                set_handler(signal.SIGINT, self._handler)  # which may look who handles it, and let others do
                self._handler(number, frame)
            finally:
                self._hold()
        except BaseException as error:
            self._error = error
            self._cancel()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._handler is not None:
            set_handler(signal.SIGINT, self._handler)
        if self._came:
            frame, self._frame = self._frame, None
            self._handler(signal.SIGINT, frame)
        if self._error is not None:
            held, self._error = self._error, None
            context = held.__context__
            try:
                raise held
            finally:
                held.__context__ = context  # the call that it has cancelled is no news
                del held, context  # which are in a cycle with this frame
