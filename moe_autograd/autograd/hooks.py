"""Two moments of a backward: just before a layer's own begins, and when the whole of it has ended.

Whoever wants to fetch something ahead (offloaded weights, a remote expert's place in a queue) needs the first,
and whoever has to wait for it or tidy up needs the second::

    forward     layer 1 ──▶ layer 2 ──▶ layer 3 ──▶ loss
    backward    layer 1 ◀── layer 2 ◀── layer 3 ◀── loss
              ▲           ▲           ▲
              │           │           └ before_backward(outputs of layer 3): start to load layer 2
              │           └ before_backward(outputs of layer 2): start to load layer 1
              └ at_end_of_backward: all is there

PyTorch fires hooks of tensors and of nodes. A layer with several outputs would hear of each, so the first is
`torch.autograd.graph.register_multi_grad_hook(mode="any")`. The engine calls back at the end of a backward, but
of the one that asks: a backward on a worker thread, or one inside another, ends long before the outermost. Whoever
starts such backwards wraps them in `nested_backwards()`, and what is asked for inside waits for the outermost end.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Hashable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch.autograd import Variable
from torch.autograd.graph import register_multi_grad_hook
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from moe_autograd._contexts import contextmanager
from moe_autograd.autograd.this_backward import kept_by_this_backward
from moe_autograd.autograd.uncompiled import left_alone


def before_backward(outputs: Any, function: Callable[[], object]) -> RemovableHandle:
    """Call a function once in every backward through a layer, before the layer's own backward begins.

    Args:
        outputs: all that the layer returned: a tensor, or any nesting of tuples, lists and dicts of them. What
            requires no gradient is passed over; if nothing does, there is no backward and no call.
        function: takes nothing; what it returns is ignored. The layer's backward waits for it: start the work
            elsewhere. What it raises, the backward raises.

    Returns:
        A handle; `remove()` unregisters.

    Autograd: it fires when the first of the outputs receives its gradient, once for each backward (`.backward()`
    or `torch.autograd.grad`) that passes through any of them. A forward that is run again (checkpointing) may
    register again: no backward passes through those outputs, or only one through them does. The graph holds
    `function`: hold no tensor of the graph in it.

    Threads: it fires in the thread that runs this part of the backward.

    Example:
        >>> x = torch.ones(2, requires_grad=True)
        >>> a, b = x * 2, x * 3
        >>> _ = before_backward((a, b), lambda: print("soon"))
        >>> (a + b).sum().backward()
        soon
    """
    tensors = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    return register_multi_grad_hook(tensors, lambda _: _discard(function()), mode="any")


def at_end_of_backward(function: Callable[[], object]) -> None:
    """Call a function once, at the end of the whole backward that runs right now.

    Asking again with the same function, in the same backward, changes nothing.

    Args:
        function: takes nothing. It runs before `.backward()` returns, after every gradient is there, in the order
            of asking. What it raises, the backward raises. A backward that fails calls none; nor is any called that
            was asked for in one inside it that failed.

    Raises:
        RuntimeError: no backward is running in this thread.

    Threads: it runs in the thread that called the outermost backward.

    Example:
        >>> x = torch.ones(2, requires_grad=True)
        >>> y = x * 2
        >>> _ = before_backward(y, lambda: at_end_of_backward(lambda: print(x.grad)))
        >>> y.sum().backward()
        tensor([2., 2.])
    """
    outermost = _outermost_end()
    if outermost is not None and not _is_in_backward():  # on a thread where its own has not begun yet
        outermost.add(function)
    else:
        _end_of_this_backward().add(function)


@contextmanager
def nested_backwards() -> Iterator[None]:
    """Inside, a backward that ends is not the end: `at_end_of_backward` waits for the one that runs now.

    For whoever starts backwards inside a backward. On other threads they need the caller's `contextvars`. Outside
    of any backward it does nothing.
    """
    if _outermost_end() is not None or not _is_in_backward():
        yield
        return
    token = _outermost.set(weakref.ref(_end_of_this_backward()))
    try:
        yield
    finally:
        _outermost.reset(token)


class _End:
    """What to call at the end of one backward. The engine owns it, so it goes when the backward fails.

    Args:
        outermost: the end of the backward around it, which does the calling if there is one.
    """

    def __init__(self, outermost: _End | None) -> None:
        self._outermost = outermost
        self._lock = threading.Lock()
        self._asked = set[object]()
        self._functions = list[Callable[[], object]]()

    def add(self, function: Callable[[], object]) -> None:
        key = function if isinstance(function, Hashable) else id(function)
        with self._lock:
            if key not in self._asked:
                self._asked.add(key)
                self._functions.append(function)

    @left_alone
    def __call__(self) -> None:
        try:
            for function in self._functions:  # grows: one that is called may ask for more
                if self._outermost is None:
                    function()
                else:
                    self._outermost.add(function)
        finally:  # an error holds this frame
            self._functions.clear()
            self._asked.clear()


# A weak reference: where Ctrl-C comes just as `nested_backwards` would be left, this outlasts its backward.
_outermost: ContextVar[weakref.ref[_End] | None] = ContextVar("_outermost", default=None)


def _outermost_end() -> _End | None:
    end = _outermost.get()
    return None if end is None else end()


def _end_of_this_backward() -> _End:
    if not _is_in_backward():
        raise RuntimeError(
            "at_end_of_backward: expected a call from inside a backward, got one from outside. "
            "Call it in a hook, for example that of before_backward."
        )
    return kept_by_this_backward(_End, _queued_end)


def _queued_end() -> _End:
    end = _End(_outermost_end())
    Variable._execution_engine.queue_callback(end)
    return end


def _is_in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1


def _discard(_: object) -> None:
    """Return nothing: a tensor that a hook returns would replace the gradient."""
