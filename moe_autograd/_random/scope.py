"""What each thread that runs calls of a map enters: its random operators draw from the calls' own generators."""

from __future__ import annotations

import torch

from moe_autograd._random.operators import KEY, install, installed
from moe_autograd._random.seeds import CallSeeds, running
from moe_autograd._random.stand_ins import stand_ins

_is_switched_on = torch._C._dispatch_tls_is_dispatch_key_included
_switch = torch._C._dispatch_tls_set_dispatch_key_included


class own_streams:
    """Let the calls that this thread runs draw from `seeds`; set `running.index` before each call.

    A context manager, written out because every map enters one on each of its threads. Ctrl-C may come just as it
    begins, or instead of its end. So whoever enters it on a thread of the user's ends it once more where anything was
    raised; a second end does nothing.
    """

    __slots__ = ("_outer", "_seeds")

    def __init__(self, seeds: CallSeeds) -> None:
        self._seeds = seeds
        self._outer: tuple[CallSeeds | None, int, bool] | None = None  # while it lasts

    def __enter__(self) -> None:
        if not installed:
            install()
        seeds = running.seeds
        self._outer = (seeds, running.index, _is_switched_on(KEY))
        # first: a handler of a signal that makes a map would take them away as it ends
        running.seeds = self._seeds
        stand_ins.begin()
        _switch(KEY, True)

    def __exit__(self, *exc_info: object) -> None:
        if self._outer is None:
            return
        seeds, index, was_switched_on = self._outer
        running.seeds, running.index = seeds, index
        _switch(KEY, was_switched_on)
        if seeds is None:
            stand_ins.end()
        self._outer = None
