"""When to stop waiting: once every token has enough experts, the rest get so many seconds, and are given up.

::

    calls begin      every token has `min_experts`          the rest are cancelled
    ──┬──────────────────────┬───────────────────────────────────┬──────────▶ time
      │  results come in     │ ◀────── timeout_after_min_s ────▶ │

A token that cannot get enough any more, because its experts have failed, is not waited for.

Shape letters: T tokens.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

GiveUp = Callable[[str], None]


class Wait:
    """The calls of one pass that are under way.

    Args:
        tokens_of: for each call the tokens that wait for it: int64, each once.
        min_experts: how many calls are enough for a token; those it has, if it has fewer.
        timeout_s: how long the rest is waited for then.

    Mutable state: all of it, under `_lock`; calls are given up outside of it.

    Threads: calls settle on any; the clock is a thread of its own, which ends with the last call.
    """

    def __init__(self, tokens_of: Mapping[int, Tensor], min_experts: int, timeout_s: float) -> None:
        self._tokens_of = {call: tokens.cpu() for call, tokens in tokens_of.items()}
        self._min_experts = min_experts
        self._timeout_s = timeout_s
        none = torch.empty(0, dtype=torch.int64, device="cpu")
        self._num_open_T = torch.bincount(torch.cat([none, *self._tokens_of.values()]))
        self._num_needed_T = self._num_open_T.clamp(max=min_experts)
        self._num_answers_T = torch.zeros_like(self._num_open_T)
        self._lock = threading.Lock()
        self._open = set(self._tokens_of)
        self._give_ups: list[GiveUp] = []
        self._clock: threading.Timer | None = None
        self.reason = ""

    def settle(self, call: int, is_answered: bool) -> None:
        """Note that a call has its result, or has failed for good; a second time is nothing new."""
        with self._lock:
            if call not in self._open:
                return
            self._open.discard(call)
            tokens = self._tokens_of[call]
            self._num_open_T[tokens] -= 1
            if is_answered:
                self._num_answers_T[tokens] += 1
            self._start_clock_if_enough()
            if not self._open and self._clock is not None:
                self._clock.cancel()

    @contextlib.contextmanager
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

    def _start_clock_if_enough(self) -> None:
        if self._clock is not None or not self._open:
            return
        has_enough_T = self._num_answers_T >= self._num_needed_T
        has_no_hope_T = self._num_answers_T + self._num_open_T < self._num_needed_T
        if bool((has_enough_T | has_no_hope_T).all()):
            self._clock = threading.Timer(self._timeout_s, self._ring)
            self._clock.daemon = True
            self._clock.start()

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
