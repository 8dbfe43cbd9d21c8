"""Let the tensor hooks of parameters sleep while an inner backward captures their gradients.

A hook on a tensor belongs to the backward that the user started: it sees the whole gradient, once. But the engine
runs the hooks of a leaf also where a gradient is only captured, as `torch.autograd.grad` of a call's own graph does.
Removing and restoring hooks would race with other threads; so each is wrapped, once and for good, in one that does
nothing in an inner backward that ends at its tensor. (One that passes through a tensor, which a call has computed for a
map of its own, is the one that the hook belongs to.) It tells an inner backward from one that the user starts inside a
call by the engine's number for it, which the first node to run notes down. `Tensor.retain_grad` is such a hook in C++,
which cannot be wrapped: what it adds is taken back, and calls whose backwards end at such a tensor take turns, as
two threads that set its `.grad` at once would crash.

They also sleep where there is no gradient. The engine walks the leaves of every call that is tied to the same node,
also of those that got none, which plain PyTorch would not reach; and a hook is written for tensors. But one of
`register_multi_grad_hook` asks the engine how many gradients will come, and the engine counts such leaves: so it is
called, with `None`. A hook that runs after a gradient was accumulated is not told whether there was one: it sleeps if
`.grad` is as it was.

A hook that is put on a tensor while an inner backward runs which ends there is not wrapped, and sees a part of the
gradient. Nobody can keep the engine from it, so such a backward is refused.
"""

from __future__ import annotations

import collections
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node

from moe_autograd._contexts import contextmanager
from moe_autograd.autograd.uncompiled import left_alone
from moe_autograd.autograd.wrapped_hooks import WrappedHook, waited_for

Ends = frozenset[int]  # the tensors where an inner backward ends: the `id`s of their dictionaries of hooks


class _Inner(threading.local):
    def __init__(self) -> None:
        self.backwards: dict[int, Ends] = {}  # those on this thread, by the engine's numbers
        self.of_all: Ends = frozenset()  # the ends of every backward on this thread
        # their ends, and their numbers
        self.running: list[tuple[Callable[[], Iterable[Tensor]], list[int]]] = []


_inner = _Inner()


class _Sleeper(WrappedHook):
    """A tensor hook that does nothing in an inner backward that ends at its tensor, and none without a gradient."""

    def __init__(self, hook: Callable[[Tensor], Tensor | None], end: int) -> None:
        super().__init__(hook)
        self._end = end
        self._is_counting = bool(waited_for(hook))

    @left_alone
    def __call__(self, grad: Tensor | None) -> Tensor | None:
        if grad is None and not self._is_counting:
            return None
        ends = _inner.backwards.get(torch._C._current_graph_task_id(), _inner.of_all)
        return None if self._end in ends else self._hook(grad)


class _Before:
    """A tensor's gradient before one more is accumulated; nothing is held."""

    def __init__(self, grad: Tensor | None) -> None:
        self._grad = None if grad is None else weakref.ref(grad)
        self._version = 0 if grad is None else grad._version
        self._is_still: bool | None = None  # as the first hook finds it: hooks may change it

    def is_still(self, grad: Tensor | None) -> bool:
        """Whether nothing has been accumulated."""
        if self._is_still is None:
            before = None if self._grad is None else self._grad()
            self._is_still = grad is before and (grad is None or grad._version == self._version)
        return self._is_still


class _LateSleeper(WrappedHook):
    """A hook for after the accumulation of a gradient that does nothing if there was none."""

    def __init__(self, hook: Callable[[Tensor], None]) -> None:
        super().__init__(hook)
        self.before: _Before | None = None

    @left_alone
    def __call__(self, tensor: Tensor) -> Any:
        before, self.before = self.before, None
        if before is None or not before.is_still(tensor.grad):
            return self._hook(tensor)  # PyTorch refuses what is not `None`
        return None


def let_hooks_sleep(tensors: Iterable[Tensor]) -> Ends:
    """Wrap the hooks of tensors at which inner graphs end; called before each backward, for hooks come and go.

    Returns:
        Those that have hooks which would run in an inner backward.
    """
    ends: Ends = frozenset()
    for tensor in tensors:
        if hooks := tensor._backward_hooks:  # mostly there are none, and this is asked of very many
            ends |= let_these_sleep(hooks)
        late_hooks: Any = tensor._post_accumulate_grad_hooks
        if late_hooks:
            before = _Before(tensor.grad)
            for key, hook in [*late_hooks.items()]:  # at once, as other threads may register some
                if not isinstance(hook, _LateSleeper):
                    late_hooks[key] = hook = _LateSleeper(hook)
                hook.before = before
    return ends


def let_these_sleep(hooks: Any) -> Ends:
    """Wrap the hooks of one tensor, if it has any."""
    if not hooks:
        return frozenset()
    for key, hook in [*hooks.items()]:
        if not isinstance(hook, _Sleeper):
            # not `hooks[key] =`: dictionaries of ours take that for a hook that a user registers
            collections.OrderedDict.__setitem__(hooks, key, _Sleeper(hook, id(hooks)))
    return frozenset([id(hooks)])


@contextmanager
def sleeping_hooks(
    starts: Sequence[Node], ends: Ends, tensors: Callable[[], Iterable[Tensor]] = tuple
) -> Iterator[None]:
    """Run an inner backward that begins at `starts`: wrapped hooks at its ends do nothing in it.

    Args:
        starts: where it begins.
        ends: what `let_hooks_sleep` said.
        tensors: returns those at which it ends, to be asked when there may be more hooks.

    Raises:
        RuntimeError: there are hooks that were not there when it began.
    """
    noted: list[int] = []
    me = threading.get_ident()

    def note(_: object) -> None:
        if threading.get_ident() == me:  # others may begin there, too
            noted.append(torch._C._current_graph_task_id())
            _inner.backwards[noted[-1]] = ends

    handles = [node.register_prehook(note) for node in starts] if ends else []
    _inner.running.append((tensors, noted))
    try:
        yield
        _refuse_new_hooks(tensors())
    finally:
        _inner.running.pop()
        for handle in handles:
            handle.remove()
        for number in noted:
            _inner.backwards.pop(number, None)


def _refuse_new_hooks(tensors: Iterable[Tensor]) -> None:
    for tensor in tensors:
        hooks = tensor._backward_hooks
        if hooks and any(not isinstance(hook, _Sleeper) for hook in tuple(hooks.values())):
            raise RuntimeError(
                "parallel_apply, backward: expected hooks of weights, and of what else calls reach, to be there before "
                f"the backward, got one put on a tensor of shape {tuple(tensor.shape)} while a call's backward ran. "
                "It may have seen a part of the gradient. Put it there before, or call in a plain loop."
            )


def let_new_hooks_sleep() -> None:
    """Wrap what a forward that runs again, in an inner backward, has registered where this backward ends."""
    number = torch._C._current_graph_task_id()
    if _inner.running and number != -1:
        tensors, noted = _inner.running[-1]
        noted.append(number)
        _inner.backwards[number] = let_hooks_sleep(tensors())


@contextmanager
def all_hooks_sleep(ends: Ends) -> Iterator[None]:
    """Run inner backwards, wherever they begin: wrapped hooks at these ends do nothing on this thread."""
    outer, _inner.of_all = _inner.of_all, _inner.of_all | ends
    try:
        yield
    finally:
        _inner.of_all = outer


@contextmanager
def retained_grads_untouched(tensors: Sequence[Tensor]) -> Iterator[None]:
    """Put back the `.grad` of tensors that retain it: an inner backward adds its part, the outer one all."""
    before = [(tensor, tensor.grad) for tensor in tensors if tensor.retains_grad]
    try:
        yield
    finally:
        for tensor, grad in before:
            tensor.grad = grad
