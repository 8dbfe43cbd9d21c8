"""Calls that talk with other ranks of a distributed program: they take turns.

Collectives of one group meet in the order in which each rank comes to them. Calls side by side come to theirs in any
order, another one on each rank: at best sizes differ and all is over, at worst they agree and sums are of the wrong
numbers. So a map with a call that is known to talk makes its calls one after the other, forwards and backwards, in the
order of their index. Known are weights and inputs that are `DTensor`s (tensor parallelism), modules that
`FullyShardedDataParallel` has wrapped, and `SyncBatchNorm`. Whoever calls collectives by other means has to say so, by
`max_concurrency=1`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

from torch import nn

_DTENSORS, _FSDP = "torch.distributed.tensor", "torch.distributed.fsdp"


def are_spread(values: Iterable[Any]) -> bool:
    """Whether one of `values` is a tensor with parts on other ranks."""
    if _DTENSORS not in sys.modules:
        return False
    kind = getattr(sys.modules[_DTENSORS], "DTensor", ())  # or it is just being imported
    return any(isinstance(value, kind) for value in values)


def modules_that_talk() -> tuple[type, ...]:
    """Return the classes of modules that run collectives, as far as somebody has imported them."""
    if _FSDP not in sys.modules:
        return (nn.SyncBatchNorm,)
    return nn.SyncBatchNorm, *filter(None, [getattr(sys.modules[_FSDP], "FullyShardedDataParallel", None)])
