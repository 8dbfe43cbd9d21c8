"""Call experts of which some may fail: who answers, who fails, and who is not waited for any longer.

An expert on a server is called through its group, which notes failures by itself (`grouping.Attendance`). One that
runs here is called by a `_LocalCall`; it can be kept from beginning, but not be cancelled once it runs. Offloaded ones
have a group that leaves out nobody: they have answered when it returns.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeGuard

from torch import Tensor, nn

from moe_autograd._contexts import contextmanager
from moe_autograd.autograd.grouping import (
    CallFailure,
    CallGroup,
    LenientCallGroup,
    group_of,
    recomputed_in_group,
)
from moe_autograd.autograd.parallel import parallel_apply
from moe_autograd.autograd.recompute import Recompute, as_recompute
from moe_autograd.autograd.this_backward import kept_by_this_backward, this_backward
from moe_autograd.autograd.uncompiled import uncompiled
from moe_autograd.errors import StragglerError
from moe_autograd.moe.dispatch import DispatchPlan
from moe_autograd.moe.failures import ExpertFailure, Rests, Tolerance, may_be_left_out
from moe_autograd.moe.stragglers import Wait

# The last backward here that has come to a layer: workers that run a part of it have backwards of their own.
_BACKWARD: ContextVar[int] = ContextVar("moe_autograd.moe.backward", default=-1)


class Attendance:
    """Of one forward of a layer, and of its backwards.

    Args:
        experts: those that are called; everybody here knows them by their position among these.
        plan: says for each its place in the layer, and its tokens.
        failures: where those that fail are noted: `routing.failures`.
        rests: likewise, for the passes to come.
        tolerance: of the layer.

    Threads: calls note on any what becomes of them.
    """

    def __init__(
        self,
        experts: Sequence[nn.Module],
        plan: DispatchPlan,
        failures: list[ExpertFailure],
        rests: Rests,
        tolerance: Tolerance,
    ) -> None:
        self.lost: set[int] = set()  # positions, in the forward
        self._first_error: Exception | None = None
        self._experts = experts
        self._plan = plan
        self._failures = failures
        self._rests = rests
        self._tolerance = tolerance
        self._waits: dict[str, Wait] = {}  # by phase, the last one
        self._waits_of: dict[int, Wait] = {}  # by backward: threads may go through one pass side by side

    def call(
        self, slices: Sequence[Tensor], *, max_concurrency: int | None, recompute: bool | Recompute
    ) -> list[Tensor]:
        """Call each expert with its tokens; return its output, or anything where it was lost."""
        wait = self._start_wait("forward", range(len(self._experts)))
        how = as_recompute(recompute)
        groups: dict[int, _Group] = {}
        calls: list[Any] = []
        for position, expert in enumerate(self._experts):
            group = group_of(expert)
            if group is None:
                calls.append(_LocalCall(self, expert, position, how))
                continue
            called = expert if how is None else recomputed_in_group(expert, how)
            calls.append(_Member(groups.setdefault(id(group), _Group(group, self)), called, position))
        try:
            return parallel_apply(
                calls,
                [(tokens,) for tokens in slices],
                max_concurrency=max_concurrency,
                names=[f"expert {index}" for index in self._plan.active],
            )
        finally:
            wait.end()

    @property
    def has_clock(self) -> bool:
        """Whether those who come late are left out."""
        return self._tolerance.timeout_after_min_s is not None

    def follow_backwards_of(self, y: Tensor) -> None:
        """Know in each backward from `y`, too, who is waited for.

        Only among experts on servers: of others nobody knows here when they are done.
        """
        remote = [
            position
            for position, expert in enumerate(self._experts)
            if position not in self.lost and _is_lenient(group_of(expert))
        ]
        if y.requires_grad:
            y.register_hook(lambda _: self._begin_backward(remote))

    @uncompiled
    def _begin_backward(self, positions: Sequence[int]) -> None:
        wait = self._start_wait("backward", positions)
        number = this_backward()
        _BACKWARD.set(number)
        self._waits_of[number] = wait
        kept_by_this_backward(wait, functools.partial(_EndsWithBackward, wait, self._waits_of, number))

    def _start_wait(self, phase: str, positions: Sequence[int]) -> Wait:
        tokens = self._plan.token_index.split(list(self._plan.counts))
        tokens_of = {position: tokens[position] for position in positions}
        tolerance = self._tolerance
        wait = Wait(tokens_of, tolerance.min_experts, tolerance.timeout_after_min_s)
        self._waits[phase] = wait
        return wait

    def wait_in(self, phase: str) -> Wait:
        """Return who knows which calls are still waited for."""
        own = (self._waits_of.get(number) for number in (this_backward(), _BACKWARD.get()))
        of_backward = None if phase == "forward" else next((wait for wait in own if wait is not None), None)
        return self._waits[phase] if of_backward is None else of_backward

    def needs(self, wait: Wait, position: int) -> bool:
        """Tell whether a call is waited for whose server is gone: not where zeros will do (Rule 2 of `partial`)."""
        return not self._tolerance.allow_zero_outputs and wait.is_needed(position)

    def note_failure(self, position: int, phase: str, error: Exception) -> None:
        """Leave a call out; raises the error if it must not be left out."""
        if not may_be_left_out(error):
            try:
                raise error
            finally:
                del error  # this frame is in the traceback: the exception must not hold itself
        if phase == "forward":
            self.lost.add(position)
            self._first_error = self._first_error or error
        index = self._plan.active[position]
        reason = " ".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
        self._failures.append(ExpertFailure(index, name_of(self._experts[position], index), phase, reason))
        self._rests.note_failure(index, reason)

    def take_first_error(self) -> Exception | None:
        """Return what the forward lost an expert by, and forget it: its traceback leads back to this pass."""
        error, self._first_error = self._first_error, None
        return error


class _EndsWithBackward:
    """Ends a wait once the backward that holds this is over, however it ends."""

    def __init__(self, wait: Wait, waits_of: dict[int, Wait], number: int) -> None:
        self._wait, self._waits_of, self._number = wait, waits_of, number

    def __del__(self) -> None:
        self._waits_of.pop(self._number, None)
        self._wait.end()


def _is_lenient(group: CallGroup | None) -> TypeGuard[LenientCallGroup]:
    return getattr(group, "can_leave_out", False)


def name_of(expert: nn.Module, expert_index: int) -> str:
    """Return what an expert is called on its server, or else its place in the layer."""
    name = getattr(expert, "name", None) if hasattr(expert, "call_group") else None
    return name if isinstance(name, str) else f"expert {expert_index}"


class _LocalCall(nn.Module):
    """An expert that runs here, in one pass; a module, so that the map finds the tensors that the expert holds."""

    def __init__(
        self, attendance: Attendance, expert: nn.Module, position: int, recompute: Recompute | None
    ) -> None:
        super().__init__()
        self.expert = expert
        self.__qualname__ = type(expert).__qualname__  # what errors call it
        self._attendance = attendance
        self._position = position
        self._recompute = recompute

    def forward(self, tokens: Tensor) -> Any:
        wait = self._attendance.wait_in("forward")
        try:
            if wait.reason:
                raise StragglerError(f"expected to begin in time, got there late: {wait.reason}")
            return self.expert(tokens) if self._recompute is None else self._recompute(self.expert, tokens)
        except Exception as error:
            self._attendance.note_failure(self._position, "forward", error)
            return None
        finally:
            wait.settle(self._position, is_answered=self._position not in self._attendance.lost)

    def only_computes(self) -> bool:
        """Tell whether nothing but its expert counts, so that it may be called in turn; see `in_turn`.

        With a clock it counts how many calls are before it.
        """
        return self._recompute is None and not self._attendance.has_clock

    def leaves_out(self, error: Exception) -> bool:
        """Tell whether a backward that failed so is left out, and note it; see `grouping`."""
        if not may_be_left_out(error):
            return False
        self._attendance.note_failure(self._position, "backward", error)
        return True


class _Group:
    """The group of some experts, in one pass: it leaves out who fails, or else notes when all have answered."""

    def __init__(self, group: CallGroup, attendance: Attendance) -> None:
        self._group = group
        self._attendance = attendance

    def call_together(
        self, modules: Sequence[_Member], inputs: Sequence[tuple[Any, ...]], kwargs: Sequence[dict[str, Any]]
    ) -> Sequence[Any]:
        experts = [member.expert for member in modules]
        if _is_lenient(self._group):
            own = _GroupAttendance(self._attendance, [member.position for member in modules])
            return self._group.call_together(experts, inputs, kwargs, failures=own)
        returned = self._group.call_together(experts, inputs, kwargs)
        for member in modules:
            self._attendance.wait_in("forward").settle(member.position, is_answered=True)
        return returned


class _Member:
    """An expert of such a group; only its group calls it."""

    def __init__(self, call_group: _Group, expert: nn.Module, position: int) -> None:
        self.call_group, self.expert, self.position = call_group, expert, position
        self.__qualname__ = type(expert).__qualname__  # what errors call it

    @property
    def stands_for(self) -> Any:
        """The module of an offloaded expert; see there."""
        return getattr(self.expert, "stands_for", None)


@dataclass(frozen=True)
class _GroupAttendance:
    """What a group has to say of its calls, which it numbers by itself; see `grouping.Attendance`."""

    attendance: Attendance
    positions: Sequence[int]

    def append(self, failure: CallFailure, /) -> None:
        position, phase, errors = self.positions[failure.index], failure.phase, [failure.error]
        del failure  # where this raises, its frame is in the traceback: the exception must not hold itself
        self.attendance.note_failure(position, phase, errors.pop())

    @contextmanager
    def waiting(self, phase: str, give_up: Callable[[str], None]) -> Iterator[_Roll]:
        wait = self.attendance.wait_in(phase)
        with wait.waiting(give_up):
            yield _Roll(self.attendance, wait, self.positions)


@dataclass(frozen=True)
class _Roll:
    """See `grouping.Roll`."""

    attendance: Attendance
    wait: Wait
    positions: Sequence[int]

    def settle(self, index: int, is_answered: bool) -> None:
        self.wait.settle(self.positions[index], is_answered)

    def is_needed(self, index: int) -> bool:
        return self.attendance.needs(self.wait, self.positions[index])
