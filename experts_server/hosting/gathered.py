"""Gradients that wait to be applied, by client, within a budget that all experts share.

A client that goes away leaves its gradients behind, at least those of its last step: they stay until `zero_grad`, as in
torch. They are let go after `max_age_s`, so that they do not hold the budget for ever. Where it has no room for others,
what a step has applied goes at once and the rest after `CROWDED_AGE_S`, or trainings that ended or crashed would keep
the next one out. A client that comes back with a step after that is told, since a step without them would count as one.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from experts_server.budget import Budget
from experts_server.hosting.calls import Expected
from experts_server.hosting.gradients import Gradients, num_bytes
from moe_autograd.errors import InvalidCallError, ServerBusyError
from moe_autograd.wire.gathered import MAX_UNSURE, digest_of, is_digest_of

CROWDED_AGE_S = 60.0
MAX_LOST = 4096  # clients; a step of one that is forgotten fails for its count of backwards


@dataclass(frozen=True, slots=True)
class Gathered:
    """What one client has gathered: the sum, of how many backwards and rows, and their digest (`wire.gathered`)."""

    grads: Gradients
    num_backwards: int
    num_samples: int
    digest: int = 0

    def joined_by(self, total: Gradients, num_samples: int, sequence: int) -> Gathered:
        """Return the same with one backward more."""
        digest = self.digest ^ digest_of([sequence])
        return Gathered(total, self.num_backwards + 1, self.num_samples + num_samples, digest)

    def may_be_of(self, expected: Expected) -> bool:
        """Tell whether these are the backwards that are expected, as far as can be told."""
        num_unsure = self.num_backwards - expected.at_least
        if not 0 <= num_unsure <= expected.at_most - expected.at_least:
            return False
        is_told = expected.digest or expected.unsure
        if not is_told or len(expected.unsure) > MAX_UNSURE:
            return True
        return is_digest_of(self.digest, expected.digest, expected.unsure, num_unsure)


@dataclass(slots=True)
class _Waiting:
    """What one client has gathered, when it gave the last of it, and whether it has stepped since."""

    gathered: Gathered
    touched_at: float
    is_applied: bool = False


class GatheredGradients:
    """What the clients of one expert have gathered.

    Args:
        budget: of bytes.
        max_age_s: since a client's last backward.
        clock: seconds that only grow.

    Threads: one at a time, as the expert itself; `stale` and `len` may be asked from any.
    """

    def __init__(self, budget: Budget, max_age_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_age_s = max_age_s
        self._budget = budget
        self._clock = clock
        self._waiting: dict[bytes, _Waiting] = {}  # by client
        self._lost: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._waiting)

    def by_client(self) -> Mapping[bytes, Gathered]:
        """Return what each client has gathered."""
        return {client_id: waiting.gathered for client_id, waiting in self._waiting.items()}

    def get(self, client_id: bytes) -> Gathered | None:
        """Return what a client has gathered."""
        waiting = self._waiting.get(client_id)
        return None if waiting is None else waiting.gathered

    def put(self, client_id: bytes, gathered: Gathered) -> None:
        """Replace what a client has gathered.

        Raises:
            InvalidCallError: there will never be room; what was there stays.
            ServerBusyError: or there is none now.
        """
        before, total = self.get(client_id), num_bytes(gathered.grads)
        self._budget.take(total - num_bytes(before.grads if before else ()), total)
        self._waiting[client_id] = _Waiting(gathered, self._clock())

    def standing_of(self, client_id: bytes) -> tuple[float, bool]:
        """Return how long ago in seconds a client gave the last it has gathered, and whether a step has applied it."""
        waiting = self._waiting[client_id]
        return self._clock() - waiting.touched_at, waiting.is_applied

    def put_back(self, client_id: bytes, gathered: Gathered, age_s: float, *, is_applied: bool) -> None:
        """Put what a checkpoint held; where there is less room than there was, it is let go, and its client told.

        Args:
            client_id: whose.
            gathered: this.
            age_s: as `standing_of` tells it, and for how long it has been in the checkpoint.
            is_applied: likewise.
        """
        try:
            self.put(client_id, gathered)
        except (InvalidCallError, ServerBusyError):
            self.note_lost(client_id)
        else:
            self._waiting[client_id] = _Waiting(gathered, self._clock() - age_s, is_applied)

    def forget(self, client_id: bytes) -> None:
        """Let go of a client's gradients, as it wished or because they are applied."""
        waiting = self._waiting.pop(client_id, None)
        self._budget.give_back(num_bytes(waiting.gathered.grads if waiting else ()))
        self._lost.pop(client_id, None)

    def pop_lost(self, client_id: bytes) -> bool:
        """Return whether the client's gradients were let go without its knowing; it is told once."""
        was_lost = client_id in self._lost
        self._lost.pop(client_id, None)
        return was_lost

    def note_applied(self, client_id: bytes) -> None:
        """Remember that a step has applied them; they stay, for a second step, as long as there is room."""
        self._waiting[client_id].is_applied = True

    def stale(self, *, is_crowded: bool) -> list[bytes]:
        """Return the clients that have been away for too long, which is sooner where there is no room for others."""
        longest = min(self.max_age_s, CROWDED_AGE_S) if is_crowded else self.max_age_s
        oldest = self._clock() - longest
        return [
            client_id
            for client_id, waiting in list(self._waiting.items())
            if waiting.touched_at < oldest or (is_crowded and waiting.is_applied)
        ]

    def forget_stale(self, *, is_crowded: bool) -> None:
        """Let go of the gradients of clients that have been away for too long."""
        for client_id in self.stale(is_crowded=is_crowded):
            self.forget(client_id)
            self.note_lost(client_id)

    def note_lost(self, client_id: bytes) -> None:
        """Remember to tell a client that its gradients are gone."""
        self._lost[client_id] = None
        if len(self._lost) > MAX_LOST:
            self._lost.popitem(last=False)
