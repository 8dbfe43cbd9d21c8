"""Where tensors enter the graphs of module calls, and where those graphs reach the leaves.

Two nodes, in the words of `module_calls`: the entry (Rule 1) between the callers' tensors and the calls' own graphs,
and the gate (Rule 5) between a join and the leaves.

A hook that a call registers on its input is meant for the caller's tensor, which the call does not know from its
alias: it is to see the whole gradient, once. On an alias it would not run at all where the call returns its input, and
run in the inner backwards of all other calls, whose aliases come from the same node, with `None`. So it moves.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import Function
from torch.utils._pytree import TreeSpec, tree_flatten

Flat = tuple[
    list[Any], TreeSpec | None
]  # arguments and how they were nested; `None`: positional ones, not nested


class _Entry(Function):
    """Rule 1. The anchor is a leaf that makes the aliases part of a graph."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        return tuple([tensor.detach() for tensor in tensors])  # as they are, each would be a view of itself

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        raise RuntimeError(  # Rule 9
            "parallel_apply: expected tensors with history to leave a call as its result, got one that left by "
            "another way (an attribute, a list, an object that is no pytree). Return it, or register its class with "
            "torch.utils._pytree.register_pytree_node."
        )


_ENTRY_NODE = _Entry._backward_cls


class _Gate(Function):
    """Rule 5. Leads to all leaves, and carries no gradient there."""

    @staticmethod
    def forward(ctx: Any, *leaves: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        return torch.empty(0)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> tuple[None, ...]:
        return (None,) * len(ctx.needs_input_grad)


def flatten(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Flat:
    """Flatten the arguments of a call; most calls take tensors alone, and need no pytree."""
    if not kwargs and all(type(value) is Tensor for value in args):
        return list(args), None
    return tree_flatten((args, kwargs))


def enter(values: Sequence[Any]) -> dict[int, Tensor]:
    """Return an alias of each tensor that requires a gradient, by the tensor's `id` (Rule 1)."""
    if torch.is_inference_mode_enabled():
        return {}
    tensors = {id(value): value for value in values if isinstance(value, Tensor) and value.requires_grad}
    if not tensors:
        return {}
    # Detached: were the entry to lead on to the callers' graph, an inner backward could run on into it and reach
    # a parameter that serves there, too.
    detached = [tensor.detach() for tensor in tensors.values()]
    with torch.enable_grad():
        aliases = _Entry.apply(torch.empty(0, requires_grad=True), *detached)  # type: ignore[no-untyped-call]
    return dict(zip(tensors, aliases, strict=True))


class _MovedHook:
    """A hook that was registered on an alias, on the caller's tensor; its handle still removes it."""

    def __init__(self, hooks: dict[int, Callable[[Tensor], Tensor | None]], key: int) -> None:
        self._hook, self._hooks, self._key = hooks[key], hooks, key
        hooks[key] = _do_nothing

    def __call__(self, grad: Tensor) -> Tensor | None:
        return self._hook(grad) if self._key in self._hooks else None


def _do_nothing(grad: Tensor) -> None:
    return None


def move_hooks(values: Sequence[Any], aliases: dict[int, Tensor]) -> None:
    """Register the hooks that calls have registered on aliases on the tensors that these stand for.

    Those of an alias that was changed in place stay: its history begins in the call.

    Args:
        values: what `enter` was given.
        aliases: what it returned.
    """
    for value in values:
        alias = aliases.pop(id(value), None)  # a tensor may stand among the values more than once
        if alias is not None and alias._backward_hooks and type(alias.grad_fn) is _ENTRY_NODE:
            for key in alias._backward_hooks:
                value.register_hook(_MovedHook(alias._backward_hooks, key))


def gate(leaves: Iterable[Tensor]) -> Tensor:
    """Return a tensor whose gradient leads to all leaves, and carries nothing there (Rule 5)."""
    led: Tensor = _Gate.apply(*leaves)  # type: ignore[no-untyped-call]
    return led
