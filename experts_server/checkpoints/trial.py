"""A load that is only tried: whoever holds a group, a rate or a buffer, has the one that is in use after it, too."""

from __future__ import annotations

from collections.abc import Iterator
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
        containers += _containers_in([of_optimizer, training.schedule], set())
    before = [(one, one.copy()) for one in containers]
    try:
        yield
    finally:
        for one, contents in before:
            _put_back(one, contents)


def _containers_in(value: Any, seen: set[int]) -> Iterator[Any]:
    """Yield each dict and list in it, once; those of its attributes, too, where it is an optimizer or a schedule."""
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, torch.optim.Optimizer | LRScheduler):
        yield from _containers_in(vars(value), seen)
    if isinstance(value, LambdaLR | MultiplicativeLR):  # attributes of its functions are in its `state_dict`
        yield from _containers_in([*map(vars, value.lr_lambdas)], seen)
    if isinstance(value, dict | list):
        yield value
    if isinstance(value, dict | list | tuple):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _containers_in(one, seen)


def _put_back(container: Any, contents: Any) -> None:
    if isinstance(container, list):
        container[:] = contents
        return
    for key in [key for key in container if key not in contents]:
        del container[key]
    for key, one in contents.items():  # `update` of a `Counter` would add them up
        container[key] = one
