"""Hooks that users register on the results of a map: no gradient, no hook.

One node stands for many calls, and PyTorch calls the hooks on all results of a node that runs: with `None`, where no
gradient flows. A call of its own would not run then, nor its hooks. (But `register_multi_grad_hook(mode="all")` counts
the calls that it is to get, of all nodes that run.)
"""

from __future__ import annotations

import collections
from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.autograd.function import Function

from moe_autograd.autograd.entry import waited_for


def skip_missing_gradients(func: type[Function]) -> type[Function]:
    """Let no hook on a result of `func` be called without a gradient; costs nothing where there is none."""
    node_class: Any = func._backward_cls
    register = node_class._register_hook_dict

    def register_skipping(
        node: Any, result: Tensor
    ) -> None:  # `Tensor.register_hook` calls it for its first hook
        result._backward_hooks = _Hooks()
        register(node, result)

    node_class._register_hook_dict = register_skipping
    return func


class _Hooks(collections.OrderedDict[int, Callable[[Tensor], Any]]):
    """The hooks of a result, as `Tensor.register_hook` and its handles know them."""

    def __setitem__(self, key: int, hook: Callable[[Tensor], Any]) -> None:
        if waited_for(hook):
            super().__setitem__(key, hook)
        else:
            super().__setitem__(key, lambda grad: None if grad is None else hook(grad))
