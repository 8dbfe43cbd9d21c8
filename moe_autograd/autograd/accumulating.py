"""Add a leaf's gradient to its `.grad` as soon as it is computed, as plain PyTorch does.

A join hands on the gradients of all calls at once. Those of all their weights would be in memory together, beside the
`.grad`s that they are to be added to, and out of the caches by then. (Where there is no `.grad` yet the engine keeps
the new gradient as it is: then nothing is gained.) So the call that has computed a gradient lets the leaf's own node
add it, and the join hands on none for that leaf. Only where that makes no difference:

1. The engine would accumulate there: nobody asked for the gradient itself, nor for one with a graph.
2. No hook waits for the gradient, or for its accumulation.
3. No other call of the map reaches the leaf: else the order in which floats are added would depend on the threads.
4. After Ctrl-C nothing is added any more by calls that have been left to end by themselves.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import Node

from moe_autograd._streams import accelerator_in_use

_REST_S = 1.0


class AtOnce:
    """Adds gradients to leaves in one backward.

    Among what a backward wants it stands for `True`, where a gradient is wanted in a leaf and nowhere else.

    Threads: any.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._num_adding = 0
        self._is_over = False

    def may_add(self, leaf: Tensor, node: Node | None) -> bool:
        """Whether the gradient of `leaf`, which the engine takes to `node`, may be added here (Rules 1 and 2).

        Threads: only the engine's, while it runs the join.
        """
        return node is not None and _awaits_nothing_but_gradients(leaf) and _is_accumulated(node)

    def has_added(self, node: Any, grad: Tensor) -> bool:
        """Add a gradient to the leaf of `node`, if that is still possible; return whether it was."""
        if not _awaits_nothing_but_gradients(node.variable):
            return False
        with self._changed:
            if self._is_over:
                return True  # nobody waits for it
            self._num_adding += 1
        try:
            node(grad)  # under a lock of its own
        finally:
            with self._changed:
                self._num_adding -= 1
                self._changed.notify_all()
        return True

    def end(self) -> None:
        """Add nothing any more (Rule 4)."""
        with self._changed:
            self._is_over = True
            self._changed.wait_for(lambda: not self._num_adding, _REST_S)


Wanted: TypeAlias = bool | AtOnce  # of the gradient of an input: whether a backward uses it


def may_add_at_once() -> bool:
    """Whether the backward that runs now adds gradients to leaves on this thread, and records nothing (Rule 1)."""
    is_engines = torch._C._current_graph_task_id() != -1
    return is_engines and not torch.is_grad_enabled() and accelerator_in_use() is None


@contextlib.contextmanager
def ended(wanted: Iterable[Wanted]) -> Iterator[None]:
    """Add nothing any more if the block is left by an exception (Rule 4)."""
    try:
        yield
    except BaseException:
        for one in {*wanted}:
            if isinstance(one, AtOnce):
                one.end()
        raise


def _awaits_nothing_but_gradients(leaf: Tensor) -> bool:
    return leaf.grad is not None and not leaf._backward_hooks and not leaf._post_accumulate_grad_hooks


def _is_accumulated(node: Node) -> bool:
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:  # `torch.autograd.grad` was asked for it: the engine says so by raising
        return False
