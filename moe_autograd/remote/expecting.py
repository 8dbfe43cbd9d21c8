"""Telling servers which experts the coming backward will need, one layer ahead of it.

    forward     layer 1 ──▶ layer 2 ──▶ layer 3                 passes of one connection, in their order: a chain
    backward    layer 1 ◀── layer 2 ◀── layer 3
                          ▲           ▲
                          │           └ just before the backward of layer 3: "expect calls for those of layer 2"
                          └ just before that of layer 2: "expect calls for those of layer 1"

Only experts that come and go on their server (offloaded ones) are named. A hint is one message that nobody waits for:
if it is lost, late or wrong, the call itself reads what it needs. The chain ends when a backward begins: the next
forward is the first of another.

Threads: any; a chain may then hold passes of several, and hints too many.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from moe_autograd.autograd.hooks import before_backward

NamesAt = dict[str, list[str]]  # experts' names by the address of their server


class Expectations:
    """The passes of one connection that wait for their backward.

    Args:
        tell: sends the names of experts to the server at an address, and returns at once.
    """

    def __init__(self, tell: Callable[[str, list[str]], None]) -> None:
        self._tell = tell
        self._lock = threading.RLock()  # a handler of a signal that makes calls takes it again
        self._last: NamesAt = {}

    def note_pass(self, called: Iterable[tuple[str, str]], results: Any) -> None:
        """Take note of a pass that may have a backward; before that, tell servers what comes after it.

        Args:
            called: of the experts that come and go, each its address and name, in the order of the pass.
            results: all that the pass returned.
        """
        names_at: NamesAt = {}
        for address, name in called:
            names_at.setdefault(address, []).append(name)
        with self._lock:
            below, self._last = self._last, names_at
        before_backward(results, partial(self._announce, below))

    def _announce(self, below: NamesAt) -> None:
        with self._lock:
            self._last = {}
        for address, names in below.items():
            self._tell(address, names)
