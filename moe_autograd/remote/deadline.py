"""A point in time until which a whole operation has to be done: queueing, connecting, computing, transfer."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from moe_autograd.wire.options import LONGEST_S


@dataclass(frozen=True)
class Deadline:
    """Begins to run when it is made.

    Args:
        timeout_s: seconds from now; positive and at most three years, since nothing here waits for ever.

    Raises:
        ValueError: it is not.
    """

    timeout_s: float
    started_at: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        is_number = isinstance(self.timeout_s, (int, float)) and not isinstance(self.timeout_s, bool)
        if not (is_number and 0 < self.timeout_s <= LONGEST_S):
            raise ValueError(
                f"timeout_s: expected a positive, finite number of seconds (up to {LONGEST_S:.0e}), got "
                f"{self.timeout_s!r}. Nothing here waits for ever; choose the longest time that you would wait."
            )

    @property
    def remaining_s(self) -> float:
        """Seconds left; zero once it has passed."""
        return max(0.0, self.started_at + self.timeout_s - time.monotonic())

    def part(self, timeout_s: float) -> Deadline:
        """Return the deadline of a part of the operation: so many seconds from now, and not after this one."""
        return Deadline(timeout_s) if timeout_s < self.remaining_s else self

    def __str__(self) -> str:
        """Tell how long it has run, as our errors do: `after 2.0 s (deadline 2.0 s)`."""
        elapsed_s = time.monotonic() - self.started_at
        unit, in_a_second = ("s", 1) if self.timeout_s >= 1 else ("ms", 1000)
        return (
            f"after {elapsed_s * in_a_second:.1f} {unit} (deadline {self.timeout_s * in_a_second:.1f} {unit})"
        )
