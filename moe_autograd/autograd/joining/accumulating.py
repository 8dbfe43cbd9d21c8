"""Add a leaf's gradient to its `.grad` as soon as it is computed, as plain PyTorch does.

A join hands on the gradients of all calls at once. Those of all their weights would be in memory together, beside the
`.grad`s that they are to be added to, and out of the caches by then. (Where there is no `.grad` yet the engine keeps
the new gradient as it is: then nothing is gained.) So the call that has computed a gradient lets the leaf's own node
add it, and the join hands on none for that leaf. Only where that makes no difference:

1. The engine would accumulate there: nobody asked for the gradient itself, nor for one with a graph.
2. No hook waits for the gradient, or for its accumulation, at the leaf or at its node.
3. No other call of the map reaches the leaf: else it gets a sum (`sums`), which is there once all calls have ended.
4. After Ctrl-C nothing is added any more by calls that have been left to end by themselves.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import Node

from moe_autograd._contexts import contextmanager
from moe_autograd._streams import accelerator_in_use
from moe_autograd.autograd.uncompiled import is_backward_compiled

LEAST_ADDED = 1 << 12  # elements; the gradients of smaller leaves may well be in memory together
_REST_S = 1.0  # for those who are in the midst of adding when the backward is over


class AtOnce:
    """Adds gradients to leaves in one backward.

    Threads: any.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_adding = 0
        self._is_over = False

    def adder(self, node: Any) -> Adder | None:
        """Return what adds the gradient of a leaf, given its node; `None` if the engine has to (Rules 1 and 2).

        Threads: only the engine's, while it runs the join.
        """
        leaf = node.variable
        if not is_worth_adding(leaf) or not _awaits_nothing_but_gradients(leaf):
            return None
        return Adder(self, node) if _is_accumulated(node) and not _has_hooks(node) else None

    def add(self, node: Any, grad: Tensor) -> None:
        """Add a gradient, unless the backward is over."""
        with self._changed:
            if self._is_over:
                return  # nobody waits for it
            self._num_adding += 1
        try:
            node(grad)  # under a lock of its own
        finally:
            with self._changed:
                self._num_adding -= 1
                self._changed.notify_all()

    def end(self) -> None:
        """Add nothing any more (Rule 4)."""
        with self._changed:
            self._is_over = True
            self._changed.wait_for(lambda: not self._num_adding, _REST_S)


class Adder:
    """Adds the gradient of one leaf; where a backward says what it wants, this means "yes, and add it yourself".

    Args:
        at_once: of the backward.
        node: the leaf's.

    Threads: any.
    """

    __slots__ = ("_node", "at_once")

    def __init__(self, at_once: AtOnce, node: Node) -> None:
        self.at_once = at_once
        self._node: Any = node

    def try_add(self, grad: Tensor) -> bool:
        """Add a gradient to the leaf, if that is still possible; return whether it was."""
        leaf = self._node.variable
        is_as_leaf = grad.shape == leaf.shape and grad.dtype is leaf.dtype and grad.device == leaf.device
        if not is_as_leaf or not _awaits_nothing_but_gradients(leaf):
            return False  # the engine will make it so, or complain
        self.at_once.add(self._node, grad)
        return True


Wanted: TypeAlias = bool | Adder  # of the gradient of an input: whether a backward uses it


def add_where_possible(grads: Sequence[Tensor | None], wanted: Sequence[Wanted]) -> list[Tensor | None]:
    """Add those gradients that are to be added at once; return the others, each in its place."""
    return [
        None if grad is not None and isinstance(add, Adder) and add.try_add(grad) else grad
        for grad, add in zip(grads, wanted, strict=True)
    ]


def may_add_at_once() -> bool:
    """Whether the backward that runs now adds gradients to leaves on this thread, and records nothing (Rule 1)."""
    if torch._C._current_graph_task_id() == -1 or torch.is_grad_enabled() or torch.is_anomaly_enabled():
        return False
    return accelerator_in_use() is None and not is_backward_compiled()


def is_worth_adding(leaf: Tensor) -> bool:
    """Whether a leaf has a gradient to add to, and one of a size that matters."""
    return leaf.grad is not None and leaf.numel() >= LEAST_ADDED


@contextmanager
def ended(wanted: Iterable[Wanted]) -> Iterator[None]:
    """Add nothing any more if the block is left by an exception (Rule 4)."""
    try:
        yield
    except BaseException:
        for at_once in {one.at_once for one in wanted if isinstance(one, Adder)}:
            at_once.end()
        raise


def _awaits_nothing_but_gradients(leaf: Tensor) -> bool:
    return leaf.grad is not None and not leaf._backward_hooks and not leaf._post_accumulate_grad_hooks


def _has_hooks(node: Node) -> bool:
    """Whether Python hooks are registered on a node; it tells only whoever registers one more."""
    for register in (node.register_prehook, node.register_hook):
        handle: Any = register(_nothing)
        num_hooks = len(handle.hooks_dict_ref())
        handle.remove()
        if num_hooks > 1:
            return True
    return False


def _nothing(*_: object) -> None:
    """Take part as a hook, and do nothing."""


def _is_accumulated(node: Node) -> bool:
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # `torch.autograd.grad` was asked for it: the engine says so by raising
        return False
