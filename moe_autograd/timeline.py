"""Who ran when: record calls of experts, and export them for Chrome's and Perfetto's trace viewers.

`torch.profiler` sees the ranges of other threads only with an experimental switch, and nothing of what happens
on a server. So whoever runs a call of an expert reports it here with `add_span`, as the maps and `moe_autograd.remote`
do for every call of every pass; that costs a look at one tuple unless somebody records. On an accelerator a local
call's span is the time in which its kernels were queued.

::

    with record_timeline() as timeline:
        layer(x).sum().backward()
    timeline.save_chrome_trace("trace.json")     # open it at https://ui.perfetto.dev

Threads: any thread may report or record, several recordings may overlap, and each gets every call that ended
while it was open. Spans are added by `list.append`, which is atomic; the tuple of recordings is replaced as
a whole under a lock.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moe_autograd._contexts import contextmanager
from moe_autograd._interrupts import uninterrupted
from moe_autograd._natural_order import natural_order

_recordings: tuple[Timeline, ...] = ()
_lock = threading.Lock()


@dataclass(frozen=True)
class Span:
    """One call of one expert in one pass.

    Args:
        name: of the expert, such as ``ffn.3``: what its `expert_name` says, or its place in the layer or map.
        phase: ``"forward"`` or ``"backward"``.
        start_s: when the caller started or sent it, on the clock of `time.perf_counter`.
        end_s: when the caller had its result.
    """

    name: str
    phase: str
    start_s: float
    end_s: float


@dataclass
class Timeline:
    """The calls of one recording, in the order in which they ended."""

    spans: list[Span] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Note whose it is."""
        self._thread = threading.get_ident()

    def chrome_trace(self) -> dict[str, Any]:
        """Return the recording in the Trace Event Format: one lane an expert, times in microseconds."""
        spans = tuple(self.spans)  # other threads may add some
        names = sorted({span.name for span in spans}, key=natural_order)
        lanes = {name: lane for lane, name in enumerate(names, start=1)}
        origin_s = min((span.start_s for span in spans), default=0.0)
        return {
            "displayTimeUnit": "ms",
            "traceEvents": [
                *(_lane_name(lane, name) for name, lane in lanes.items()),
                *(_complete_event(span, lanes[span.name], origin_s) for span in spans),
            ],
        }

    def save_chrome_trace(self, path: str | os.PathLike[str]) -> None:
        """Write `chrome_trace` as JSON."""
        Path(path).write_text(json.dumps(self.chrome_trace(), indent=1), encoding="utf-8")


@contextmanager
def record_timeline() -> Iterator[Timeline]:
    """Record the calls that are reported in this process until the block ends.

    Returns:
        Yields the `Timeline`, to which each call is added when it has ended. After the block it stays as it is.

    Autograd: forwards and backwards are calls of their own. While somebody records, calls that would be made in turn in
    the caller's graph go through the map, since each is to be seen by its name; the numbers stay the same. Their
    backwards are seen only if somebody recorded in the forward.

    Threads: any; calls of all threads are recorded, and a backward by whichever thread runs it. Recordings may overlap.

    >>> with record_timeline() as timeline:
    ...     add_span("ffn.0", "forward", 1.0, 1.5)
    >>> timeline.spans
    [Span(name='ffn.0', phase='forward', start_s=1.0, end_s=1.5)]
    """
    timeline = Timeline()
    with uninterrupted() as section:
        _change(lambda known: (*known, timeline))
        try:
            with section.opened():
                yield timeline
        finally:
            _change(lambda known: tuple(other for other in known if other is not timeline))


def _change(change: Callable[[tuple[Timeline, ...]], tuple[Timeline, ...]]) -> None:
    """Change who records. A new tuple may have garbage collected, and among it a block that was left: it ends here."""
    global _recordings
    while True:
        known = _recordings
        changed = change(known)
        with _lock:  # nothing is allocated inside
            if _recordings is known:
                _recordings = changed
                return


def is_recording() -> bool:
    """Whether anybody records, for those who would have to work to name a span."""
    return bool(_recordings)


def add_span(name: str, phase: str, start_s: float, end_s: float) -> None:
    """Report a call that has ended; nothing, if nobody records.

    Args:
        name: of the expert.
        phase: "forward" or "backward".
        start_s: on the clock of `time.perf_counter`.
        end_s: likewise.

    Threads: any.
    """
    for timeline in _recordings:
        timeline.spans.append(Span(name, phase, start_s, end_s))


def _start_anew() -> None:
    """In a forked child nobody else ends a recording; and no other thread has the lock."""
    global _lock, _recordings
    _lock = threading.Lock()
    _recordings = tuple([known for known in _recordings if known._thread == threading.get_ident()])


def _lane_name(lane: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": "thread_name", "pid": 1, "tid": lane, "args": {"name": name}}


def _complete_event(span: Span, lane: int, origin_s: float) -> dict[str, Any]:
    return {
        "ph": "X",
        "name": span.phase,
        "cat": span.phase,
        "pid": 1,
        "tid": lane,
        "ts": round((span.start_s - origin_s) * 1e6, 3),
        "dur": round((span.end_s - span.start_s) * 1e6, 3),
        "args": {"expert_name": span.name},
    }


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_start_anew)
