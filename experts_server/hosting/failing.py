"""What goes wrong in calls, as the log tells it: operators see where an expert's module raised, clients what it said.

A module's own text may tell of its tensors, and the log holds none. So an exception of a module is logged by its type
and the lines that it came from; its text is for the client alone.

The same failure, of one type and from one line, is told once a minute for each expert, and then with how many there
were since; where it came from once a minute for all of them: a thousand experts may be of one class.
"""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass

from moe_autograd.errors import ExpertFailedError, MoeAutogradError

logger = logging.getLogger(__name__)

REST_S = 60.0
MAX_KNOWN = 4096

# of an exception: the name of its type, which may be made anew each time; the file and the line that it came from
Kind = tuple[str, str, int]


@dataclass(slots=True)
class _Told:
    at: float = float("-inf")
    num_since: int = 0


class FailureLog:
    """Logs failures of the calls of all experts of a server.

    Args:
        clock: seconds that only grow.

    Threads: any.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        # by expert, or "" for all of them, and what failed
        self._told: dict[tuple[str, str, Kind], _Told] = {}

    def __repr__(self) -> str:
        return f"<FailureLog of {len(self._told)} kinds of failures>"

    def note(self, expert: str, error: BaseException) -> None:
        """Log what an operator should know of: a module that raised, a disk that fails, a bug of ours."""
        if isinstance(error, ExpertFailedError):
            self.warn(expert, "a call failed", error)
        elif not isinstance(error, MoeAutogradError):
            logger.error("expert %r: a call failed in the server itself", expert, exc_info=error)

    def warn(self, expert: str, what: str, error: BaseException) -> None:
        """Log that an expert failed, unless that has just been told: what, by which exception, and where."""
        if isinstance(error, ExpertFailedError):
            error = error.__cause__ or error
        kind = _kind_of(error)
        with self._lock:
            num_since = self._num_since(expert, what, kind)
            if num_since is None:
                return
            shows_where = (
                not isinstance(error, MoeAutogradError) and self._num_since("", "", kind) is not None
            )
        again = f" ({num_since} times more since that was told last)" if num_since else ""
        reason = str(error) if isinstance(error, ExpertFailedError) else type(error).__name__
        shown = _without_text(error) if shows_where else None
        logger.warning("expert %r: %s: %s%s", expert, what, reason, again, exc_info=shown)

    def _num_since(self, expert: str, what: str, kind: Kind) -> int | None:
        """Return how often this has been kept quiet, if it is to be told now."""
        key = expert, what, kind
        if key not in self._told and len(self._told) >= MAX_KNOWN:
            self._told.clear()
        told, now = self._told.setdefault(key, _Told()), self._clock()
        if now - told.at < REST_S:
            told.num_since += 1
            return None
        num_since, told.at, told.num_since = told.num_since, now, 0
        return num_since


def _kind_of(error: BaseException) -> Kind:
    *_, (frame, line) = traceback.walk_tb(error.__traceback__) if error.__traceback__ else [(None, 0)]
    return (
        f"{type(error).__module__}.{type(error).__qualname__}",
        frame.f_code.co_filename if frame else "",
        line,
    )


def _without_text(
    error: BaseException, known: dict[BaseException, BaseException] | None = None
) -> BaseException:
    """Return an exception that is shown as `error` is, with all that led to it, but for what they say.

    Args:
        error: is shown.
        known: what was made before: mostly a cause is the context as well.
    """
    known = {} if known is None else known
    if error in known:
        return known[error]
    kind = type(error)
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    shown: BaseException = type(kind.__name__, (Exception,), names)().with_traceback(error.__traceback__)
    known[error] = shown
    if error.__cause__ is not None:
        shown.__cause__ = _without_text(error.__cause__, known)
    if error.__context__ is not None:
        shown.__context__ = _without_text(error.__context__, known)
    shown.__suppress_context__ = error.__suppress_context__
    return shown
