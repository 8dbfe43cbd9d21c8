"""An expert whose forward or backward waits until it is let go."""

from __future__ import annotations

import threading
from pathlib import Path

from torch import Tensor, nn

from tests.support.servers import wait_until


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


class HeldElsewhere(Held):
    """The same in a server process: `folder` has a file `begun` once it has, and it waits there for one called `go`."""

    def __init__(self, phase: str, folder: str) -> None:
        super().__init__(phase)
        self.folder = Path(folder)

    def hold(self) -> None:
        (self.folder / "begun").touch()
        wait_until((self.folder / "go").exists)
