"""Let the tensor hooks of parameters sleep while an inner backward captures their gradients.

A hook on a tensor belongs to the backward that the user started: it sees the whole gradient, once. But the engine
runs the hooks of a leaf also where a gradient is only captured, as `torch.autograd.grad` of a call's own graph does.
Removing and restoring hooks would race with other threads; so each is wrapped, once and for good, in one that does
nothing in an inner backward. It tells an inner backward from one that the user starts inside a call by the engine's
number for it, which the first node to run notes down. `Tensor.retain_grad` is such a hook in C++, which cannot be
wrapped: what it adds is taken back.

They also sleep where there is no gradient. The engine walks the leaves of every call that is tied to the same node,
also of those that got none, which plain PyTorch would not reach; and a hook is written for tensors.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import Node


class _Inner(threading.local):
    def __init__(self) -> None:
        self.backwards: set[int] = set()  # the engine's numbers of the inner backwards on this thread
        self.is_all = False  # whether every backward on this thread is an inner one


_inner = _Inner()


class _Sleeper:
    """A tensor hook that does nothing in an inner backward."""

    def __init__(self, hook: Callable[[Tensor], Tensor | None]) -> None:
        self._hook = hook

    def __call__(self, grad: Tensor | None) -> Tensor | None:
        if grad is None:
            return None
        is_inner = _inner.is_all or torch._C._current_graph_task_id() in _inner.backwards
        return None if is_inner else self._hook(grad)


def let_hooks_sleep(tensors: Iterable[Tensor]) -> bool:
    """Wrap the hooks of tensors at which inner graphs end; called before each backward, for hooks come and go.

    Returns:
        Whether there are any.
    """
    has_hooks = False
    for tensor in tensors:
        hooks = tensor._backward_hooks
        if hooks:
            has_hooks = True
            for key, hook in hooks.items():
                if not isinstance(hook, _Sleeper):
                    hooks[key] = _Sleeper(hook)
    return has_hooks


@contextlib.contextmanager
def sleeping_hooks(starts: Sequence[Node]) -> Iterator[None]:
    """Run an inner backward that begins at `starts`: wrapped hooks do nothing in it."""
    noted: list[int] = []

    def note(_: object) -> None:
        noted.append(torch._C._current_graph_task_id())
        _inner.backwards.add(noted[-1])

    handles = [node.register_prehook(note) for node in starts]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        _inner.backwards.difference_update(noted)


@contextlib.contextmanager
def all_hooks_sleep() -> Iterator[None]:
    """Run inner backwards, wherever they begin: wrapped hooks do nothing on this thread."""
    outer, _inner.is_all = _inner.is_all, True
    try:
        yield
    finally:
        _inner.is_all = outer


@contextlib.contextmanager
def retained_grads_untouched(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Put back the `.grad` of tensors that retain it: an inner backward adds its part, the outer one all."""
    retained = [(tensor, tensor.grad) for tensor in tensors if tensor.retains_grad]
    grads = [None if grad is None else grad.clone() for _, grad in retained]
    try:
        yield
    finally:
        for (tensor, _), grad in zip(retained, grads, strict=True):
            tensor.grad = grad
