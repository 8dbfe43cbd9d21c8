"""A load that is only tried: whoever holds a group, a rate or a buffer, has the one that is in use after it, too."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.optim.lr_scheduler import LambdaLR, LRScheduler, MultiplicativeLR

from experts_server.hosting.hosted import HostedExpert
from moe_autograd._contexts import contextmanager

_OF_A_MODULE = "_parameters", "_buffers", "_modules"


@contextmanager
def keeping_objects(hosted: HostedExpert) -> Iterator[None]:
    """Have the same objects in their places after the block, in the module, its optimizer and its schedule.

    What a load writes into tensors stays: the values that they had when they were saved.
    """
    of_parts = [vars(part).get(key) for part in hosted.module.modules() for key in _OF_A_MODULE]
    # Scripted ones have others, and assign nothing.
    containers = [one for one in of_parts if isinstance(one, dict)]
    if (training := hosted.training) is not None:
        of_optimizer = getattr(training.optimizer, "__dict__", {})  # a wrapper may be of no class of torch's
        containers += _containers_in([of_optimizer, training.schedule])
    before = [(one, _contents_of(one)) for one in containers]
    try:
        yield
    finally:
        for one, contents in before:
            _put_back(one, contents)


def _containers_in(values: Iterable[Any]) -> Iterator[Any]:
    """Yield each dict and list in them, once; those of the attributes of optimizers and schedules, too."""
    to_visit, seen = [*values], set[int]()
    for value in to_visit:  # grows
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, torch.optim.Optimizer | LRScheduler):
            to_visit.append(vars(value))
        # whose functions' attributes are in its `state_dict`
        if isinstance(value, LambdaLR | MultiplicativeLR):
            to_visit += map(vars, value.lr_lambdas)
        if isinstance(value, dict | list):
            yield value
        if isinstance(value, dict | list | tuple):
            contents = _contents_of(value)
            to_visit += contents.values() if isinstance(contents, dict) else contents


def _contents_of(container: Any) -> dict[Any, Any] | list[Any]:
    """Return what is in it, whatever its class makes of that."""
    if isinstance(container, dict):
        return dict(dict.items(container))
    return [*(list if isinstance(container, list) else tuple).__iter__(container)]


def _put_back(container: Any, contents: Any) -> None:
    """Have in it what was there; where that is there still, it need not be such that it can be written to."""
    if isinstance(container, list):
        now = _contents_of(container)
        if len(now) != len(contents) or any(one is not own for one, own in zip(now, contents, strict=True)):
            list.__setitem__(container, slice(None), contents)
        return
    kind = OrderedDict if isinstance(container, OrderedDict) else dict  # `update` of a `Counter` adds
    for key in [key for key in dict.keys(container) if key not in contents]:
        kind.__delitem__(container, key)
    for key, own in contents.items():
        if dict.get(container, key, contents) is not own:
            kind.__setitem__(container, key, own)
