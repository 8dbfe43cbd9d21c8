"""Functions whose calls wait for each other, count each other, or hold on until they are let go.

Guarantees: no call waits longer than `PATIENCE_S`; whoever waits in vain raises, so that a test that would
deadlock fails instead.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.autograd import Function

PATIENCE_S = 120.0


class Meets(Function):
    """Doubles its input once every party has come to the barrier, in forward and again in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, barrier: threading.Barrier) -> Tensor:
        barrier.wait(PATIENCE_S)
        ctx.barrier = barrier
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.barrier.wait(PATIENCE_S)
        return grad * 2, None


class Crowd:
    """Counts who is inside at the same time.

    Mutable state: `inside`, `most`; `_lock` guards both.
    """

    def __init__(self) -> None:
        self.inside = 0
        self.most = 0
        self._lock = threading.Lock()

    @contextmanager
    def enter(self) -> Iterator[None]:
        with self._lock:
            self.inside += 1
            self.most = max(self.most, self.inside)
        try:
            yield
        finally:
            with self._lock:
                self.inside -= 1


class Counts(Function):
    """Doubles its input inside a crowd, where it gives others every chance to come in."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, crowd: Crowd) -> Tensor:
        ctx.crowd = crowd
        with crowd.enter():
            threading.Event().wait(0.001)
            return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        with ctx.crowd.enter():
            threading.Event().wait(0.001)
            return grad * 2, None


class Calls(Function):
    """Doubles its input and calls what it is given on the way, in forward or in backward.

    Args of a call: the input, what to call in forward, what to call in backward (each may be `None`).
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, in_forward: Any = None, in_backward: Any = None) -> Tensor:
        ctx.in_backward = in_backward
        if in_forward is not None:
            in_forward()
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if ctx.in_backward is not None:
            ctx.in_backward()
        return (grad * 2, None, None)[: len(ctx.needs_input_grad)]
