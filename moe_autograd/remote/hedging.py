"""A second request where the first takes unusually long: the first answer to each call wins.

::

    server A   ── calls 0 1 2 ──────────────── 0 ✓ ── 1 ✓ ───────────────┬── cancelled, call 2 let go
    server B                        │ slower than usual │ ── call 2 ── 2 ✓┘

Rules:

1. Only forwards are asked twice: they change nothing.
2. A second request is sent once the first has taken longer than most (`HedgePolicy.quantile`) of the last forwards
   of its server did, for the calls that have no answer yet and have another server.
3. Each takes one retry from the budget that all retries share, which successes give back slowly: when the whole
   fleet is slow, hedging adds a tenth to its load, and not as much again.
4. What lost is cancelled. It may have left a graph on its server, for a backward that never comes: a backward that
   wants nothing lets it go, after the forward, since a server takes a client's calls in order. A server that this
   does not reach, or that was lost before another one answered, hears of it with the next pass (`leaving`).
5. A request that lost has taken at least as long as it ran: that counts as its time, else only quick ones would.

Mutable state: the latencies under their own lock; each race under its own.

Threads: any. Every request has a thread of its own, so that the caller can go on without the slow one.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from moe_autograd._waiting import wait
from moe_autograd.errors import DeadlineExceededError, RemoteError
from moe_autograd.remote.calls import Outcome, Request, exchange
from moe_autograd.remote.cancelling import Cancellation
from moe_autograd.remote.channel import Channel
from moe_autograd.remote.deadline import Deadline
from moe_autograd.remote.operations import Operation
from moe_autograd.remote.pool import Pool
from moe_autograd.remote.retry import RetryBudget
from moe_autograd.wire.heads import BackwardHead, ForwardHead

logger = logging.getLogger(__name__)

_NUM_REMEMBERED, _NUM_ENOUGH = 100, 10
_MOST_REQUESTS = 256
_LET_GO_S = 2.0


@dataclass(frozen=True)
class HedgePolicy:
    """When a forward is asked a second time.

    Args:
        quantile: of the times that a server's last forwards took; one that takes longer is asked again elsewhere.
        first_after_s: taken for that time until ten forwards of a server are known.

    Raises:
        ValueError: the quantile is not between 0 and 1, or the time is not positive and finite.
    """

    quantile: float = 0.95
    first_after_s: float = 1.0

    def __post_init__(self) -> None:
        numbers = (self.quantile, self.first_after_s)
        are_numbers = all(isinstance(n, int | float) and not isinstance(n, bool) for n in numbers)
        if not (are_numbers and 0 < self.quantile < 1 and 0 < self.first_after_s < math.inf):
            raise ValueError(
                "HedgePolicy: expected 0 < quantile < 1 and a positive first_after_s, got "
                f"quantile={self.quantile!r}, first_after_s={self.first_after_s!r}. Leave them out for the defaults."
            )


class Latencies:
    """How long the last forwards of each server took."""

    def __init__(self, policy: HedgePolicy) -> None:
        self._policy = policy
        self._lock = threading.RLock()  # a handler of a signal that makes calls takes it again
        self._taken_s: dict[str, deque[float]] = {}

    def note(self, address: str, taken_s: float) -> None:
        """Remember one."""
        with self._lock:
            self._taken_s.setdefault(address, deque(maxlen=_NUM_REMEMBERED)).append(taken_s)

    def usual_s(self, address: str) -> float:
        """Return the time after which a forward of this server is a slow one."""
        with self._lock:
            taken_s = sorted(self._taken_s.get(address, ()))
        if len(taken_s) < _NUM_ENOUGH:
            return self._policy.first_after_s
        return taken_s[math.ceil(self._policy.quantile * len(taken_s)) - 1]


class Hedging:
    """Sends forwards, and some of them twice.

    Args:
        policy: when.
        budget: of all retries.
        channel: to an address.
        note: told the address and the outcomes of each request that was not cancelled.
    """

    def __init__(
        self,
        policy: HedgePolicy,
        budget: RetryBudget,
        channel: Callable[[str], Channel],
        note: Callable[[str, Sequence[Outcome]], None],
    ) -> None:
        self.latencies = Latencies(policy)
        self._budget = budget
        self._channel = channel
        self._note = note
        self._pool = Pool(_MOST_REQUESTS, "hedging")

    def send(
        self, address: str, requests: Sequence[Request], elsewhere: Sequence[str | None], operation: Operation
    ) -> list[tuple[str, Outcome]]:
        """Make forwards of one server.

        Args:
            address: of the server.
            requests: the forwards.
            elsewhere: for each another server that hosts its expert, or None.
            operation: that they are a part of.

        Returns:
            For each who answered it, and what.
        """
        race = _Race(requests)
        self._start(race, address, range(len(requests)), operation, is_first=True)
        try:
            race.wait_until_over(min(self.latencies.usual_s(address), operation.deadline.remaining_s))
            for other, indices in race.open_calls(elsewhere).items():
                if self._budget.try_take():
                    self._start(race, other, indices, operation)
            race.wait_until_over(operation.deadline.remaining_s)
        finally:
            race.cancel()
        return race.results(address, operation)

    def close(self) -> None:
        """Let the threads go when they are done."""
        self._pool.close()

    def _start(
        self,
        race: _Race,
        address: str,
        indices: Sequence[int],
        operation: Operation,
        *,
        is_first: bool = False,
    ) -> None:
        leg = _Leg(address, tuple(indices), Cancellation())
        race.enter(leg)
        if self._pool.try_start(functools.partial(self._run, race, leg, operation)):
            return
        if is_first:
            self._run(race, leg, operation)
        else:
            race.leave(leg, None)

    def _run(self, race: _Race, leg: _Leg, operation: Operation) -> None:
        def cancel() -> None:
            leg.cancellation.cancel(operation.cancellation.reason)

        channel = self._channel(leg.address)
        began_at = time.monotonic()
        operation.cancellation.add(cancel)
        failure: Exception | None = None
        try:
            requests = race.watched(leg)
            own = Operation(operation.deadline, leg.cancellation)
            exchange(channel, "Forward", requests, own, leg.outcomes)
        except Exception as error:  # the connection is closed; the caller raises it
            failure = error
        finally:
            operation.cancellation.remove(cancel)
            race.leave(leg, failure)
        is_cancelled = leg.cancellation.is_cancelled
        if not is_cancelled:
            self._note(leg.address, list(leg.outcomes.values()))
        if is_cancelled or any(outcome.error is None for outcome in leg.outcomes.values()):
            self.latencies.note(leg.address, time.monotonic() - began_at)
        _let_go(channel, race.lost_by(leg))


def _let_go(channel: Channel, lost: Sequence[tuple[Request, int]]) -> None:
    """Rule 4."""
    requests = [
        Request(request.expert, _wants_nothing(request.head, num_outputs), [None] * num_outputs)
        for request, num_outputs in lost
        if isinstance(request.head, ForwardHead) and request.head.keep_graph
    ]
    if requests:
        try:
            exchange(channel, "Backward", requests, Operation(Deadline(_LET_GO_S), Cancellation()))
        except RemoteError as error:
            logger.debug("forwards that lost stay at %s: %s", channel.address, error)


def _wants_nothing(forward: ForwardHead, num_outputs: int) -> BackwardHead:
    return BackwardHead(
        forward.client_id,
        sequence=0,
        settled_below=0,
        call_id=forward.call_id,
        expert=forward.expert,
        wants_weight_grads=False,
        wants_input_grads=(False,) * len(forward.input_requires_grad),
        num_grad_outputs=num_outputs,
        evaluate=forward.evaluate,
    )


def _late(request: Request, address: str, operation: Operation) -> Outcome:
    place = operation.place(f"expert {request.expert!r} at {address}", "Forward")
    late = f"{place}: expected an answer, got none in time. Is the server overloaded?"
    return Outcome(error=DeadlineExceededError(late), was_answered=False)


@dataclass(eq=False)
class _Leg:
    """One request of a race: which of its calls it carries, and what became of them, by place."""

    address: str
    indices: tuple[int, ...]
    cancellation: Cancellation
    outcomes: dict[int, Outcome] = field(default_factory=dict)


class _Race:
    """Calls, the requests that carry them, and who answers each first."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self._requests = requests
        self._lock = threading.Lock()  # a condition's own may stay locked after Ctrl-C
        self._changed = threading.Condition(self._lock)
        self._legs: list[_Leg] = []
        self._num_running = 0
        self._winners: dict[int, tuple[str, Outcome]] = {}
        self._failure: Exception | None = None

    def enter(self, leg: _Leg) -> None:
        with self._lock:
            self._legs.append(leg)
            self._num_running += 1
        for index in leg.indices:
            self._requests[index].asked.add(leg.address)

    def watched(self, leg: _Leg) -> list[Request]:
        """Return the requests as `leg` sends them, so that each answer is seen at once."""
        return [
            dataclasses.replace(
                self._requests[index], on_settled=functools.partial(self._answer, leg, place, index)
            )
            for place, index in enumerate(leg.indices)
        ]

    def _answer(self, leg: _Leg, place: int, index: int, is_answered: bool) -> None:
        with self._lock:
            if index in self._winners:
                return
            self._winners[index] = leg.address, leg.outcomes[place]
            self._changed.notify_all()
        self._requests[index].on_settled(is_answered)

    def leave(self, leg: _Leg, failure: Exception | None) -> None:
        with self._lock:
            self._num_running -= 1
            self._failure = self._failure or failure
            self._changed.notify_all()

    def wait_until_over(self, timeout_s: float) -> None:
        with self._lock:
            wait(functools.partial(self._changed.wait_for, self._is_over), timeout_s)

    def open_calls(self, elsewhere: Sequence[str | None]) -> dict[str, list[int]]:
        """Return the calls without an answer, by the other server that may give one."""
        grouped: dict[str, list[int]] = {}
        with self._lock:
            if not self._is_over():
                for index, other in enumerate(elsewhere):
                    if other is not None and index not in self._winners:
                        grouped.setdefault(other, []).append(index)
        return grouped

    def cancel(self) -> None:
        """Cancel what is still under way."""
        with self._lock:
            legs = tuple(self._legs)
        for leg in legs:
            leg.cancellation.cancel()

    def results(self, address: str, operation: Operation) -> list[tuple[str, Outcome]]:
        """Return who answered each call, and what; the first request's error where nobody did.

        Args:
            address: whom the first request went to.
            operation: where its deadline has passed, requests may be under way that have not noticed yet.
        """
        with self._lock:
            found = dict(self._winners)
            if len(found) < len(self._requests):
                for leg in self._legs:
                    for place, outcome in tuple(leg.outcomes.items()):
                        found.setdefault(leg.indices[place], (leg.address, outcome))
            if len(found) < len(self._requests) and self._failure is not None:
                raise self._failure
            for index, request in enumerate(self._requests):
                if index not in found:
                    found[index] = address, _late(request, address, operation)
            return [found[index] for index in range(len(self._requests))]

    def lost_by(self, leg: _Leg) -> list[tuple[Request, int]]:
        """Return the calls of `leg` that another one answered first, with the number of their outputs."""
        with self._lock:
            won = [(index, self._winners[index]) for index in leg.indices if index in self._winners]
        return [
            (self._requests[index], len(outcome.tensors))
            for index, (address, outcome) in won
            if address != leg.address
        ]

    def _is_over(self) -> bool:
        return self._num_running == 0 or len(self._winners) == len(self._requests)
