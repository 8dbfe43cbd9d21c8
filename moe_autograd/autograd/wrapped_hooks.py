"""Hooks of users in hooks of ours, and those that `register_multi_grad_hook` puts on several tensors at once."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, cast

from torch.autograd.graph import register_multi_grad_hook


class WrappedHook:
    """A hook of the user's in another.

    Args:
        hook: the user's, or one that is wrapped itself.
    """

    def __init__(self, hook: Callable[[Any], Any]) -> None:
        self._hook = hook

    @property
    def __torch_unserializable__(self) -> Any:
        return cast(Any, self._hook).__torch_unserializable__


def of_several(hook: Any) -> bool:
    """Whether a hook is one of those that `register_multi_grad_hook` puts on several tensors."""
    return getattr(innermost(hook), "__globals__", None) is register_multi_grad_hook.__globals__


def innermost(hook: Any) -> Any:
    """Return the user's own hook."""
    while isinstance(hook, WrappedHook):
        hook = hook._hook
    return hook


def waited_for(hook: Any) -> list[Any]:
    """Return the nodes that a hook of `register_multi_grad_hook(mode="all")` waits for, in its own list."""
    if not of_several(hook):
        return []
    nodes: list[Any] = _enclosed(innermost(hook), "grad_fns", [])
    return nodes


def own_function(hook: Any) -> Any:
    """Return the user's own function, for several tensors what `register_multi_grad_hook` was given."""
    own = innermost(hook)
    if of_several(own):
        own = _enclosed(own, "fn", own)
    while isinstance(own, functools.partial):
        own = own.func
    return own


def _enclosed(function: Any, name: str, default: Any) -> Any:
    names = function.__code__.co_freevars
    return function.__closure__[names.index(name)].cell_contents if name in names else default
