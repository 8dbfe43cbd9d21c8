"""What an exception keeps alive: all that the frames in its traceback have in their variables.

Of a plain loop's call that fails these are the variables of what it called. Of a map they would be, besides, the
results and graphs of all other calls, for as long as somebody keeps the exception (a log, a debugger, a future). So
what passes a door of ours leaves them behind, as `unittest` does with what it has expected: our own frames, whose
variables nobody needs any more, are emptied. Those of the user's functions, and of torch's, stay as they are.

A frame also holds its function, and a function within another one holds variables of that one. `Frame.clear` leaves
them alone, so who runs such a function for a call empties them, or takes a `functools.partial`, which has no frame.
"""

from __future__ import annotations

import contextlib
import traceback

_OURS = __name__.partition(".")[0] + "."


def empty_our_frames(error: BaseException) -> None:
    """Let go of what our frames hold that an exception came through, and those that it came from.

    Threads: any; a frame that still runs, on whatever thread, stays as it is.
    """
    met, to_visit = {id(error)}, [error]
    for one in to_visit:  # grows
        for frame, _ in traceback.walk_tb(one.__traceback__):
            if str(frame.f_globals.get("__name__")).startswith(_OURS):
                with contextlib.suppress(RuntimeError):  # it still runs
                    frame.clear()
        for origin in (one.__cause__, one.__context__):
            if origin is not None and id(origin) not in met:
                met.add(id(origin))
                to_visit.append(origin)
