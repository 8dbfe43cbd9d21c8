"""Calls on their way: where each goes, what has become of it, and who is told.

Threads: each job is worked on by one at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from moe_autograd._contexts import contextmanager
from moe_autograd.autograd.grouping import Attendance, CallFailure, Failures
from moe_autograd.errors import RemoteError, ServerUnavailableError
from moe_autograd.remote.calls import Outcome, Request
from moe_autograd.remote.cancelling import Cancellation
from moe_autograd.remote.fanout import raise_first
from moe_autograd.remote.operations import Operation

_NOT_YET = Outcome()  # shared: what becomes of a job takes its place


@dataclass(slots=True)
class Job:
    """A call on its way.

    Args:
        request: what is sent.
        address: where it goes, or went.
        outcome: what has become of it.
        index: of the call in its pass.
        is_needed: whether its server is waited for if that is lost.
        is_training: of a forward: whether it is one of a training, which goes to no replica.
    """

    request: Request
    address: str
    outcome: Outcome = field(default_factory=lambda: _NOT_YET)
    index: int = 0
    is_needed: Callable[[], bool] = lambda: True
    is_training: bool = False

    def move_to(self, address: str) -> None:
        """Let it go there next."""
        self.request.asked.add(self.address)
        self.address = address


def attended(
    rpc: str, jobs: Sequence[Job], failures: Failures | None, cancellation: Cancellation
) -> AbstractContextManager[None]:
    """Tell whoever keeps attendance of each job that is settled, and cancel the rest when it gives them up."""
    if failures is None or isinstance(failures, list):
        return nullcontext()
    return _attended(rpc, jobs, failures, cancellation)


@contextmanager
def _attended(
    rpc: str, jobs: Sequence[Job], attendance: Attendance, cancellation: Cancellation
) -> Iterator[None]:
    with attendance.waiting(rpc.lower(), cancellation.cancel) as roll:
        for job in jobs:
            job.request.on_settled = functools.partial(roll.settle, job.index)
            job.is_needed = functools.partial(roll.is_needed, job.index)
            if job.outcome.error is not None:
                job.request.on_settled(False)
        yield


def note_lost(jobs: Sequence[Job], rpc: str, operation: Operation, reason: Exception) -> None:
    """Let jobs fail since their server is lost; `reason` says why."""
    for job in jobs:
        place = operation.place(f"expert {job.request.expert!r} at {job.address}", rpc)
        job.outcome = Outcome(error=error_of_lost(place, reason), was_answered=False)


def note_failures(jobs: Sequence[Job], phase: str, failures: Failures | None) -> None:
    """Raise the first failure, or, where the user wants a list of them, add all to it."""
    if failures is None:
        errors = [job.outcome.error for job in jobs if job.outcome.error]
        if errors:
            _forget_outcomes(jobs)
        raise_first(errors, "calls of this pass")
        return
    try:
        for job in jobs:
            if job.outcome.error:
                failures.append(CallFailure(job.index, job.request.expert, phase, job.outcome.error))
    except BaseException:  # whoever keeps attendance may raise it
        _forget_outcomes(jobs)
        raise


def raise_if_unwanted(jobs: Sequence[Job], phase: str, cancellation: Cancellation) -> None:
    """Raise the first failure of a pass that nobody waits for any more, whoever would go on without servers."""
    if cancellation.is_unwanted:
        note_failures(jobs, phase, None)


def _forget_outcomes(jobs: Sequence[Job]) -> None:
    """Let jobs whose error is raised forget it: the traceback knows them, and the exception must not hold itself."""
    for job in jobs:
        job.outcome = _NOT_YET


def error_of_lost(place: str, reason: Exception) -> ServerUnavailableError:
    """Return the error of what was asked of a lost server."""
    error = ServerUnavailableError(f"{place}: expected a server that answers, got none: {reason}")
    error.__cause__ = reason
    return error


def say_more(error: RemoteError, sentence: str) -> None:
    """Add a sentence to what an error says."""
    if sentence:
        error.args = (f"{error} {sentence}",)


def by_address(jobs: Sequence[Job]) -> dict[str, list[Job]]:
    """Return the jobs by where they go."""
    grouped: dict[str, list[Job]] = {}
    for job in jobs:
        grouped.setdefault(job.address, []).append(job)
    return grouped
