"""A number of bytes (or calls) that many share, and that is never exceeded."""

from __future__ import annotations

import threading

from moe_autograd.errors import InvalidCallError, ServerBusyError


class Budget:
    """Counts what is in use against a limit.

    Args:
        limit: the most that may be in use at once.
        what: named in the error when there is no room: `"queued bytes"`.
        retry_after_s: the hint that the error carries.
        is_configured: whether who runs the server may set the limit.

    Attributes:
        in_use: so much is taken.
        num_refused: how often there was no room.

    Threads: any.
    """

    def __init__(
        self, limit: int, what: str, retry_after_s: float = 0.1, *, is_configured: bool = True
    ) -> None:
        self.limit = limit
        self.what = what
        self.retry_after_s = retry_after_s
        self._remedy = (
            "Try again later, or raise the server's limit." if is_configured else "Try again later."
        )
        self.in_use = 0
        self.num_refused = 0
        self._has_refused = False
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"<Budget {self.what}: {self.in_use} of {self.limit}>"

    def try_take(self, amount: int) -> bool:
        """Take `amount` if there is room; return whether there was."""
        with self._lock:
            if self.in_use + amount > self.limit:
                self._has_refused = True
                self.num_refused += 1
                return False
            self.in_use += amount
            return True

    def take(self, amount: int, total: int | None = None) -> None:
        """Take `amount`.

        Args:
            amount: to take now.
            total: what its holder then has; by default it had nothing before.

        Raises:
            InvalidCallError: there will never be room for so much, however long its holder waits.
            ServerBusyError: there is none for it now.
        """
        needed = amount if total is None else total
        if needed > self.limit:
            raise InvalidCallError(
                f"{self.what}: expected at most {self.limit}, got {needed}. Ask for less at once, or raise the "
                "server's limit."
            )
        if not self.try_take(amount):
            raise ServerBusyError(
                f"{self.what}: expected at most {self.limit}, got {amount} more than the {self.in_use} in use. "
                + self._remedy,
                retry_after_s=self.retry_after_s,
            )

    def reset_refused(self) -> bool:
        """Return whether there was no room for somebody since this was last called."""
        with self._lock:
            had_refused, self._has_refused = self._has_refused, False
            return had_refused

    def give_back(self, amount: int) -> None:
        """Return what was taken."""
        with self._lock:
            self.in_use -= amount
            assert self.in_use >= 0, f"{self.what}: more given back than taken"
