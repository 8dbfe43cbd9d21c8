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

    A context manager, written out because every map enters one on each of its threads.
    """

    __slots__ = ("_outer_index", "_outer_seeds", "_seeds", "_was_switched_on")

    def __init__(self, seeds: CallSeeds) -> None:
        self._seeds = seeds

    def __enter__(self) -> None:
        if not installed:
            install()
        self._outer_seeds = running.seeds
        if self._outer_seeds is None:  # else this thread is counted already
            stand_ins.begin()
        else:
            self._outer_index = running.index
        running.seeds = self._seeds
        self._was_switched_on = _is_switched_on(KEY)
        _switch(KEY, True)

    def __exit__(self, *exc_info: object) -> None:
        _switch(KEY, self._was_switched_on)
        running.seeds = self._outer_seeds
        if self._outer_seeds is None:
            stand_ins.end()
        else:
            running.index = self._outer_index
