"""Getting calls to their servers: all at once, again where that is safe, under one deadline.

::

    deliver(rpc, jobs) ── fanout ──┬─ server A: stream ─ what failed: pause, look again ─ stream ─ ...
                                   └─ server B: stream

A forward may move to any replica, but for one that records gradients of a trained expert: replicas that are trained
are different experts, so that it goes to the weights that this client trains. A backward goes only to a server that its
expert has moved to (see `placement`): otherwise it stays with the server that knows its sequence number.

A server that is lost (see `finding`) is looked for before anything is sent to it, and waited for only by those who
need it: not by a layer whose tokens all have enough other experts, nor by an optimizer that goes on without it.

Mutable state: none of its own; what it uses has locks.

Threads: any number of operations at once.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, TypeVar, cast

from moe_autograd.autograd.grouping import Failures
from moe_autograd.errors import (
    DeadlineExceededError,
    ExpertNotFoundError,
    InvalidCallError,
    PermissionDeniedError,
    RemoteError,
    ServerUnavailableError,
)
from moe_autograd.remote.calls import Outcome, exchange
from moe_autograd.remote.channel import Channel
from moe_autograd.remote.compression import Encodings
from moe_autograd.remote.fanout import Fanout, attempt, values_or_raise
from moe_autograd.remote.finding import Finding
from moe_autograd.remote.hedging import HedgePolicy, Hedging
from moe_autograd.remote.interrupts import interrupts_held_back
from moe_autograd.remote.jobs import Job, attended, by_address, error_of_lost, note_lost, say_more
from moe_autograd.remote.operations import Operation, Operations
from moe_autograd.remote.placement import Placement
from moe_autograd.remote.retry import Attempts, RetryBudget, RetryPolicy, is_worth_retrying
from moe_autograd.wire import experts_pb2 as pb

NamesT = TypeVar("NamesT", bound=Collection[str])
R = TypeVar("R")


@dataclass(frozen=True)
class Settings:
    """What `connect` was told.

    Args:
        timeout_s: of each operation.
        retry: when a call is made again.
        encodings: how tensors travel.
        hedge: when a forward is asked a second time; None: never.
    """

    timeout_s: float
    retry: RetryPolicy
    encodings: Encodings
    hedge: HedgePolicy | None


@dataclass(frozen=True)
class _Errand(Generic[NamesT, R]):
    """What is to be done at some servers; see `Delivery.at_each`."""

    rpc: str
    once: Callable[[Channel, NamesT, Operation], R]
    operation: Operation
    moved: Callable[[str, NamesT], Mapping[str, NamesT]]
    is_patient: Callable[[NamesT], bool]
    goes_on: bool  # without a server that is lost


class Delivery:
    """Brings calls to servers.

    Args:
        finding: knows the servers.
        settings: of all operations.
    """

    def __init__(self, finding: Finding, settings: Settings) -> None:
        self.finding = finding
        self.settings = settings
        self.operations = Operations(finding.servers.given, settings.timeout_s)
        self._channel = finding.servers.channel
        self._budget = RetryBudget(settings.retry)
        self._note_outcomes = partial(_note_outcomes, finding.placement, self._budget)
        self._fanout = Fanout(finding.servers.expected_number)
        self._hedging = (
            None
            if settings.hedge is None
            else Hedging(settings.hedge, self._budget, self._channel, self._note_outcomes)
        )

    # ---- passes

    def expect(self, address: str, names: Sequence[str]) -> None:
        """Tell a server that calls for these experts will come soon; returns at once, and never fails."""
        if self.operations.is_here:
            self._channel(address).tell("Expect", pb.ExpectRequest(experts=names))

    def forget(
        self, client_id: bytes, address: str, calls: Sequence[tuple[str, int]], if_lost: Callable[[], None]
    ) -> None:
        """Tell a server that these calls of experts have no backward any more; returns at once, and never fails.

        Where that does not arrive, `if_lost` is called, from any thread; at once if the server is lost.
        """
        if not self.operations.is_here or self.finding.is_lost(address):
            if_lost()
            return
        experts, call_ids = zip(*calls, strict=True)
        request = pb.ForgetRequest(client_id=client_id, experts=experts, call_ids=call_ids)
        self._channel(address).tell("Forget", request, if_lost)

    def deliver(self, rpc: str, jobs: Sequence[Job], operation: Operation, failures: Failures | None) -> None:
        """Send each job to its address until it has its final outcome, or `failures` gives up on it.

        Jobs that have failed already stay as they are.
        """
        with attended(rpc, jobs, failures, operation.cancellation):
            to_send = [job for job in jobs if job.outcome.error is None]

            def at(_: str, own: list[Job]) -> None:
                self._deliver_from(rpc, own, operation)

            values_or_raise(self._fanout.at_each(by_address(to_send), at, operation.cancellation))
        self.finding.meet_strangers(operation)
        for job in jobs:
            if isinstance(job.outcome.error, InvalidCallError):
                say_more(job.outcome.error, self.finding.changes_of(job.request.expert))

    def _deliver_from(self, rpc: str, jobs: Sequence[Job], operation: Operation) -> None:
        attempts = Attempts(self.settings.retry, self._budget, operation.deadline)
        lost: Mapping[str, Exception] = {}
        if self.finding.is_lost(jobs[0].address):
            lost = self._find_anew(rpc, jobs, operation)
        while True:
            for address, group in by_address(jobs).items():
                if address in lost:
                    note_lost(group, rpc, operation, lost[address])
                else:
                    self._send(address, rpc, group, operation)
            jobs = self._to_repeat(jobs, attempts, lost, operation)
            errors = [job.outcome.error for job in jobs if job.outcome.error is not None]
            if not (errors and _pause(attempts, errors, operation)):
                for job in jobs:
                    job.request.on_settled(False)
                return
            lost = self._find_anew(rpc, jobs, operation)
            if not any(self.finding.is_lost(job.address) for job in jobs):
                attempts.note_there()

    def _to_repeat(
        self, jobs: Sequence[Job], attempts: Attempts, lost: Mapping[str, Exception], operation: Operation
    ) -> list[Job]:
        """Return the jobs that may go better the next time; the others are settled."""
        repeated = []
        for job in jobs:
            if job.outcome.error is None:
                continue
            names = [job.request.expert]
            if self._is_looked_for(job.outcome.error, names, attempts):
                repeated.append(job)
                continue
            error = job.outcome.error = self.finding.as_lost(job.outcome.error, names)
            is_gone = isinstance(error, ServerUnavailableError) and (
                job.address in lost or attempts.num_retries
            )
            if is_gone and not job.is_needed():
                error.add_note("Not waited for: every token has enough other experts.")
            elif self._is_worth_retrying(
                error, job.address, operation, was_answered=job.outcome.was_answered
            ):
                repeated.append(job)
                continue
            job.request.on_settled(False)
        return repeated

    def _send(self, address: str, rpc: str, jobs: Sequence[Job], operation: Operation) -> None:
        requests = [job.request for job in jobs]
        elsewhere = self._elsewhere(address, rpc, jobs)
        if self._hedging is not None and any(elsewhere):
            results = self._hedging.send(address, requests, elsewhere, operation)
            for job, result in zip(jobs, results, strict=True):
                job.address, job.outcome = result
            return
        outcomes = exchange(self._channel(address), rpc, requests, operation)
        for job, outcome in zip(jobs, outcomes, strict=True):
            job.outcome = outcome
        if not operation.cancellation.is_cancelled:  # else it has failed here, and not there
            self._note_outcomes(address, outcomes)

    def _elsewhere(self, address: str, rpc: str, jobs: Sequence[Job]) -> list[str | None]:
        """Return for each job another server that may be asked too; for changes there is none."""
        if self._hedging is None or rpc != "Forward":
            return []
        return [
            next(
                (host for host in self.finding.placement.hosts_of(job.request.expert) if host != address),
                None,
            )
            for job in jobs
        ]

    def _is_looked_for(self, error: RemoteError, names: Collection[str], attempts: Attempts) -> bool:
        """Tell whether experts that a server does not host may have moved; one look tells."""
        is_first = isinstance(error, ExpertNotFoundError) and attempts.num_retries == 0
        return is_first and self.finding.servers.may_change and self.finding.is_worth_looking(names)

    def _is_worth_retrying(
        self, error: RemoteError, address: str, operation: Operation, *, was_answered: bool
    ) -> bool:
        has_new_token = self._channel(address).token.is_renewed_since(operation.deadline.started_at)
        return is_worth_retrying(error, was_answered=was_answered, has_new_token=has_new_token)

    def _find_anew(self, rpc: str, jobs: Sequence[Job], operation: Operation) -> Mapping[str, Exception]:
        """Choose where jobs go next; return the servers that are lost, and why."""
        placement = self.finding.placement
        lost: Mapping[str, Exception] = {}
        if self.finding.servers.may_change or any(self.finding.is_lost(job.address) for job in jobs):
            lost = self.finding.look_briefly(operation)
        for job in jobs:
            name = job.request.expert
            if job.is_training:
                job.move_to(self.finding.home_of(name))
                continue
            if rpc == "Forward":
                hosts = placement.hosts_of(name)
            else:
                hosts = placement.moved_to(name, job.address, job.request.replica)
            if hosts:
                job.move_to(hosts[0])
        return lost

    # ---- everything else

    def at_each(
        self,
        rpc: str,
        work: Mapping[str, NamesT],
        once: Callable[[Channel, NamesT, Operation], R],
        operation: Operation,
        moved: Callable[[str, NamesT], Mapping[str, NamesT]],
        failures: list[RemoteError] | None = None,
        is_patient: Callable[[NamesT], bool] = lambda own: True,
    ) -> list[R]:
        """Call `once`, which is short and may be repeated, at each address until it succeeds or fails for good.

        Args:
            rpc: what it is, for errors.
            work: for each address; of these experts.
            once: does it.
            operation: that it is a part of.
            moved: given an address that is lost, or hosts an expert no longer, and its work, returns where parts of it
                go now; empty to stay.
            failures: takes those that another attempt may mend, instead of raising them; and a server that is lost is
                not waited for. Not those of an operation that nobody waits for.
            is_patient: tells whether work is worth more than one attempt.

        Returns:
            What each returned; the first failure is raised, after all have come to rest.
        """
        errand = _Errand(rpc, once, operation, moved, is_patient, goes_on=failures is not None)
        outcomes = self._fanout.at_each(work, partial(self._until_done, errand), operation.cancellation)
        if failures is not None and not operation.cancellation.is_unwanted:
            errors = {address: error for address, error in outcomes.items() if _may_be_mended(error)}
            failures += [cast(RemoteError, error) for error in errors.values()]
            outcomes = {address: own for address, own in outcomes.items() if address not in errors}
        return [result for own in values_or_raise(outcomes) for result in own]

    def _until_done(self, errand: _Errand[NamesT, R], address: str, own: NamesT) -> list[R]:
        operation = errand.operation
        attempts = Attempts(self.settings.retry, self._budget, operation.deadline)
        lost: Mapping[str, Exception] = {}
        may_have_moved = self.finding.is_lost(address)
        while True:
            if may_have_moved:
                lost = self.finding.look_briefly(operation)
                if parts := errand.moved(address, own):
                    there = partial(self._until_done, errand)
                    ended = {new: attempt(there, new, part) for new, part in parts.items()}
                    return [result for part in values_or_raise(ended) for result in part]
                if not self.finding.is_lost(address):
                    attempts.note_there()
            try:
                if address in lost:
                    raise error_of_lost(operation.place(f"server at {address}", errand.rpc), lost[address])
                return [errand.once(self._channel(address), own, operation)]
            except RemoteError as error:
                if isinstance(error, ServerUnavailableError) and not operation.cancellation.is_cancelled:
                    # else the next operation would not look for it
                    self.finding.placement.note_failure(address)
                is_looked_for = self._is_looked_for(error, own, attempts)
                error = error if is_looked_for else self.finding.as_lost(error, own)
                is_lost = isinstance(error, ServerUnavailableError)
                is_gone = is_lost and (address in lost or attempts.num_retries > 0)
                is_given_up = not errand.is_patient(own) or (is_gone and errand.goes_on)
                may_pass = is_looked_for or (self._may_pass(error, address, operation) and not is_given_up)
                if not (may_pass and _pause(attempts, [error], operation)):
                    raise error
                may_have_moved = is_lost or is_looked_for

    def _may_pass(self, error: RemoteError, address: str, operation: Operation) -> bool:
        """Tell whether another attempt may do; the deadline that is over may be that of this attempt only."""
        if isinstance(error, DeadlineExceededError):
            return True
        return self._is_worth_retrying(error, address, operation, was_answered=False)

    def close(self) -> None:
        """Cancel what is under way and disconnect from all servers. In a forked child: nothing to do."""
        if not self.operations.is_here:
            return
        with interrupts_held_back():  # or some would stay open
            self.operations.close()
            self.finding.servers.close()
            self._fanout.close()
            self.finding.close()
            if self._hedging is not None:
                self._hedging.close()


def _pause(attempts: Attempts, errors: Sequence[RemoteError], operation: Operation) -> bool:
    """Wait before what failed is tried again; return False at once if it should not be, and let its errors say why."""
    pause_s = attempts.pause_before_next(errors)
    if pause_s is not None and not operation.cancellation.wait(pause_s):
        return True
    if attempts.num_retries or attempts.is_out_of_budget:
        why = attempts.why_given_up or "the operation was cancelled"
        for error in errors:
            error.add_note(f"Given up after {attempts.num_retries} retries: {why}.")
    return False


def _may_be_mended(outcome: object) -> bool:
    """Tell whether this is a failure, and not one that would be the same at every attempt."""
    is_refused = isinstance(outcome, InvalidCallError | PermissionDeniedError)
    return isinstance(outcome, RemoteError) and not is_refused


def _note_outcomes(
    placement: Placement, budget: RetryBudget, address: str, outcomes: Sequence[Outcome]
) -> None:
    for outcome in outcomes:
        placement.note_answer(address, outcome.server)
    if any(isinstance(outcome.error, ServerUnavailableError) for outcome in outcomes):
        placement.note_failure(address)
    elif any(outcome.was_answered for outcome in outcomes):
        placement.note_success(address)
        budget.note_success()
