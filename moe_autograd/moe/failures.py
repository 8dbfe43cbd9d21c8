"""Which failures of experts a layer may leave out, how it reports them, and how long it leaves an expert alone.

What is left out is what came between the layer and an expert at run time: a server that is gone, busy, late, or
whose expert raised there (`RemoteError`), and, from a module that talks to something itself, `ConnectionError` and
`TimeoutError`. What the program did wrong is never left out, since it would be wrong the next time as well, and
nobody would know: a call that the server refuses as invalid, missing permissions, and whatever else a module raises
that runs here. Nor is what nobody waits for any more: then no server has failed, and nothing is to go on. And what the
handler of a signal raises in the midst of an expert, such as a time limit by `SIGALRM`, is not that expert's.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from moe_autograd._interrupts import came_by_signal
from moe_autograd.errors import CallCancelledError, InvalidCallError, PermissionDeniedError, RemoteError

_FIRST_REST_S = 0.5
_LONGEST_REST_S = 30.0


@dataclass(frozen=True)
class Tolerance:
    """What a layer with ``on_failure="drop"`` puts up with; see `MixtureOfExperts`."""

    min_experts: int = 1
    allow_zero_outputs: bool = False
    timeout_after_min_s: float | None = None


@dataclass(frozen=True)
class ExpertFailure:
    """An expert that has no part in a pass.

    Args:
        expert_index: in the layer.
        expert: its name on its server, or its place, such as "expert 3", if it has no name.
        phase: "forward": its tokens were combined without it; "backward": they got no gradient through it.
        reason: the error's class and message, or for how long the expert is left alone, and after what.
    """

    expert_index: int
    expert: str
    phase: str
    reason: str

    def __str__(self) -> str:
        return f"{self.expert!r}, {self.phase}: {self.reason}"


def may_be_left_out(error: BaseException) -> bool:
    """Tell whether an error is of the kind that ``on_failure="drop"`` is for."""
    if isinstance(error, InvalidCallError | PermissionDeniedError | CallCancelledError):
        return False
    return isinstance(error, RemoteError | ConnectionError | TimeoutError) and not came_by_signal(error)


@dataclass(frozen=True)
class _Rest:
    until_s: float
    length_s: float
    reason: str


class Rests:
    """Leaves experts alone that have failed: for half a second, and twice as long each time, up to half a minute.

    An expert that has then worked for as long as the longest rest begins anew.

    Mutable state: `_rests`, each entry replaced as a whole. Two threads that note failures of one pass at the same
    time write the same rest, so there is no lock; a layer with one could not be copied.
    """

    def __init__(self) -> None:
        self._rests: dict[int, _Rest] = {}

    def note_failure(self, expert_index: int, reason: str) -> None:
        """Leave this expert alone for a while; several failures in one rest count once."""
        now_s = time.monotonic()
        last = self._rests.get(expert_index)
        if last is not None and now_s < last.until_s:
            return
        length_s = _FIRST_REST_S
        if last is not None and now_s < last.until_s + _LONGEST_REST_S:
            length_s = min(2 * last.length_s, _LONGEST_REST_S)
        self._rests[expert_index] = _Rest(now_s + length_s, length_s, reason)

    def resting(self) -> dict[int, str]:
        """Return the experts to be left alone now, each with the reason."""
        now_s = time.monotonic()
        return {
            index: f"left alone for another {rest.until_s - now_s:.1f} s, since it failed: {rest.reason}"
            for index, rest in self._rests.copy().items()
            if now_s < rest.until_s
        }

    def __getstate__(self) -> dict[str, object]:
        """Forget all: the clock begins with each machine, and a file is read when it may be."""
        return {"_rests": {}}

    def __deepcopy__(self, memo: object) -> Rests:
        copied = Rests()
        copied._rests = dict(self._rests)
        return copied

    def __repr__(self) -> str:
        return f"Rests({sorted(self.resting())})"
