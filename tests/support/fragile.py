"""An expert that fails when it is told to."""

from __future__ import annotations

from torch import Tensor, nn


class Fragile(nn.Module):
    """A linear layer that raises in its forward, or in its backward, while it is told to."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.linear = nn.Linear(d_model, d_model).double()
        self.fails_in = ""

    def forward(self, x: Tensor) -> Tensor:
        if self.fails_in == "forward":
            raise ArithmeticError("told to")
        y: Tensor = self.linear(x)
        if self.fails_in == "backward" and y.requires_grad:  # not in the forward of a server that recomputes
            y.register_hook(self._fail)
        return y

    def _fail(self, grad: Tensor) -> None:
        raise ArithmeticError("told to")
