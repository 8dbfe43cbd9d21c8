"""When a call that failed is made again: rules, a budget, and pauses.

1. A call is repeated only where that cannot change anything twice: a forward changes nothing, and a change
   carries a sequence number under which the server applies it once.
2. A server that is gone is waited for by those who need it, at most `patience_s`: trying costs it nothing. Times count
   in which it was gone, and not those between: one that answers when it is asked, and then breaks each attempt, is
   left when these times come to `patience_s` together.
3. A server that is busy, or an answer that arrived damaged, is tried again a few times, and all such retries of
   a connection share a budget: when many calls fail, retries don't multiply the load. An update that has had no
   answer yet waits in a queue, or is long: it is asked for again until the deadline. A token that was renewed is
   shown a few times too, and takes nothing from the budget: hedging may have used it up, and a refusal is no load.
4. What the server has looked at and refused is not repeated: it would be refused again. An expert that it
   does not host is looked for once, by each operation, and where nobody hosts it, seldom (see `finding`). But where
   servers are away its own may be one of them, whoever has its address meanwhile: then rule 2 holds.
5. Pauses grow, and vary at random, so that clients don't come back in step. A server's own hint is honoured.
"""

from __future__ import annotations

import dataclasses
import random
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from moe_autograd.errors import (
    CorruptDataError,
    DeadlineExceededError,
    ExpertNotFoundError,
    InvalidCallError,
    PermissionDeniedError,
    RemoteError,
    ServerBusyError,
    ServerUnavailableError,
)
from moe_autograd.remote.deadline import Deadline

_NOT_COUNTED = (DeadlineExceededError, ExpertNotFoundError, ServerUnavailableError)
_NO_LOAD = (*_NOT_COUNTED, PermissionDeniedError)
_MAY_BE_ZERO = ("patience_s", "budget", "budget_per_success")


@dataclass(frozen=True)
class RetryPolicy:
    """How stubborn a client is; an operation's deadline ends all of it.

    Args:
        patience_s: how long an operation waits for a server while it is gone. 0 raises at once.
        max_retries: of a call to a server that is busy, or whose answer was damaged.
        update_attempt_s: how long one attempt of an update may take; it is short, so no answer means it is lost.
        initial_pause_s: before the first retry; doubles from one to the next.
        max_pause_s: the longest.
        budget: how many retries a connection may have ahead of its successes.
        budget_per_success: how much of a retry each success gives back.

    Raises:
        ValueError: a number that is negative or not finite, or a time of zero other than `patience_s`.
    """

    patience_s: float = 10.0
    max_retries: int = 8
    update_attempt_s: float = 5.0
    initial_pause_s: float = 0.05
    max_pause_s: float = 0.5
    budget: float = 32.0
    budget_per_success: float = 0.1

    def __post_init__(self) -> None:
        for name, value in dataclasses.asdict(self).items():
            types, may_be_zero = (int, True) if name == "max_retries" else (int | float, name in _MAY_BE_ZERO)
            is_number = isinstance(value, types) and not isinstance(value, bool)
            # An int may be more than a float can hold.
            if not (is_number and 0 <= value <= sys.float_info.max) or (value == 0 and not may_be_zero):
                raise ValueError(
                    f"RetryPolicy: expected {name} to be a finite {'whole ' * (types is int)}number "
                    f"{'of at least' if may_be_zero else 'above'} 0, got {value!r}. Leave it out for the default."
                )


class RetryBudget:
    """The retries that all operations of a connection share (rule 3). Threads: any; one lock."""

    def __init__(self, policy: RetryPolicy) -> None:
        self._policy = policy
        self._lock = threading.RLock()  # a handler of a signal that makes calls takes it again
        self._left = policy.budget

    def try_take(self) -> bool:
        """Take one retry; return False if there is none left."""
        with self._lock:
            if self._left < 1:
                return False
            self._left -= 1
            return True

    def note_success(self) -> None:
        """Give back a part of a retry."""
        with self._lock:
            self._left = min(self._policy.budget, self._left + self._policy.budget_per_success)

    def __repr__(self) -> str:
        return f"RetryBudget({self._left:.1f} of {self._policy.budget:.1f})"


class Attempts:
    """The attempts of one operation at one server.

    Args:
        policy: the rules' numbers.
        budget: shared with others.
        deadline: of the operation.
    """

    def __init__(self, policy: RetryPolicy, budget: RetryBudget, deadline: Deadline) -> None:
        self.num_retries = 0
        self.why_given_up = ""  # and what to do, once `pause_before_next` has returned None
        self.is_out_of_budget = False  # that is why
        self._policy = policy
        self._budget = budget
        self._deadline = deadline
        self._num_others = 0
        self._gone_s = 0.0  # in outages that are over, since it answered an attempt
        self._gone_since: float | None = None

    def note_there(self) -> None:
        """Let patience rest: the server answers when it is asked. The attempt may still fail."""
        if self._gone_since is not None:
            self._gone_s += time.monotonic() - self._gone_since
            self._gone_since = None

    def pause_before_next(self, errors: Sequence[RemoteError]) -> float | None:
        """Return how long to wait before what failed is tried again, or None if it should not be.

        Args:
            errors: of the calls that could be tried again; at least one.
        """
        self.why_given_up = self._why_not_again(errors)
        pause_s = max(self._own_pause_s(), *(_hint_s(error) for error in errors))
        if not self.why_given_up and pause_s >= self._deadline.remaining_s:
            self.why_given_up = "the deadline would be over; connect(..., timeout_s=...) sets it"
        if self.why_given_up:
            return None
        self.num_retries += 1
        return pause_s

    def _why_not_again(self, errors: Sequence[RemoteError]) -> str:
        """Return which number of the policy forbids another attempt; "" if none does."""
        patience_s, most = self._policy.patience_s, self._policy.max_retries
        if all(isinstance(error, ServerUnavailableError) for error in errors):
            now = time.monotonic()
            self._gone_since = self._gone_since or now
            if self._gone_s + now - self._gone_since >= patience_s:
                longer = "connect(..., retry=RetryPolicy(patience_s=...)) waits longer"
                return f"a server that is gone is waited for {patience_s:g} s; {longer}"
        else:
            self._gone_s, self._gone_since = 0.0, None
        if not all(isinstance(error, _NOT_COUNTED) for error in errors):
            self._num_others += 1
            if self._num_others > most:
                return f"connect's RetryPolicy has max_retries={most}"
            is_load = not all(isinstance(error, _NO_LOAD) for error in errors)
            if is_load and not self._budget.try_take():
                self.is_out_of_budget = True
                return "the budget of connect's RetryPolicy, which all calls share, is used up"
        return ""

    def _own_pause_s(self) -> float:
        grown = self._policy.initial_pause_s * 2.0 ** min(self.num_retries, 30)
        return min(self._policy.max_pause_s, grown) * random.uniform(0.5, 1.0)


def is_worth_retrying(error: RemoteError, *, was_answered: bool, has_new_token: bool) -> bool:
    """Tell whether a call that failed so may be made again (rule 4).

    Args:
        error: what became of it.
        was_answered: whether the server answered this very call, and not only the connection broke.
        has_new_token: whether the client shows another token now than when the operation began.
    """
    if isinstance(error, PermissionDeniedError):
        return has_new_token
    if isinstance(error, CorruptDataError):
        # What came whole and is refused, as too large a tensor, will come again.
        return not isinstance(error.__cause__, InvalidCallError)
    if isinstance(error, ServerUnavailableError | ServerBusyError):
        return True
    return type(error) is RemoteError and not was_answered


def _hint_s(error: RemoteError) -> float:
    return (error.retry_after_s or 0.0) if isinstance(error, ServerBusyError) else 0.0
