"""Training on a device whose kernels come late: what does not wait for them shows in the numbers."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F

from tests.support.comparison import one_after_another
from tests.support.devices import DEVICE, HAS_GPU, LONG_CYCLES, hold_up

WIDTH, ROWS, NUM_EXPERTS, NUM_STEPS = 32, 24, 4, 3
SHORT_CYCLES = LONG_CYCLES // 10
Optimizers = Sequence[Any]


class _Late(Function):
    """Its kernels come late, in both passes, and so do those that wait for them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        hold_up(SHORT_CYCLES)
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        hold_up(SHORT_CYCLES)
        return grad * 1


def late(x: Tensor) -> Tensor:
    result: Tensor = _Late.apply(x)  # type: ignore[no-untyped-call]
    return result


class Expert(nn.Module):
    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH, dtype=torch.float64)
        self.down = nn.Linear(2 * WIDTH, WIDTH, dtype=torch.float64)
        self.dropout = dropout

    def forward(self, x: Tensor) -> Tensor:
        h = late(self.up(late(x)).tanh())
        y: Tensor = self.down(F.dropout(h, self.dropout, self.training))
        return y


def modules_of(make: Callable[[], nn.Module], num: int = NUM_EXPERTS) -> list[nn.Module]:
    torch.manual_seed(1)
    return [make().to(DEVICE) for _ in range(num)]


def bytes_of(module: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in module.parameters())


def a_batch() -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(ROWS, WIDTH, dtype=torch.float64, generator=generator).to(DEVICE)


def held_up(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    optimizer.register_step_pre_hook(lambda *_: hold_up(SHORT_CYCLES))
    return optimizer


def adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return held_up(torch.optim.Adam(parameters, lr=0.01))


def momentum(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return held_up(torch.optim.SGD(parameters, lr=0.01, momentum=0.9))


def train(
    layers: Sequence[Sequence[Any]],
    optimizers: Optimizers,
    apply: Callable[..., Any],
    num_steps: int = NUM_STEPS,
) -> list[Tensor]:
    """Return all outputs and gradients of the batch, and what the caller draws afterwards."""
    torch.manual_seed(3)
    said: list[Tensor] = []
    for _ in range(num_steps):
        x = a_batch().requires_grad_()
        hold_up(SHORT_CYCLES)
        h = x * 3
        for layer in layers:
            h = torch.stack([*apply(layer, [(h * (i + 1),) for i in range(len(layer))])]).sum(0).tanh()
        h.square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert x.grad is not None
        said += [h.detach(), x.grad]
    return [*said, torch.rand(3), torch.rand(3, device=DEVICE)]


def train_plain(
    layers: Sequence[Sequence[nn.Module]],
    make: Callable[..., Any],
    apply: Callable[..., Any] = one_after_another,
    num_steps: int = NUM_STEPS,
) -> list[Tensor]:
    own = copy.deepcopy(layers)
    optimizers = [make(module.parameters()) for layer in own for module in layer]
    return train(own, optimizers, apply, num_steps)


@contextlib.contextmanager
def side_stream(wanted: bool) -> Iterator[None]:
    if not (wanted and HAS_GPU):
        yield
        return
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)
