"""The parts of a layer that goes on without experts: who is left alone, who is waited for, and with which weights."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
import torch

from moe_autograd import errors
from moe_autograd.moe import failures, stragglers
from moe_autograd.moe.dispatch import combine, dispatch, plan_dispatch, renormalize, select
from moe_autograd.moe.failures import ExpertFailure, Rests, may_be_left_out
from moe_autograd.moe.stragglers import Wait

# ---- what may be left out


@pytest.mark.parametrize(
    "error",
    [
        errors.RemoteError,
        *errors.RemoteError.__subclasses__(),
        errors.StragglerError,
        ConnectionError,
        TimeoutError,
    ],
)
def test_what_comes_between_layer_and_expert_may_be_left_out_but_not_what_the_caller_did_wrong(error):
    is_callers_fault = error in (errors.InvalidCallError, errors.PermissionDeniedError)
    assert may_be_left_out(error("told to")) != is_callers_fault


@pytest.mark.parametrize(
    "error", [ValueError, RuntimeError, OSError, KeyboardInterrupt, errors.CheckpointError]
)
def test_what_a_program_did_wrong_may_not(error):
    assert not may_be_left_out(error("told to"))


def test_a_failure_reads_as_expert_phase_and_reason():
    assert (
        str(ExpertFailure(3, "ffn.3", "backward", "TimeoutError: late"))
        == "'ffn.3', backward: TimeoutError: late"
    )


# ---- leaving alone


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now_s=100.0)
    clock.monotonic = lambda: clock.now_s
    monkeypatch.setattr(failures, "time", clock)
    return clock


def length_of_rest(rests: Rests, clock: SimpleNamespace) -> float:
    """Return how long expert 0 is left alone from now on; the clock is behind that then."""
    began_s = clock.now_s
    while 0 in rests.resting():
        clock.now_s += 0.125
    return clock.now_s - began_s


def test_rests_double_up_to_half_a_minute(clock):
    rests, lengths = Rests(), []
    for _ in range(9):
        rests.note_failure(0, "gone")
        lengths.append(length_of_rest(rests, clock))
    assert lengths == [0.5, 1, 2, 4, 8, 16, 30, 30, 30]


def test_failures_within_one_rest_count_once(clock):
    rests = Rests()
    for _ in range(5):
        rests.note_failure(0, "gone")
    assert length_of_rest(rests, clock) == 0.5


def test_an_expert_that_has_worked_for_long_begins_anew(clock):
    rests = Rests()
    for _ in range(4):
        rests.note_failure(0, "gone")
        length_of_rest(rests, clock)
    clock.now_s += 30
    rests.note_failure(0, "gone")
    assert length_of_rest(rests, clock) == 0.5


def test_a_rest_tells_for_how_long_and_why(clock):
    rests = Rests()
    rests.note_failure(2, "ServerUnavailableError: gone")
    clock.now_s += 0.1
    assert rests.resting() == {
        2: "left alone for another 0.4 s, since it failed: ServerUnavailableError: gone"
    }
    assert repr(rests) == "Rests([2])"


# ---- waiting


class Timer:
    """Stands for `threading.Timer`; rings when the test says so."""

    made: list[Timer]

    def __init__(self, interval_s, function):
        self.interval_s, self.ring = interval_s, function
        self.is_started = self.is_cancelled = False
        self.made.append(self)

    def start(self):
        self.is_started = True

    def cancel(self):
        self.is_cancelled = True


@pytest.fixture
def timers(monkeypatch):
    Timer.made = []
    monkeypatch.setattr(stragglers, "threading", SimpleNamespace(Timer=Timer, Lock=threading.Lock))
    return Timer.made


def wait_for(*tokens_of: list[int], min_experts: int = 1) -> Wait:
    return Wait({call: torch.tensor(own) for call, own in enumerate(tokens_of)}, min_experts, timeout_s=0.25)


def test_the_clock_starts_when_every_token_has_enough(timers):
    wait = wait_for([0, 1], [1, 2], [0, 2])
    wait.settle(0, True)
    assert not timers
    wait.settle(1, True)
    assert [(timer.interval_s, timer.is_started) for timer in timers] == [(0.25, True)]


def test_more_experts_may_be_needed(timers):
    wait = wait_for([0, 1], [0, 1], [0, 1], min_experts=2)
    wait.settle(2, True)
    assert not timers
    wait.settle(0, True)
    assert len(timers) == 1


def test_a_token_has_no_more_experts_than_it_has(timers):
    wait = wait_for([0], [0, 1], [0, 1], min_experts=2)
    wait.settle(1, True)
    wait.settle(2, True)
    assert len(timers) == 1


def test_a_token_that_cannot_get_enough_any_more_is_not_waited_for(timers):
    wait = wait_for([0], [1], [1])
    wait.settle(0, False)
    assert not timers
    wait.settle(1, True)
    assert len(timers) == 1


def test_a_token_that_can_just_get_enough_is_waited_for(timers):
    wait = wait_for([0], [1])
    wait.settle(1, True)
    assert not timers
    assert wait.is_needed(0)


def test_when_all_have_settled_the_clock_is_stopped_and_none_is_started(timers):
    wait = wait_for([0], [0])
    wait.settle(0, True)
    wait.settle(1, True)
    assert [timer.is_cancelled for timer in timers] == [True]
    wait_for([0]).settle(0, True)
    assert len(timers) == 1


def test_when_nobody_waits_any_more_the_clock_is_stopped_and_none_is_started(timers):
    wait = wait_for([0], [0])
    wait.settle(0, True)
    wait.end()
    assert [timer.is_cancelled for timer in timers] == [True]
    wait = wait_for([0], [0])
    wait.end()
    wait.settle(0, True)
    assert len(timers) == 1


def test_to_settle_twice_is_to_settle_once(timers):
    wait = wait_for([0], [0], [0], min_experts=2)
    wait.settle(0, True)
    wait.settle(0, True)
    assert not timers
    wait = wait_for([0], [0], [0], min_experts=2)
    for is_answered in (False, True):
        wait.settle(0, is_answered)
    wait.settle(1, True)
    assert not timers


def test_the_clock_is_started_once(timers):
    wait = wait_for([0], [0], [0])
    wait.settle(0, True)
    wait.settle(1, True)
    assert len(timers) == 1


def test_when_it_rings_those_who_wait_are_told_why_and_those_who_come_later_too(timers):
    told = []
    wait = wait_for([0], [0])
    wait.settle(0, True)
    with (
        wait.waiting(lambda reason: told.append(("first", reason))),
        wait.waiting(lambda reason: told.append(("second", reason))),
    ):
        with wait.waiting(lambda reason: told.append(("over", reason))):
            pass
        timers[0].ring()
        with wait.waiting(lambda reason: told.append(("late", reason))):
            pass
    reason = "given up 0.25 s after every token had what it needs (min_experts=1, timeout_after_min_s=0.25)"
    assert told == [("first", reason), ("second", reason), ("late", reason)]


def test_a_call_is_needed_as_long_as_a_token_that_can_get_enough_has_not():
    wait = wait_for([0, 1], [1, 2], [0, 2])
    assert wait.is_needed(0)
    wait.settle(1, True)
    assert wait.is_needed(0)  # token 0 has nobody yet
    wait.settle(2, True)
    assert not wait.is_needed(0)


def test_a_call_is_not_needed_by_a_token_that_cannot_get_enough_with_it():
    wait = wait_for([0], [0], min_experts=2)
    wait.settle(1, False)
    assert not wait.is_needed(0)


# ---- weights


def test_choices_left_out_are_not_dispatched_and_not_combined():
    expert_index = torch.tensor([[0, 1], [2, 0], [1, 2], [0, 2]])
    plan = plan_dispatch(expert_index, torch.bincount(expert_index.flatten()))
    is_kept = (expert_index != 0) & (torch.arange(4) != 2).unsqueeze(1)
    kept, is_kept_N = select(plan, is_kept)
    assert (kept.active, kept.counts) == ((1, 2), (1, 2))
    x = torch.randn(4, 3)
    rows = torch.cat(dispatch(x, plan))[is_kept_N]
    assert torch.equal(rows, torch.cat(dispatch(x, kept)))
    weights = torch.rand(4, 2)
    expected = (weights * is_kept).sum(dim=1, keepdim=True) * x
    torch.testing.assert_close(combine([rows], weights, kept), expected)


def test_all_choices_may_be_left_out():
    expert_index = torch.tensor([[0, 1]])
    plan = plan_dispatch(expert_index, torch.tensor([1, 1]))
    nothing, is_kept_N = select(plan, torch.zeros(1, 2, dtype=torch.bool))
    assert (nothing.active, nothing.counts, is_kept_N.tolist()) == ((), (), [False, False])
    assert select(nothing, torch.zeros(1, 2, dtype=torch.bool))[0].active == ()


@pytest.mark.parametrize("sign", [1, -1])
def test_weights_of_those_that_are_kept_keep_their_proportions_and_their_sum(sign):
    weights = sign * torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.2, 0.3]])
    is_kept = torch.tensor([[True, False, True], [False, True, True]])
    expected = sign * torch.tensor([[5 / 7, 0, 2 / 7], [0, 0.24, 0.36]])
    torch.testing.assert_close(renormalize(weights, is_kept), expected)


def test_a_row_without_losses_is_as_it_was_to_the_last_bit():
    weights = torch.rand(50, 3)
    assert torch.equal(renormalize(weights, torch.ones(50, 3, dtype=torch.bool)), weights)


def test_the_only_expert_that_is_left_takes_all_even_if_its_weight_was_zero():
    shares = renormalize(torch.tensor([[0.75, 0.0]]), torch.tensor([[False, True]]))
    assert shares.tolist() == [[0.0, 0.75]]


@pytest.mark.parametrize("small", [0.0, 1e-45, 1e-38])
def test_weights_too_small_to_divide_by_give_even_shares_and_finite_gradients(small):
    weights = torch.tensor([[1.0, small, small]], requires_grad=True)
    shares = renormalize(weights, torch.tensor([[False, True, True]]))
    torch.testing.assert_close(shares, torch.tensor([[0.0, 0.5, 0.5]]))
    shares[0, 1].backward()
    assert weights.grad.isfinite().all()


def test_a_row_that_keeps_nothing_is_zero_and_so_are_its_gradients():
    weights = torch.rand(2, 2, requires_grad=True)
    shares = renormalize(weights, torch.zeros(2, 2, dtype=torch.bool))
    shares.sum().backward()
    assert shares.abs().sum() == weights.grad.abs().sum() == 0


def test_the_gradients_of_renormalized_weights_are_exact():
    weights = torch.rand(4, 3, dtype=torch.float64, requires_grad=True)
    is_kept = torch.tensor([[True, True, True], [True, False, True], [False, True, False], [False] * 3])
    assert torch.autograd.gradcheck(lambda w: renormalize(w, is_kept), weights)
