"""Getting calls to their servers: all at once, again where that is safe, under one deadline.

::

    deliver(rpc, jobs) ── fanout ──┬─ server A: stream ─ what failed: pause, look again ─ stream ─ ...
                                   └─ server B: stream

A job says where it may move: a forward to any replica, a change only to a server that its expert has moved to (see
`placement`). Otherwise it stays with the server that knows its sequence number.

Mutable state: `_operations`, under `_lock`; the placement, the retry budget and the pools of threads have locks of
their own. Looking for experts has a pool to itself: threads of `_fanout` wait for it.

Threads: any number of operations at once.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar, cast

from moe_autograd.autograd.grouping import Failures
from moe_autograd.errors import (
    DeadlineExceededError,
    ExpertNotFoundError,
    InvalidCallError,
    PermissionDeniedError,
    RemoteError,
    ServerUnavailableError,
)
from moe_autograd.remote.calls import Outcome, Request, exchange
from moe_autograd.remote.channel import Channel
from moe_autograd.remote.compression import Encodings
from moe_autograd.remote.deadline import Deadline
from moe_autograd.remote.fanout import Cancellation, Fanout
from moe_autograd.remote.hedging import HedgePolicy, Hedging, Terms
from moe_autograd.remote.placement import Placement
from moe_autograd.remote.retry import Attempts, RetryBudget, RetryPolicy, is_worth_retrying
from moe_autograd.remote.servers import Servers
from moe_autograd.wire import experts_pb2 as pb
from moe_autograd.wire.tensors import TensorLimits

T = TypeVar("T")
R = TypeVar("R")

_LOOK_TIMEOUT_S = 1.0
_LEAST_ATTEMPT_S = 0.1


@dataclass(frozen=True)
class Settings:
    """What `connect` was told.

    Args:
        timeout_s: of each operation.
        limits: of what servers send.
        retry: when a call is made again.
        encodings: how tensors travel.
        hedge: when a forward is asked a second time; None: never.
    """

    timeout_s: float
    limits: TensorLimits
    retry: RetryPolicy
    encodings: Encodings
    hedge: HedgePolicy | None = None


@dataclass(slots=True)
class Job:
    """A call on its way.

    Args:
        request: what is sent.
        address: where it goes, or went.
        choose: given the expert's hosts as known then, where to try next; None to stay.
        outcome: what has become of it.
        index: of the call in its pass.
    """

    request: Request
    address: str
    choose: Callable[[tuple[str, ...]], str | None]
    outcome: Outcome = field(default_factory=Outcome)
    index: int = 0


@dataclass(frozen=True)
class Operation:
    """One thing a user asked for: all its parts share a deadline and are cancelled together."""

    deadline: Deadline
    cancellation: Cancellation


class Delivery:
    """Brings calls to servers.

    Args:
        servers: there are.
        settings: of all operations.
        seed: chooses among replicas; see `Placement`.
    """

    def __init__(self, servers: Servers, settings: Settings, seed: int) -> None:
        self.servers = servers
        self.settings = settings
        self.placement = Placement(seed)
        self._budget = RetryBudget(settings.retry)
        self._fanout = Fanout(servers.expected_number)
        self._looking = Fanout(servers.expected_number)
        self._hedging = (
            None
            if settings.hedge is None
            else Hedging(settings.hedge, self._budget, servers.channel, self._note_outcomes)
        )
        self._lock = threading.Lock()
        self._operations: set[Cancellation] = set()
        self._is_open = True
        self._process = os.getpid()

    @contextmanager
    def operation(self) -> Iterator[Operation]:
        """Begin an operation: its deadline runs, and `close` cancels it.

        Raises:
            RuntimeError: in a forked child.
        """
        if os.getpid() != self._process:
            raise RuntimeError(
                f"connection to {', '.join(self.servers.given)}: expected to be used in the process that made it, "
                f"{self._process}, got {os.getpid()}, its fork. A fork cannot share a connection: connect anew in it."
            )
        cancellation = Cancellation()
        with self._lock:
            self._operations.add(cancellation)
            if not self._is_open:  # nothing is waited for any more: what is tried fails, once
                cancellation.cancel()
        try:
            yield Operation(Deadline(self.settings.timeout_s), cancellation)
        finally:
            with self._lock:
                self._operations.discard(cancellation)

    # ---- finding

    def look(self, deadline: Deadline, cancellation: Cancellation) -> list[Exception]:
        """Find out which servers there are, and ask all of them once what they host.

        Returns:
            For each address that the user gave and behind which no server answered, why.
        """
        errors: dict[str, Exception] = {**self.servers.resolve(deadline)}

        def info(address: str, _: None) -> pb.InfoReply:
            channel = self.servers.channel(address)
            until = time.monotonic() + self.servers.patience_s(address)
            try:
                return channel.unary(
                    "Info", pb.InfoRequest(), pb.InfoReply, deadline, until - time.monotonic()
                )
            except ServerUnavailableError:  # it may have broken, as grpc's first connection after a fork may
                left_s = min(until - time.monotonic(), deadline.remaining_s)
                if left_s < _LEAST_ATTEMPT_S:
                    raise
                return channel.unary("Info", pb.InfoRequest(), pb.InfoReply, deadline, left_s)

        results = self._looking.at_each(dict.fromkeys(self.servers.addresses), info, cancellation)
        replies: dict[str, pb.InfoReply] = {}
        for address, result in results.items():
            if isinstance(result, Exception):
                errors[address] = result
            else:
                replies[address] = result
        counted = self.servers.settle(replies)
        known = [
            address for address in self.servers.addresses if address in counted or address not in replies
        ]
        self.placement.note_replies(known, counted)
        return self.servers.missing(errors)

    def hosts_of(self, name: str) -> tuple[str, ...]:
        """Return the servers of an expert, at least one.

        Raises:
            ExpertNotFoundError: there is none any more.
        """
        hosts = self.placement.hosts_of(name)
        if not hosts:
            raise ExpertNotFoundError(
                f"expert {name!r}: expected a server that hosts it, got none any more at "
                f"{', '.join(self.servers.given)}. Has a server been restarted with another configuration?"
            )
        return hosts

    # ---- passes

    def expect(self, address: str, names: Sequence[str]) -> None:
        """Tell a server that calls for these experts will come soon; returns at once, and never fails."""
        if os.getpid() == self._process:
            self.servers.channel(address).tell("Expect", pb.ExpectRequest(experts=names))

    def deliver(self, rpc: str, jobs: Sequence[Job], failures: Failures | None = None) -> None:
        """Send each job to its address until it has its final outcome, or `failures` gives up on it.

        Jobs that have failed already stay as they are.
        """
        with self.operation() as operation, _attended(rpc, jobs, failures, operation.cancellation):
            to_send = [job for job in jobs if job.outcome.error is None]

            def at(_: str, own: list[Job]) -> None:
                self._deliver_from(rpc, own, operation)

            values_or_raise(self._fanout.at_each(_by_address(to_send), at, operation.cancellation))

    def _deliver_from(self, rpc: str, jobs: Sequence[Job], operation: Operation) -> None:
        attempts = Attempts(self.settings.retry, self._budget, operation.deadline)
        while True:
            for address, group in _by_address(jobs).items():
                self._send(address, rpc, group, operation)
            failed = [job for job in jobs if job.outcome.error is not None]
            jobs = []
            for job in failed:
                if self._is_worth_retrying(job, attempts):
                    jobs.append(job)
                else:
                    job.request.on_settled(False)
            errors = [job.outcome.error for job in jobs if job.outcome.error is not None]
            pause_s = attempts.pause_before_next(errors) if errors else None
            if pause_s is None or operation.cancellation.wait(pause_s):
                for job in jobs:
                    job.request.on_settled(False)
                if attempts.num_retries:
                    for error in errors:
                        error.add_note(f"Given up after {attempts.num_retries} retries.")
                return
            self._find_anew(jobs, operation)

    def _send(self, address: str, rpc: str, jobs: Sequence[Job], operation: Operation) -> None:
        requests = [job.request for job in jobs]
        elsewhere = self._elsewhere(address, rpc, jobs)
        if self._hedging is not None and any(elsewhere):
            terms = Terms(operation.deadline, self.settings.limits, operation.cancellation)
            for job, result in zip(
                jobs, self._hedging.send(address, requests, elsewhere, terms), strict=True
            ):
                job.address, job.outcome = result
            return
        outcomes = exchange(
            self.servers.channel(address),
            rpc,
            requests,
            operation.deadline,
            self.settings.limits,
            operation.cancellation,
        )
        for job, outcome in zip(jobs, outcomes, strict=True):
            job.outcome = outcome
        self._note_outcomes(address, outcomes)

    def _elsewhere(self, address: str, rpc: str, jobs: Sequence[Job]) -> list[str | None]:
        """Return for each job another server that may be asked too; for changes there is none."""
        if self._hedging is None or rpc != "Forward":
            return []
        return [
            next((host for host in self.placement.hosts_of(job.request.expert) if host != address), None)
            for job in jobs
        ]

    def _note_outcomes(self, address: str, outcomes: Sequence[Outcome]) -> None:
        if any(isinstance(outcome.error, ServerUnavailableError) for outcome in outcomes):
            self.placement.note_failure(address)
        elif any(outcome.was_answered for outcome in outcomes):
            self.placement.note_success(address)
            self._budget.note_success()

    def _is_worth_retrying(self, job: Job, attempts: Attempts) -> bool:
        error = job.outcome.error
        if isinstance(error, ExpertNotFoundError):  # it may have moved; one look tells
            return self.servers.may_change and attempts.num_retries == 0
        return error is not None and is_worth_retrying(error, was_answered=job.outcome.was_answered)

    def _find_anew(self, jobs: Sequence[Job], operation: Operation) -> None:
        """Choose where jobs that failed go next."""
        self._look_briefly(operation)
        for job in jobs:
            job.address = job.choose(self.placement.hosts_of(job.request.expert)) or job.address

    # ---- everything else

    def at_each(
        self,
        work: Mapping[str, T],
        once: Callable[[Channel, T, Operation], R],
        operation: Operation,
        moved: Callable[[str, T], Mapping[str, T]],
        failures: list[RemoteError] | None = None,
        is_patient: Callable[[T], bool] = lambda own: True,
    ) -> list[R]:
        """Call `once`, which is short and may be repeated, at each address until it succeeds or fails for good.

        Args:
            work: for each address.
            once: does it.
            operation: that it is a part of.
            moved: given an address that is lost, or hosts an expert no longer, and its work, returns where parts of it
                go now; empty to stay.
            failures: takes those that another attempt may mend, instead of raising them.
            is_patient: tells whether work is worth more than one attempt.

        Returns:
            What each returned; the first failure is raised, after all have come to rest.
        """

        def until_done(address: str, own: T) -> list[R]:
            attempts = Attempts(self.settings.retry, self._budget, operation.deadline)
            while True:
                try:
                    return [once(self.servers.channel(address), own, operation)]
                except RemoteError as error:
                    is_lost = isinstance(error, ServerUnavailableError)
                    may_have_moved = isinstance(error, ExpertNotFoundError) and attempts.num_retries == 0
                    is_worth = may_have_moved or is_worth_retrying(error, was_answered=False)
                    is_worth = is_worth or isinstance(error, DeadlineExceededError)  # of this attempt only
                    pause_s = attempts.pause_before_next([error]) if is_worth and is_patient(own) else None
                    if pause_s is None or operation.cancellation.wait(pause_s):
                        raise
                if (
                    (is_lost or may_have_moved)
                    and self._look_briefly(operation)
                    and (parts := moved(address, own))
                ):
                    return [result for new, part in parts.items() for result in until_done(new, part)]

        outcomes = self._fanout.at_each(work, until_done, operation.cancellation)
        if failures is not None:
            errors = {address: error for address, error in outcomes.items() if _may_be_mended(error)}
            failures += [cast(RemoteError, error) for error in errors.values()]
            outcomes = {address: own for address, own in outcomes.items() if address not in errors}
        return [result for own in values_or_raise(outcomes) for result in own]

    def _look_briefly(self, operation: Operation) -> bool:
        """Look for servers in the middle of an operation; False if nothing can have changed."""
        if self.servers.may_change:
            timeout_s = min(_LOOK_TIMEOUT_S, max(operation.deadline.remaining_s, 0.001))
            self.look(Deadline(timeout_s), operation.cancellation)
        return self.servers.may_change

    def close(self) -> None:
        """Cancel what is under way and disconnect from all servers. In a forked child: nothing to do."""
        if os.getpid() != self._process:
            return
        with self._lock:
            self._is_open = False
            operations = tuple(self._operations)
        for cancellation in operations:
            cancellation.cancel()
        self.servers.close()
        self._fanout.close()
        self._looking.close()
        if self._hedging is not None:
            self._hedging.close()


@contextmanager
def _attended(
    rpc: str, jobs: Sequence[Job], failures: Failures | None, cancellation: Cancellation
) -> Iterator[None]:
    """Tell whoever keeps attendance of each job that is settled, and cancel the rest when it gives them up."""
    if failures is None or isinstance(failures, list):
        yield
        return
    with failures.waiting(rpc.lower(), cancellation.cancel) as note:
        for job in jobs:
            job.request.on_settled = functools.partial(note, job.index)
            if job.outcome.error is not None:
                job.request.on_settled(False)
        yield


def _may_be_mended(outcome: object) -> bool:
    """Tell whether this is a failure, and not one that would be the same at every attempt."""
    is_refused = isinstance(outcome, InvalidCallError | PermissionDeniedError)
    return isinstance(outcome, RemoteError) and not is_refused


def _by_address(jobs: Sequence[Job]) -> dict[str, list[Job]]:
    grouped: dict[str, list[Job]] = {}
    for job in jobs:
        grouped.setdefault(job.address, []).append(job)
    return grouped


def values_or_raise(results: Mapping[str, R | Exception]) -> list[R]:
    """Return what servers returned, or raise what the first that failed raised."""
    raise_first([result for result in results.values() if isinstance(result, Exception)], "servers")
    return [result for result in results.values() if not isinstance(result, Exception)]


def raise_first(errors: Sequence[Exception], of_what: str) -> None:
    """Raise the first of the errors, if there is one, with a note on how many others there are."""
    if errors:
        if len(errors) > 1:
            errors[0].add_note(f"{len(errors) - 1} other {of_what} failed too.")
        raise errors[0]
