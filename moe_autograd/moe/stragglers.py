"""When to stop waiting: once every token has enough experts, the rest get so many seconds, and are given up.

::

    calls begin      every token has `min_experts`          the rest are cancelled
    ──┬──────────────────────┬───────────────────────────────────┬──────────▶ time
      │  results come in     │ ◀────── timeout_after_min_s ────▶ │

A token that cannot get enough any more, because its experts have failed, is not waited for. Without a timeout all are
waited for, except those that cannot be called because their server is gone, once no token needs them.

Shape letters: T tokens.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import Tensor

from moe_autograd._computed_once import computed_once
from moe_autograd._contexts import contextmanager
from moe_autograd._interrupts import uninterrupted

GiveUp = Callable[[str], None]


class Wait:
    """The calls of one pass that are under way.

    Args:
        tokens_of: for each call the tokens that wait for it, at least one: int64, each once.
        min_experts: how many calls are enough for a token; those it has, if it has fewer.
        timeout_s: how long the rest is waited for then; None: until it has settled.

    Mutable state: all of it, under `_lock`; calls are given up outside of it.

    Threads: calls settle on any; the clock is a thread of its own, which ends with the last call, or the pass.
    """

    def __init__(self, tokens_of: Mapping[int, Tensor], min_experts: int, timeout_s: float | None) -> None:
        self._tokens_of = tokens_of
        self._min_experts = min_experts
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._open = set(tokens_of)
        self._answered: set[int] = set()
        self._give_ups: list[GiveUp] = []
        self._clock: threading.Timer | None = None
        self.reason = ""

    def settle(self, call: int, is_answered: bool) -> None:
        """Note that a call has its result, or has failed for good; a second time is nothing new."""
        with self._lock:
            if call not in self._open:
                return
            self._open.discard(call)
            if is_answered:
                self._answered.add(call)
            if self._timeout_s is not None:
                self._start_clock_if_enough(self._timeout_s)
            self._stop_clock_if_over()

    def end(self) -> None:
        """Note that nobody waits any more, though calls may not have settled: Ctrl-C ends a pass before its calls."""
        with self._lock:
            self._open.clear()
            self._stop_clock_if_over()

    def is_needed(self, call: int) -> bool:
        """Tell whether a token waits for this call, as things are."""
        with self._lock:
            return bool(self._is_waiting_T()[self._on_cpu[call]].any())

    @contextmanager
    def waiting(self, give_up: GiveUp) -> Iterator[None]:
        """Have `give_up` called with the reason, if the time comes within the block; at once if it has come."""
        with self._lock:
            self._give_ups.append(give_up)
            reason = self.reason
        if reason:
            give_up(reason)
        try:
            yield
        finally:
            with self._lock:
                self._give_ups.remove(give_up)

    def _start_clock_if_enough(self, timeout_s: float) -> None:
        if self._clock is None and self._open and not self._is_waiting_T().any():
            self._clock = threading.Timer(timeout_s, self._ring)
            self._clock.daemon = True
            with uninterrupted():  # `threading` waits until it runs, and raises if Ctrl-C comes then
                self._clock.start()

    def _stop_clock_if_over(self) -> None:
        if not self._open and self._clock is not None:
            self._clock.cancel()

    def _is_waiting_T(self) -> Tensor:
        """Return which tokens have not enough, and can still get it."""
        num_answers_T = self._count_T(self._answered)
        num_needed_T = self._count_T(self._on_cpu).clamp(max=self._min_experts)
        num_possible_T = num_answers_T + self._count_T(self._open)
        return (num_answers_T < num_needed_T) & (num_needed_T <= num_possible_T)

    def _count_T(self, calls: Iterable[int]) -> Tensor:
        none = torch.empty(0, dtype=torch.int64, device="cpu")
        tokens = torch.cat([none, *(self._on_cpu[call] for call in calls)])
        return torch.bincount(tokens, minlength=self._num_tokens)

    @computed_once
    def _on_cpu(self) -> dict[int, Tensor]:
        return {call: tokens.cpu() for call, tokens in self._tokens_of.items()}

    @computed_once
    def _num_tokens(self) -> int:
        return 1 + max(int(tokens.max()) for tokens in self._on_cpu.values())

    def _ring(self) -> None:
        with self._lock:
            self.reason = (
                f"given up {self._timeout_s:g} s after every token had what it needs "
                f"(min_experts={self._min_experts}, timeout_after_min_s={self._timeout_s:g})"
            )
            give_ups = tuple(self._give_ups)
        for give_up in give_ups:
            give_up(self.reason)

    def __repr__(self) -> str:
        with self._lock:
            return f"Wait(open={sorted(self._open)}, reason={self.reason!r})"
