"""Hold back what Ctrl-C raises while grpc begins a call or waits for one, until that is over.

The main thread of Python runs the handler of a signal after any instruction. What it raises, as Ctrl-C does, may
come when grpc

- has begun a call, which it keeps alive, and has not returned it: then nobody can cancel it, and the server works in
  vain;
- waits for the next event of a call: then it gives up the queue where that comes, and the call that nobody can end any
  more keeps its connection's socket open until the process ends.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # of CPython and PyPy; typeshed leaves it out
import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any

# What `signal` is made of, without the enums around it: looking up a handler that is a function in an enum of constants
# takes 2 us, and there are three such looks for each stream.
_get_handler, _set_handler = _signal.getsignal, _signal.signal


class interrupts_held_back:
    """Inside, the handler of SIGINT runs when that comes, as ever; what it raises is raised at the end.

    Threads: any; on others than the main thread nothing is to be done, since handlers do not run there.
    """

    __slots__ = ("_cancel", "_error", "_handler")

    def __enter__(self) -> interrupts_held_back:
        self._error: BaseException | None = None
        self._cancel: Callable[[], object] | None = None
        self._handler: Any = None
        if threading.get_ident() == threading.main_thread().ident:
            self._hold()
        return self

    def cancel_with(self, cancel: Callable[[], object]) -> None:
        """Have `cancel` called when there is something to raise, so that the end comes soon; at once if there is."""
        self._cancel = cancel
        if self._error is not None:
            cancel()

    def _hold(self) -> None:
        handler = _get_handler(signal.SIGINT)
        self._handler = handler if callable(handler) else None
        if self._handler is not None:
            _set_handler(signal.SIGINT, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        try:
            _set_handler(signal.SIGINT, self._handler)  # which may look who handles it, and let others do
            self._handler(number, frame)
        except BaseException as error:
            self._error = error
            if self._cancel is not None:
                self._cancel()
        finally:
            self._hold()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._handler is not None:
            _set_handler(signal.SIGINT, self._handler)
        if self._error is not None:
            held, self._error = self._error, None
            try:
                raise held from held.__cause__  # the call that it has cancelled is no news
            finally:
                del held  # which is in a cycle with this frame
