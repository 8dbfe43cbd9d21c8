"""Calls too small for a thread, of modules that only compute: for them the plain loop is the map.

A thread, and a graph of its own, cost a call some 120 us. A call that waits for nothing and takes less than that is
better made in turn, in the caller's own graph; and since it can neither wait nor be waited for, nobody can tell, but
by the clock. So a map of which every call is such a call is made as the loop that it means, if

1. each module, with all of its parts, is of a class known to do nothing but arithmetic on its input: one of
   `ONLY_COMPUTE`, or one with a method `only_computes()` of its own (not inherited) that returns `True`;
2. nothing of a user's runs within it: no hooks, no `forward` put into the instance, no tensors of other classes;
3. no call takes more than `most_work()` multiply-adds.

If any call raises, the map is made the other way, which names the call: these calls leave no trace.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as module_globals

MOST_WORK = 1 << 20  # multiply-adds of a forward: one core takes 50 us for it and 100 for its backward
_TEAM_SHARE = 8  # where intra-op threads keep the cores busy in a loop as well, there is less to gain

ONLY_COMPUTE = frozenset(
    [
        nn.ELU,
        nn.Flatten,
        nn.GELU,
        nn.GroupNorm,
        nn.Hardswish,
        nn.Identity,
        nn.LayerNorm,
        nn.LeakyReLU,
        nn.Linear,
        nn.LogSoftmax,
        nn.Mish,
        nn.ReLU,
        nn.RMSNorm,
        nn.Sequential,
        nn.Sigmoid,
        nn.SiLU,
        nn.Softmax,
        nn.Softplus,
        nn.Tanh,
    ]
)

_HOOKS_OF_ALL: tuple[dict[int, Any], ...] = (
    module_globals._global_forward_hooks,
    module_globals._global_forward_pre_hooks,
    module_globals._global_backward_hooks,
    module_globals._global_backward_pre_hooks,
)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def most_work() -> int:
    """Return how many multiply-adds the forward of a small call takes at most."""
    return MOST_WORK * (1 if torch.get_num_threads() == 1 else _TEAM_SHARE)


def call_in_turn(
    modules: Sequence[Callable[..., Any]], args: Sequence[tuple[Any, ...]], kwargs: Sequence[dict[str, Any]]
) -> list[Any] | None:
    """Return what the modules return, called in turn in the caller's graph; `None` where that will not do."""
    if any(_HOOKS_OF_ALL):
        return None
    most = most_work()
    for module, own_args, own_kwargs in zip(modules, args, kwargs, strict=True):
        if own_kwargs or len(own_args) != 1 or not _is_small(module, own_args[0], most):
            return None
    try:
        return [module(own_args[0]) for module, own_args in zip(modules, args, strict=True)]
    except Exception:  # the map will raise it again, and say of which call
        return None


def _is_small(module: Any, x: Any, most: int) -> bool:
    """Whether the call is one of those above."""
    if type(x) is not Tensor and type(x) is not nn.Parameter:
        return False
    width = x.shape[-1] if x.dim() else 1
    num_rows, num_parameters = x.numel() // max(1, width), 0
    parts = [module]
    for part in parts:  # which grows
        if not _is_known(part):
            return False
        own = part.__dict__
        for parameter in own["_parameters"].values():
            if parameter is not None:
                if type(parameter) is not nn.Parameter:
                    return False
                num_parameters += parameter.numel()
        parts += own["_modules"].values()
    return num_rows * max(num_parameters, width) <= most


def _is_known(part: Any) -> bool:
    """Whether `part`, not counting its own parts, does nothing but what its class does (rules 1 and 2)."""
    kind = type(part)
    if kind not in ONLY_COMPUTE:
        says = kind.__dict__.get("only_computes")
        if says is None or not says(part):
            return False
    own = part.__dict__
    for hooks in _HOOKS:
        if own[hooks]:
            return False
    return "forward" not in own and not own.get("inplace", False)
