"""The rules of retrying: what is repeated, how long, and how much of it."""

from __future__ import annotations

import dataclasses
import math
import time

import pytest

from moe_autograd import errors
from moe_autograd.remote.deadline import Deadline
from moe_autograd.remote.retry import Attempts, RetryBudget, RetryPolicy, is_worth_retrying

GONE = errors.ServerUnavailableError("gone")
BUSY = errors.ServerBusyError("full")


def attempts(policy: RetryPolicy, timeout_s: float = 100.0) -> Attempts:
    return Attempts(policy, RetryBudget(policy), Deadline(timeout_s))


@pytest.mark.parametrize(
    ("error", "if_answered", "if_broken"),
    [
        (errors.ServerUnavailableError("x"), True, True),
        (errors.ServerBusyError("x"), True, True),
        (errors.CorruptDataError("x"), True, True),
        (errors.RemoteError("x"), False, True),
        (errors.InvalidCallError("x"), False, False),
        (errors.ExpertFailedError("x"), False, False),
        (errors.ExpertNotFoundError("x"), False, False),
        (errors.PermissionDeniedError("x"), False, False),
        (errors.DeadlineExceededError("x"), False, False),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else "",
)
def test_what_the_server_has_refused_is_not_repeated(error, if_answered, if_broken):
    assert is_worth_retrying(error, was_answered=True, has_new_token=False) is if_answered
    assert is_worth_retrying(error, was_answered=False, has_new_token=False) is if_broken


def test_a_token_that_was_refused_is_shown_again_where_it_is_another_one_now():
    refused = errors.PermissionDeniedError("x")
    assert is_worth_retrying(refused, was_answered=True, has_new_token=True)


def test_what_came_whole_and_is_refused_is_not_asked_for_again():
    too_large = errors.CorruptDataError("x")
    too_large.__cause__ = errors.InvalidCallError("a tensor of 8 GB")
    assert not is_worth_retrying(too_large, was_answered=False, has_new_token=False)


@pytest.mark.parametrize("name", [field.name for field in dataclasses.fields(RetryPolicy)])
def test_a_policy_takes_no_number_below_zero_nor_a_pause_or_an_attempt_of_no_time(name: str) -> None:
    for wrong in (-1, math.inf, math.nan, 10**400, True, "1", None):
        with pytest.raises(ValueError, match=f"expected {name} to be a finite .*number"):
            RetryPolicy(**{name: wrong})
    if name in ("patience_s", "max_retries", "budget", "budget_per_success"):
        assert getattr(RetryPolicy(**{name: 0}), name) == 0
    else:
        with pytest.raises(ValueError, match=f"expected {name} to be a finite number above 0, got 0"):
            RetryPolicy(**{name: 0})


def test_pauses_grow_up_to_the_longest_and_vary():
    trial = attempts(RetryPolicy(initial_pause_s=0.1, max_pause_s=0.8))
    pauses = [trial.pause_before_next([GONE]) for _ in range(8)]
    for pause, longest in zip(pauses, [0.1, 0.2, 0.4, 0.8, 0.8, 0.8, 0.8, 0.8], strict=True):
        assert pause is not None
        assert longest / 2 <= pause <= longest
    assert len(set(pauses[3:])) > 1
    assert trial.num_retries == 8


def test_however_many_there_are_they_grow_no_more():
    trial = attempts(RetryPolicy(patience_s=1e6), timeout_s=1e6)
    pauses = [trial.pause_before_next([GONE]) for _ in range(1200)]
    assert all(pause is not None and 0.25 <= pause <= 0.5 for pause in pauses[4:])


def test_a_servers_hint_is_honoured():
    assert (
        attempts(RetryPolicy()).pause_before_next([errors.ServerBusyError("full", retry_after_s=7.0)]) == 7.0
    )


def test_of_several_hints_the_longest_is_honoured():
    hints = [errors.ServerBusyError("full", retry_after_s=seconds) for seconds in (2.0, 7.0, 3.0)]
    assert attempts(RetryPolicy()).pause_before_next([GONE, *hints]) == 7.0


def test_where_some_servers_are_gone_and_others_busy_it_is_a_retry_and_takes_no_patience():
    trial = attempts(RetryPolicy(patience_s=0.0, max_retries=1))
    assert trial.pause_before_next([GONE, BUSY]) is not None
    assert trial.pause_before_next([BUSY, GONE]) is None
    assert trial.why_given_up == "connect's RetryPolicy has max_retries=1"


def test_without_patience_a_server_that_is_gone_is_not_waited_for():
    assert attempts(RetryPolicy(patience_s=0.0)).pause_before_next([GONE]) is None


def test_patience_begins_anew_when_a_server_was_there_in_between(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    trial = attempts(RetryPolicy(patience_s=10.0))
    for error in (GONE, BUSY, GONE):
        assert trial.pause_before_next([error]) is not None
        now[0] += 9.0
    now[0] += 1.0
    assert trial.pause_before_next([GONE]) is None
    assert trial.why_given_up.startswith("a server that is gone is waited for 10 s;")


def test_patience_counts_while_a_server_is_gone_and_ends_where_it_breaks_each_attempt(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    trial = attempts(RetryPolicy(patience_s=10.0), timeout_s=1000.0)
    for _ in range(10):
        assert trial.pause_before_next([GONE]) is not None
        now[0] += 1.0  # until it answers when it is asked
        trial.note_there()
        now[0] += 50.0  # until it breaks the next attempt
    assert trial.pause_before_next([GONE]) is None


def test_a_busy_server_is_tried_a_few_times():
    trial = attempts(RetryPolicy(max_retries=3))
    assert [trial.pause_before_next([BUSY]) is not None for _ in range(4)] == [True, True, True, False]


def test_nothing_is_tried_beyond_the_deadline():
    assert (
        attempts(RetryPolicy(initial_pause_s=9.0, max_pause_s=9.0), timeout_s=1.0).pause_before_next([GONE])
        is None
    )
    policy = RetryPolicy(initial_pause_s=9.0, max_pause_s=9.0)
    nearly_over = Deadline(100.0, started_at=time.monotonic() - 97.0)
    assert Attempts(policy, RetryBudget(policy), nearly_over).pause_before_next([GONE]) is None


def test_retries_share_a_budget_that_successes_refill():
    policy = RetryPolicy(budget=2.0, budget_per_success=0.5)
    budget = RetryBudget(policy)
    assert [budget.try_take() for _ in range(3)] == [True, True, False]
    budget.note_success()
    assert not budget.try_take()
    budget.note_success()
    assert budget.try_take()
    for _ in range(100):
        budget.note_success()
    assert repr(budget) == "RetryBudget(2.0 of 2.0)"


@pytest.mark.parametrize(
    "error",
    [GONE, errors.DeadlineExceededError("no answer yet"), errors.ExpertNotFoundError("it may have moved")],
    ids=lambda error: type(error).__name__,
)
def test_waiting_for_a_server_and_looking_for_an_expert_take_nothing_from_the_budget(error):
    policy = RetryPolicy(budget=1.0, max_retries=0)
    budget = RetryBudget(policy)
    trial = Attempts(policy, budget, Deadline(100.0))
    assert all(trial.pause_before_next([error]) is not None for _ in range(10))
    assert budget.try_take()


def test_a_renewed_token_takes_nothing_from_the_budget_and_is_shown_a_few_times():
    """A training ended though its token was renewed, once hedging had used up the budget."""
    policy = RetryPolicy(budget=1.0, max_retries=3)
    budget = RetryBudget(policy)
    trial = Attempts(policy, budget, Deadline(100.0))
    refused = [errors.PermissionDeniedError("another token")]
    assert [trial.pause_before_next(refused) is not None for _ in range(4)] == [True, True, True, False]
    assert trial.why_given_up == "connect's RetryPolicy has max_retries=3"
    assert budget.try_take()


@pytest.mark.parametrize(
    "others",
    [[], [GONE], [errors.PermissionDeniedError("another token")]],
    ids=["alone", "a server that is gone", "a token that is refused"],
)
def test_a_busy_server_takes_one_from_the_budget_whatever_fails_beside_it(others):
    policy = RetryPolicy(budget=1.0)
    trial = Attempts(policy, RetryBudget(policy), Deadline(100.0))
    assert [trial.pause_before_next([BUSY, *others]) is not None for _ in range(2)] == [True, False]
    assert trial.why_given_up.startswith("the budget of connect's RetryPolicy")
