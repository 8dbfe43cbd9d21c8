"""What tests of a server that saves memory share: experts, a server with little room, and steps of training."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

from experts_server import ExpertsServer
from experts_server.configuration.config import MemoryConfig, OffloadConfig, ServingConfig
from moe_autograd import MixtureOfExperts, TopKRouter

D, NUM_EXPERTS = 8, 4


ALL_FOUR = MemoryConfig(recompute=True, split_backward=True, offload=True)


def make_adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-2)


class Dropping(nn.Module):
    """Draws random numbers and counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(D, 2 * D), nn.GELU(), nn.Dropout(0.5), nn.Linear(2 * D, D))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.net(x)  # type: ignore[no-any-return]


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=1.0)


def serving(
    modules: dict[str, nn.Module],
    memory: MemoryConfig,
    store: str | Path = "ram",
    optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] = make_adam,
    *,
    of_training: Mapping[str, Any] = MappingProxyType({}),
    **more: Any,
) -> ExpertsServer:
    """Leave memory for one update: weights, gradients, and with Adam two moments and counts."""
    weights = [tensor.nbytes for tensor in next(iter(modules.values())).parameters()]
    limit = sum(4 * size + 64 for size in weights) if optimizer is make_adam else 2 * sum(weights)
    offload = OffloadConfig(max_resident_bytes=limit, store=store)
    config = ServingConfig(memory=memory, offload=offload, **more)
    return ExpertsServer(modules, optimizer=optimizer, config=config, **of_training)


def trained(layer: MixtureOfExperts, optimizers: Sequence[Any], num_steps: int = 4) -> list[Tensor]:
    """Return losses, outputs' gradients and, at the end, all weights."""
    generator = torch.Generator().manual_seed(3)
    said: list[Tensor] = []
    for _ in range(num_steps):
        x = torch.randn(16, D, generator=generator).requires_grad_()
        loss = (layer(x) - x.detach().flip(-1)).square().mean()
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        assert x.grad is not None
        said += [loss.detach(), x.grad]
    return [*said, *layer.state_dict().values()]


def layer_of(experts: Any) -> MixtureOfExperts:
    torch.manual_seed(1)
    return MixtureOfExperts(TopKRouter(D, NUM_EXPERTS, top_k=2), experts)


def resident(server: ExpertsServer) -> Any:
    assert server._server is not None
    assert server._server.memory.offload is not None
    return server._server.memory.offload.residency


# ---- split backward


class AtWeights(torch.autograd.Function):
    """The identity on a weight; its backward calls a function with the gradient and returns what that returns."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, function: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.function = function
        return weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return ctx.function(grad), None


class Scale(nn.Module):
    """Multiplies by a weight; `function` sees the weight's gradient, in the second part of a backward."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(D))
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return x * AtWeights.apply(self.weight, self.function)  # type: ignore[no-any-return, no-untyped-call]
