"""Loads of weights into several experts, which go on when their client has gone.

By then some experts are set, and half a load is what nobody has asked for: the next checkpoint would have it. So the
others are set as well, however long it takes them; but for those that refuse their weights, and those that hang in
another call. Of these the log tells.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from experts_server.hosting.hosted import HostedExpert
from experts_server.queues.registry import Registry
from moe_autograd.errors import listed

logger = logging.getLogger(__name__)

HANGING_S = 60.0  # in one call, before which an expert is to be set; a save has the same patience

Stages = Mapping[str, Literal["waits", "is being set", "is refused", "is set"]]  # by expert
Results = asyncio.Future[list[Any]]


class Loads:
    """The loads of one server.

    Args:
        registry: what is hosted.

    Threads: the event loop's.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._alone: dict[asyncio.Task[None], Results] = {}  # those whose clients have gone

    def __repr__(self) -> str:
        return f"<Loads, {len(self._alone)} without a client>"

    async def load(
        self, names: Sequence[str], function: Callable[[HostedExpert], Any], place: contextlib.ExitStack
    ) -> list[Any]:
        """Set the named experts by `function`, all between the same calls; see `Registry.inspect`.

        Cancelled, it goes on by itself, and takes over what `place` holds until it is through.
        """
        stages: dict[str, Any] = dict.fromkeys(names, "waits")

        def set_one(hosted: HostedExpert) -> Any:
            stages[hosted.name] = "is being set"
            try:
                result = function(hosted)
            except BaseException:
                stages[hosted.name] = "is refused"
                raise
            stages[hosted.name] = "is set"
            return result

        loading = asyncio.ensure_future(self._registry.inspect(names, set_one))
        try:
            return await asyncio.shield(loading)
        except asyncio.CancelledError:
            task = asyncio.ensure_future(self._see_through(loading, stages, place.pop_all()))
            self._alone[task] = loading
            task.add_done_callback(self._alone.pop)
            raise

    async def give_up(self) -> None:
        """Set no more for clients that have gone; to be called when the last save is done."""
        for loading in self._alone.values():
            loading.cancel()
        if self._alone:
            await asyncio.wait([*self._alone])

    async def _see_through(self, loading: Results, stages: Stages, place: contextlib.ExitStack) -> None:
        """Wait until all are set that neither refuse it nor hang in another call."""
        with place:
            while not (await asyncio.wait([loading], timeout=HANGING_S))[0]:
                if self._waits_for_hanging_ones(stages):
                    loading.cancel()
        unset = [name for name, stage in stages.items() if stage != "is set"]
        if 0 < len(unset) < len(stages):
            logger.error(
                "weights of %d experts, whose client has gone: expected all to be set, got %s left out: they hang, "
                "refuse them, or the server stops. The others are set. Load them again.",
                len(stages),
                listed([repr(name) for name in unset]),
            )

    def _waits_for_hanging_ones(self, stages: Stages) -> bool:
        """Whether nothing but these is left."""
        if "is being set" in stages.values():
            return False
        waiting = [self._registry[name] for name, stage in stages.items() if stage == "waits"]
        now = time.monotonic()
        began = [queue.computing_since for queue in waiting]
        return all(since is not None and now - since > HANGING_S for since in began)
