"""How long the next turn of an expert may take, as far as its turns so far tell.

Computing shows in the processor time of the thread, which a crowded machine does not stretch. Waiting (for a device, a
disk, another machine) shows in what is left of the time that passed; but so does the crowd, so it counts for a fifth:
else one slow turn in a crowd would send a small expert to the long lane, behind the large ones. Both are sometimes
longer than they are, never shorter: so shorter ones count for more.
"""

from __future__ import annotations

import time

_WEIGHT_OF_SHORTER, _WEIGHT_OF_LONGER = 0.5, 0.05
_SHARE_OF_WAITING = 0.2
_SURELY_SHORT_S = 0.0003  # whatever it did meanwhile; to ask for the thread's time is a system call


class TurnLength:
    """Running means over the turns of one expert.

    Threads: one at a time, as the expert itself.
    """

    def __init__(self) -> None:
        self.expected_s = 0.0005
        self._computing_s = self._waiting_s = 0.0
        self._is_timed = True  # whether processor time is asked for
        self._began_s = 0.0
        self._cpu_began_s: float | None = None

    def __repr__(self) -> str:
        return f"<TurnLength {self.expected_s:.6f} s>"

    def begin(self) -> float:
        """A turn begins; return when, on time.monotonic's clock."""
        self._began_s = time.monotonic()
        self._cpu_began_s = time.thread_time() if self._is_timed else None
        return self._began_s

    def end(self) -> None:
        """Learn from the turn that began last, on this thread."""
        elapsed_s = time.monotonic() - self._began_s
        self._is_timed = elapsed_s > _SURELY_SHORT_S
        if not self._is_timed:
            computing_s = elapsed_s
        elif self._cpu_began_s is not None:
            computing_s = time.thread_time() - self._cpu_began_s
        else:  # the first long one after short ones; the next will be timed
            return
        self._computing_s = _moved(self._computing_s, computing_s)
        if self._waiting_s or self._is_timed:  # else it stays none
            self._waiting_s = _moved(self._waiting_s, elapsed_s - computing_s)
        self.expected_s = max(self._computing_s, _SHARE_OF_WAITING * self._waiting_s)


def _moved(mean_s: float, newest_s: float) -> float:
    change_s = newest_s - mean_s
    return mean_s + change_s * (_WEIGHT_OF_SHORTER if change_s < 0 else _WEIGHT_OF_LONGER)
