"""The queue of one expert: its turns, and what is computed in them; who is next is in `waiting`.

Rules:

1. *One turn at a time.* The queue is in the worker pool at most once, or has its turn where the call came in (see
   `registry`), so calls of an expert never overlap and need no lock around the module; a hanging expert holds one
   worker and its own queue.
2. *In order for each client, in turn between clients.* A client's calls begin in the order they came; between
   clients the turn goes round, also where some calls can be joined and others cannot, so one with a thousand calls
   delays another's by one batch. An `InspectCall` runs after all that came before it and before all that come
   after: one put to all experts at once cuts every step of theirs on the same side.
3. *Checked before joined.* A call reaches this queue after `HostedExpert.check`; calls are joined only if their
   `HostedExpert.join_key` is equal (forwards, or backwards, of one input of equal dtype and row shape), up to
   `max_batch_tokens`. If a joined computation fails, each call is computed by itself and fails by itself. What is
   joined is told apart again: gradients gather by client, and the number of updates never depends on timing.
4. *Nothing in vain.* A call that was cancelled or is past its deadline when its turn comes is not begun.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from experts_server.budget import Budget
from experts_server.hosting.calls import BackwardCall, Call, ForwardCall, InspectCall, UpdateCall
from experts_server.hosting.hosted import HostedExpert
from experts_server.queues.devices import devices_contained
from experts_server.queues.executor import WorkerPool
from experts_server.queues.stats import ExpertStats
from experts_server.queues.turn_lengths import TurnLength
from experts_server.queues.waiting import WaitingCalls, is_in_vain
from moe_autograd._ambient import contained
from moe_autograd.errors import DeadlineExceededError, ServerUnavailableError

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class QueueLimits:
    """What waits at most, over all experts of a server, and how calls are joined."""

    calls: Budget
    bytes: Budget
    max_batch_tokens: int = 4096
    max_wait_s: float = 0.0

    def take(self, calls: Sequence[Call]) -> None:
        """Take room for these calls.

        Raises:
            InvalidCallError: there will never be any for all of them.
            ServerBusyError: there is none now.
        """
        num_calls = sum([call.takes_room for call in calls])
        self.calls.take(num_calls)
        try:
            self.bytes.take(sum([call.num_bytes for call in calls]))
        except BaseException:
            self.calls.give_back(num_calls)
            raise

    def give_back(self, calls: Sequence[Call]) -> None:
        """Return the room of these calls."""
        self.calls.give_back(sum([call.takes_room for call in calls]))
        self.bytes.give_back(sum([call.num_bytes for call in calls]))


class Computed(NamedTuple):
    """Calls that were computed together, and what is to be answered.

    Args:
        batch: the calls.
        results: one for each, or the exception.
        started_at: on `time.monotonic`'s clock; 0: they never began.
        compute_s: how long it took.
    """

    batch: list[Call]
    results: list[Any]
    started_at: float = 0.0
    compute_s: float = 0.0


class ExpertQueue:
    """The calls that wait for one expert; itself a turn of the worker pool.

    Args:
        hosted: the expert.
        pool: where turns are taken.
        limits: shared with the other experts' queues.
        call_later: runs a function after so many seconds, from any thread.
    """

    def __init__(
        self,
        hosted: HostedExpert,
        pool: WorkerPool,
        limits: QueueLimits,
        *,
        call_later: Callable[[float, Callable[[], None]], None],
    ) -> None:
        self.hosted = hosted
        self._length = TurnLength()
        self.computing_since: float | None = None  # on time.monotonic's clock, while a batch is computed
        self._pool = pool
        self._limits = limits
        self._call_later = call_later
        self.stats = ExpertStats()
        self._lock = threading.Lock()
        self._waiting = WaitingCalls(hosted.join_key, limits.max_batch_tokens)
        self._is_scheduled = False
        self._is_closed = False
        self._has_timer = False

    def __repr__(self) -> str:
        with self._lock:
            return f"<ExpertQueue {self.hosted.name!r} {self._waiting.num_calls} calls>"

    def __len__(self) -> int:
        return self._waiting.num_calls

    @property
    def expected_s(self) -> float:
        """How long its next turn may take."""
        return self._length.expected_s

    def add(self, call: Call) -> bool:
        """Let a call, for which there is room, wait; return whether the caller has to put this queue into the pool."""
        with self._lock:
            self._waiting.add(call)
            if self._is_scheduled:
                return False
            if self._limits.max_wait_s > 0 and self._may_wait(call):
                self._start_timer()
                return False
            self._is_scheduled = True
            return True

    def claim(self) -> bool:
        """Return whether nothing waits here, and nothing is to: then the caller has the turn, for `compute_alone`."""
        with self._lock:
            if self._is_scheduled or self._limits.max_wait_s > 0:  # without a wait, what waits is scheduled
                return False
            self._is_scheduled = True
            return True

    def compute_alone(self, call: Call) -> Computed:
        """Compute a call in the turn that was claimed for it; never raises. `answer_alone` ends the turn."""
        if is_in_vain(call):
            self.stats.num_late += 1
            return Computed([call], [self._refusal_of_late(call)])
        try:
            computed = self._compute([call])
            self._length.end()
        except BaseException as error:
            # A bug of ours, or of who listens to the log: this call fails, and those beside it are computed.
            logger.critical("a turn raised", exc_info=True)
            return Computed([call], [error])
        return computed

    def answer_alone(self, computed: Computed) -> None:
        """Answer the call, whose room has been given back, and end the turn."""
        try:
            self._answer(computed)
        finally:
            self._end_turn()

    def run(self) -> None:
        """Finish what the last turn left, else compute the next batch; what it leaves on is no other expert's."""
        try:
            with contained(), devices_contained():
                if self.hosted.has_left:
                    self._finish_what_was_left()
                elif batch := self._take():
                    computed = self._compute(batch)
                    self._limits.give_back(batch)
                    self._answer(computed)
                    if self.hosted.comes_and_goes:  # what it left keeps memory
                        self.hosted.finish()
                    self._length.end()
        finally:
            self._end_turn()

    def _end_turn(self) -> None:
        """Come again if there is more, unless the server stops."""
        self.computing_since = None
        with self._lock:
            has_more = self._waiting.num_calls > 0 or self.hosted.has_left
            self._is_scheduled = has_more and not self._is_closed
            if self._is_scheduled:
                # with the lock: between it and this line the queue could be closed, and then the pool
                self._pool.put([self])

    def let_go_of_late(self) -> None:
        """Answer all calls that nobody waits for any more: behind an expert that hangs their turn never comes."""
        with self._lock:
            late = self._waiting.take_late()
            self.stats.num_late += len(late)
        for call in late:
            self._refuse_late(call)

    def close(self) -> None:
        """Begin nothing any more, and answer all calls that wait: an expert that hangs may return to a closed pool.

        What its backward leaves then is let go of: gradients that nobody can step with any more.
        """
        with self._lock:
            self._is_closed = True
            waiting = self._waiting.take_all()
        for call in waiting:
            self._limits.give_back([call])
            call.reply(call, self._stopped())

    def _stopped(self) -> ServerUnavailableError:
        return ServerUnavailableError(
            f"expert {self.hosted.name!r}: expected to begin before the server stops, got a stop first. "
            "Nothing was done; call another one."
        )

    # ---- waiting

    def _may_wait(self, call: Call) -> bool:
        is_full = self._waiting.num_tokens >= self._limits.max_batch_tokens
        return not is_full and self.hosted.join_key(call) is not None

    def _start_timer(self) -> None:
        if not self._has_timer:
            self._has_timer = True
            self._call_later(self._limits.max_wait_s, self._stop_waiting)

    def _stop_waiting(self) -> None:
        with self._lock:
            self._has_timer = False
            if self._is_scheduled or not self._waiting.num_calls:
                return
            self._is_scheduled = True
        self._pool.put([self])

    def _take(self) -> list[Call]:
        """Take what is to be computed next; calls before it that nobody waits for any more are answered."""
        with self._lock:
            batch, late = self._waiting.take()
            self.stats.num_late += len(late)
        for call in late:
            self._refuse_late(call)
        return batch

    def _refuse_late(self, call: Call) -> None:
        self._limits.give_back([call])
        call.reply(call, self._refusal_of_late(call))

    def _refusal_of_late(self, call: Call) -> DeadlineExceededError:
        waited_s = time.monotonic() - call.arrived_at
        return DeadlineExceededError(
            f"expert {self.hosted.name!r}: expected to begin before the deadline, got there after "
            f"{waited_s:.3f} s in the queue. Allow more time, or send less at once."
        )

    # ---- computing

    def _compute(self, batch: list[Call]) -> Computed:
        self.computing_since = started_at = self._length.begin()
        for call in batch:
            call.started_at = started_at
        results = self._results(batch)
        return Computed(batch, results, started_at, time.monotonic() - started_at)

    def _answer(self, computed: Computed) -> None:
        try:
            if computed.started_at:
                self.stats.computed(*computed)
        finally:  # whatever becomes of the numbers, the answers leave
            for call, result in zip(computed.batch, computed.results, strict=True):
                call.reply(call, result)
            computed.results.clear()  # tracebacks of errors among them know frames that know them, and hold tensors
            del result

    def _finish_what_was_left(self) -> None:
        """A turn of its own: the answers of other experts, which wait for a worker, come first."""
        self.computing_since = self._length.begin()
        self.hosted.finish()
        self._length.end()

    def _results(self, batch: list[Call]) -> list[Any]:
        """One result, or exception, for each call."""
        try:
            return self._call_expert(batch)
        except BaseException as error:  # whatever a user's module raises is that call's answer
            if len(batch) == 1:
                self.hosted.failures.note(self.hosted.name, error)
                return [error]
        if self._is_closed:  # they would begin anew, each by itself
            return [self._stopped() for _ in batch]
        return [self._results([call])[0] for call in batch]

    def _call_expert(self, batch: list[Call]) -> list[Any]:
        if not self.hosted.comes_and_goes:
            return self._call_resident_expert(batch)
        with self.hosted.in_memory_for(batch[0]):
            return self._call_resident_expert(batch)

    def _call_resident_expert(self, batch: list[Call]) -> list[Any]:
        hosted, call = self.hosted, batch[0]
        if isinstance(call, ForwardCall):
            return hosted.forward(cast("list[ForwardCall]", batch))  # what is joined is of one kind
        if isinstance(call, BackwardCall):
            if len(batch) == 1:
                return [hosted.backward(call)]
            return hosted.backward_joined(cast("list[BackwardCall]", batch))
        if isinstance(call, UpdateCall):
            return [hosted.update(call)]
        assert isinstance(call, InspectCall), f"unknown call {call!r}"
        return [call.function(hosted)]
