"""An expert whose forward or backward waits until it is let go."""

from __future__ import annotations

import threading

from torch import Tensor, nn


class Held(nn.Module):
    """A layer whose forward or backward waits until it is let go; counts those that have begun."""

    def __init__(self, phase: str, width: int = 4) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.phase = phase
        self.begun, self.may_go = threading.Event(), threading.Event()
        self.num_begun = 0

    def forward(self, x: Tensor) -> Tensor:
        if self.phase == "forward":
            self.hold()
        y = self.linear(x)
        if self.phase == "backward" and y.requires_grad:
            y.register_hook(lambda grad: self.hold())
        return y

    def hold(self) -> None:
        """Say that it has begun, and wait."""
        self.num_begun += 1
        self.begun.set()
        assert self.may_go.wait(120)
