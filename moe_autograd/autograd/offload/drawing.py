"""Which random numbers the backwards of calls draw that a map makes together: those of a map's backwards.

The engine runs them one by one, as nodes of the caller's graph, and no map is there to say which call draws. A second
run is among them, and has to meet what its first run met (`_random`).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

from moe_autograd._interrupts import unwindable
from moe_autograd._random import CallSeeds, own_streams, running
from moe_autograd.autograd.this_backward import kept_by_this_backward
from moe_autograd.autograd.uncompiled import is_backward_compiled

Drawing = Callable[[], AbstractContextManager[None]]  # to be entered for the backward of one call


def drawing_in_backwards() -> Callable[[int], Drawing]:
    """Return how calls draw in their backwards, by their places; to be asked before their places are taken.

    Those of a map share seeds, others in each backward. A call that no map makes draws as whoever runs its backward.
    """
    if running.places is None:
        return lambda _: contextlib.nullcontext
    together = object()
    return lambda index: functools.partial(_drawing, together, index)


@unwindable
def _drawing(together: object, index: int) -> Iterator[None]:
    seeds = CallSeeds() if is_backward_compiled() else kept_by_this_backward(together, CallSeeds)
    streams = own_streams(seeds)
    try:
        with streams:
            running.index = index
            yield
    except BaseException:
        streams.__exit__()
        raise
