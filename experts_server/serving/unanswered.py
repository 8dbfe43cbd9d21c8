"""What the calls and answers of all streams hold: a client may leave its own, but not for all others as well."""

from __future__ import annotations

from typing import Protocol


class Leaving(Protocol):
    """A stream, whose client may leave answers."""

    def look_again(self) -> None:
        """Look whether more of its calls may be taken: there is room again."""


class Unanswered:
    """Counts the bytes of calls that have no result yet, and of answers that are not on their way.

    Args:
        most: while there are more, a stream takes no message while it has any itself.

    Threads: the event loop's.
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.num_bytes = 0
        self._of: dict[Leaving, int] = {}

    def __repr__(self) -> str:
        return f"<Unanswered {self.num_bytes} bytes of {len(self._of)} streams, {self.most} are many>"

    @property
    def are_many(self) -> bool:
        """Whether all streams together have more than `most`."""
        return self.num_bytes > self.most

    def note(self, stream: Leaving, num_bytes: int) -> None:
        """A stream has so many now; 0: it may be forgotten."""
        were_many = self.are_many
        self.num_bytes += num_bytes - self._of.pop(stream, 0)
        if num_bytes:
            self._of[stream] = num_bytes
        if were_many and not self.are_many:
            for one in self._of:
                one.look_again()
