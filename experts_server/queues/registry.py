"""The experts of a server by name, and the way of a call to the right one."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from experts_server.hosting.calls import BackwardCall, Call, ForwardCall, InspectCall
from experts_server.hosting.hosted import HostedExpert
from experts_server.queues.batching import Computed, ExpertQueue, QueueLimits
from experts_server.queues.executor import WorkerPool, take
from moe_autograd._natural_order import natural_order
from moe_autograd.errors import ExpertNotFoundError, InvalidCallError, RemoteError, ServerBusyError, listed

AT_ONCE_S = 0.002  # how long other messages may have to wait for small calls


class Registry(Mapping[str, ExpertQueue]):
    """Expert queues by name, in name order: ffn.2 before ffn.10.

    Threads: the event loop's; what is hosted does not change while a server runs.
    """

    def __init__(self, queues: Iterable[ExpertQueue], pool: WorkerPool, limits: QueueLimits) -> None:
        by_name = {queue.hosted.name: queue for queue in queues}
        self._queues = {name: by_name[name] for name in sorted(by_name, key=natural_order)}
        self._pool = pool
        self._limits = limits

    def __getitem__(self, name: str) -> ExpertQueue:
        queue = self._queues.get(name)
        if queue is None:
            raise ExpertNotFoundError(
                f"server: expected one of its {len(self)} experts ({listed(self._queues)}), got {name!r}. "
                "Ask `experts-server info` what is hosted."
            )
        return queue

    def __iter__(self) -> Iterator[str]:
        return iter(self._queues)

    def __len__(self) -> int:
        return len(self._queues)

    def submit(self, calls: Sequence[Call]) -> None:
        """Check each call and let it wait for its expert; one that is refused is answered at once.

        Never raises, never blocks: many calls cost the worker pool one wake-up. Small ones are computed here: to hand
        one over, and to be woken by its answer, takes longer.
        """
        turns: list[ExpertQueue] = []
        small: deque[tuple[ExpertQueue, Call]] = deque()
        has_room = self._has_room_for(calls)
        for call in calls:
            try:
                queue = self[call.expert]
                if isinstance(call, (ForwardCall, BackwardCall)):
                    queue.hosted.check(call)
                if not has_room:
                    self._limits.take((call,))
            except RemoteError as error:
                if has_room:
                    self._limits.give_back([call])
                self.note_refused(call.expert)
                call.reply(call, error)
                continue
            queue.hosted.prefetch()
            if queue.hosted.is_small(call) and queue.claim():
                small.append((queue, call))
            elif queue.add(call):
                turns.append(queue)
        if turns:
            self._pool.put(turns)
        if small:
            self._compute_at_once(small)

    def close(self) -> None:
        """Let no expert begin another call; to be called when all RPCs have ended, and before the pool is closed."""
        for queue in self._queues.values():
            queue.close()

    def note_refused(self, name: str) -> None:
        """Count a call that never comes into a queue."""
        if name in self._queues:
            self._queues[name].stats.num_refused += 1

    def _compute_at_once(self, small: deque[tuple[ExpertQueue, Call]]) -> None:
        """Compute calls here, whose turns are claimed; let the loop do something else from time to time.

        All are computed, then all answered: what does one thing again and again finds its code in the cache.
        """
        until = time.monotonic() + AT_ONCE_S
        done: list[tuple[ExpertQueue, Computed]] = []
        while small:
            queue, call = small.popleft()
            done.append((queue, queue.compute_alone(call)))
            if time.monotonic() > until:
                break
        self._limits.give_back([call for _, computed in done for call in computed.batch])
        for queue, computed in done:
            take(queue.answer_alone, computed)
        if small:
            asyncio.get_running_loop().call_soon(self._compute_at_once, small)

    def _has_room_for(self, calls: Sequence[Call]) -> bool:
        """Take room for all of them at once, if there is."""
        try:
            self._limits.take(calls)
        except (InvalidCallError, ServerBusyError):  # what is said of all together means none of them
            return False
        return True

    @property
    def max_waiting(self) -> int:
        """How many calls may wait at most, over all experts."""
        return self._limits.calls.limit

    async def ask(
        self, names: Sequence[str], make_call: Callable[[Any], Any], timeout_s: float | None = None
    ) -> list[Any]:
        """Put one call to each of the named experts; return results and exceptions in their order.

        What has not come when nothing has for `timeout_s` is a `TimeoutError`, and is not begun any more.
        """
        loop = asyncio.get_running_loop()
        futures: list[asyncio.Future[Any]] = [loop.create_future() for _ in names]
        calls = []
        for name, future in zip(names, futures, strict=True):
            call = make_call(_replying_to(loop, future))
            call.expert, call.arrived_at = name, time.monotonic()
            calls.append(call)
        self.submit(calls)
        try:
            await _all_or_none_for(timeout_s, futures)
            return [future.result() if future.done() else TimeoutError() for future in futures]
        finally:
            for call in calls:
                call.is_cancelled = True
            calls.clear()  # the traceback of one that was refused knows this frame: it must not hold itself
            futures.clear()

    async def inspect(
        self, names: Sequence[str], function: Callable[[HostedExpert], Any], timeout_s: float | None = None
    ) -> list[Any]:
        """Run a function on each of the named experts, between their other calls; see `ask`."""
        return await self.ask(names, lambda reply: InspectCall(b"", reply, function), timeout_s)


def only_result(results: list[Any]) -> Any:
    """Return the result of the one call that was asked, or raise it."""
    try:
        if isinstance(results[0], BaseException):
            raise results[0]
        return results[0]
    finally:
        results.clear()  # this frame is in the traceback: the exception must not hold itself


def _replying_to(loop: asyncio.AbstractEventLoop, future: asyncio.Future[Any]) -> Callable[[Any, Any], None]:
    """Return a `reply` that gives its result to `future`, on the loop; from any thread."""

    def set_result(result: Any) -> None:
        if not future.done():
            future.set_result(result)

    def reply(_: Any, result: Any) -> None:
        try:
            loop.call_soon_threadsafe(set_result, result)
        except RuntimeError:
            return  # the loop is closed: nobody waits any more

    return reply


async def _all_or_none_for(timeout_s: float | None, futures: Sequence[asyncio.Future[Any]]) -> None:
    """Wait for all of them, or until none has come for so long: many take their time where one hangs."""
    latest = time.monotonic()

    def note(_: asyncio.Future[Any]) -> None:
        nonlocal latest
        latest = time.monotonic()

    for future in futures:
        future.add_done_callback(note)
    waiting = set(futures)
    while waiting:
        rest_s = None if timeout_s is None else latest + timeout_s - time.monotonic()
        if rest_s is not None and rest_s <= 0:
            return
        _, waiting = await asyncio.wait(waiting, timeout=rest_s)
