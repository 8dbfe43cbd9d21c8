"""Casts of autocast, which are made for each use where experts come and go."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from moe_autograd._contexts import contextmanager


def caching_no_casts(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """Return a context in which an autocast that is around converts weights and inputs for each use.

    What it caches of weights would stay in memory until its block ends, those of all experts together. Of inputs, which
    are leaves here and not in a plain module, the gradients of their uses would be added up in the lower precision.
    """
    if torch.is_autocast_enabled(device.type) and torch.is_autocast_cache_enabled():
        return _without_cached_casts()
    return contextlib.nullcontext()


@contextmanager
def _without_cached_casts() -> Iterator[None]:
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(True)
