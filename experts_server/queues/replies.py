"""How a result gets from a worker to a coroutine that waits for it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any


def replying_to(loop: asyncio.AbstractEventLoop, future: asyncio.Future[Any]) -> Callable[[Any, Any], None]:
    """Return a `reply` that gives its result to `future`, on the loop."""

    def set_result(result: Any) -> None:
        if not future.done():
            future.set_result(result)

    def reply(_: Any, result: Any) -> None:
        try:
            loop.call_soon_threadsafe(set_result, result)
        except RuntimeError:
            return  # the loop is closed: nobody waits any more

    return reply
