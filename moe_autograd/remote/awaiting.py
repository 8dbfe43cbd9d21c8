"""Remote calls for asyncio: in a thread, in the caller's world, and cancelled where the task is.

`asyncio.to_thread` leaves three things out: torch keeps grad mode and autocast for each thread, so `torch.no_grad()`
around it does nothing; a task that is cancelled leaves its thread waiting for the server; and so `asyncio.run`, which
waits for threads, ends after Ctrl-C only with the deadline.
"""

from __future__ import annotations

import asyncio
import functools
import threading
from collections.abc import Callable, Hashable
from contextvars import ContextVar
from typing import ParamSpec, TypeVar

from moe_autograd._ambient import Ambient
from moe_autograd.remote.cancelling import Cancellation

P = ParamSpec("P")
R = TypeVar("R")


class Scope(Cancellation):
    """What one call of `in_thread` has begun: operations are cancelled with it, and steps may be repeated then.

    A task may be cancelled when the result is there already: its caller hears of none. One within another belongs to
    that as well.
    """

    def __init__(self) -> None:
        super().__init__()
        self._outer = SCOPE.get()
        if self._outer is not None:
            self._outer.add(self.cancel)
        self._steps_lock = threading.Lock()
        self._steps: dict[Hashable, Callable[[bool], object]] = {}
        self._was_heard: bool | None = None  # None: it has not ended

    def note_step(self, key: Hashable, tell: Callable[[bool], object]) -> None:
        """Have `tell` called with whether the caller hears of a step that was made; only of the last one of a key."""
        with self._steps_lock:
            was_heard = self._was_heard
            if was_heard is None:
                self._steps[key] = tell
        if was_heard is not None:
            tell(was_heard)

    def end(self, was_heard: bool) -> None:
        """Note that the caller goes on, with what `func` returned or raised, or without."""
        with self._steps_lock:
            self._was_heard = was_heard
            steps, self._steps = self._steps, {}
        outer = self._outer
        if outer is not None:
            outer.remove(self.cancel)
        for key, tell in steps.items():
            if was_heard and outer is not None:
                outer.note_step(key, tell)
            else:
                tell(was_heard)


SCOPE: ContextVar[Scope | None] = ContextVar("moe_autograd.remote.in_thread", default=None)


async def in_thread(func: Callable[P, R], /, *args: P.args, **kwargs: P.kwargs) -> R:
    """Call `func(*args, **kwargs)` in a thread, and let the loop go on meanwhile.

    As `asyncio.to_thread`, but grad mode, autocast and the rest of torch's world are those at the call, and cancelling
    it (by `task.cancel()`, `asyncio.timeout` or Ctrl-C) cancels the remote operations that `func` has under way, on
    their servers as well: the thread is free again at once. What the servers have begun counts, as after any call that
    fails: `zero_grad()` before you go on. Only a `step` may be repeated: experts that have made it make no other.

    Enter `torch.no_grad()` and autocast within `func`, and hold neither over an `await`: torch keeps them by thread, so
    all tasks of a loop share them, and blocks of two tasks that overlap leave the thread as none of them found it.

    Args:
        func: such as a layer with remote experts, `loss.backward`, `optimizer.step`, or `connect`.
        args: positional arguments.
        kwargs: others.

    Returns:
        What `func` returned.

    Raises:
        asyncio.CancelledError: it was cancelled.
        BaseException: whatever `func` raised.

    Threads: on that of the loop; `func` runs in the loop's default executor.
    """
    scope = Scope()
    token = SCOPE.set(scope)
    try:
        ambient = Ambient()
    finally:
        SCOPE.reset(token)
    call = functools.partial(ambient.run, functools.partial(func, *args, **kwargs))
    withdrawn: list[BaseException] = []

    def call_unless_withdrawn() -> R:
        if withdrawn:
            raise withdrawn[0]
        return call()

    try:
        future = asyncio.get_running_loop().run_in_executor(None, call_unless_withdrawn)
    except RuntimeError as error:  # no thread for it; the executor keeps it, and would call it later
        withdrawn.append(error)
        scope.end(was_heard=True)
        raise
    was_heard = True
    try:
        return await future
    except asyncio.CancelledError:
        was_heard = False
        scope.cancel()
        raise
    finally:
        scope.end(was_heard)
