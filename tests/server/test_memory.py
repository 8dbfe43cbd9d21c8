"""Recompute, split backward, offload and prefetch inside the server: what is saved, and that nothing else changes."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from experts_server import ExpertsServer
from experts_server.config import MemoryConfig, OffloadConfig, ServingConfig, check_config
from moe_autograd import MixtureOfExperts, TopKRouter
from moe_autograd.errors import ConfigError, GradientsLostError
from moe_autograd.moe.experts import FeedForwardExpert
from moe_autograd.remote import RemoteOptimizer, connect
from tests.support.servers import START_S, WireClient, tokens

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


def bytes_for_one(module: nn.Module) -> int:
    """Return what one expert needs for an update with Adam: weights, gradients, two moments and step counts."""
    return sum(4 * tensor.nbytes + 64 for tensor in module.parameters())


def serving(
    modules: dict[str, nn.Module], memory: MemoryConfig, store: str | Path = "ram", **more: Any
) -> ExpertsServer:
    limit = bytes_for_one(next(iter(modules.values())))  # never two of them at once
    offload = OffloadConfig(max_resident_bytes=limit, store=store)
    config = ServingConfig(memory=memory, offload=offload, **more)
    return ExpertsServer(modules, optimizer=make_adam, config=config)


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


@pytest.mark.parametrize(
    "memory",
    [
        MemoryConfig(recompute=True),
        MemoryConfig(split_backward=True),
        MemoryConfig(recompute=True, offload=True),
        MemoryConfig(recompute=True, split_backward=True),
        ALL_FOUR,
        MemoryConfig(recompute=True, split_backward=True, offload=True, prefetch=False),
    ],
    ids=str,
)
@pytest.mark.parametrize("store", ["ram", "folder"])
def test_training_is_that_of_plain_local_experts(memory: MemoryConfig, store: str, tmp_path: Path) -> None:
    if store == "folder" and not memory.offload:
        pytest.skip("nothing would be stored")
    torch.manual_seed(0)
    experts = [FeedForwardExpert(D) for _ in range(NUM_EXPERTS)]
    hosted = {f"ffn.{i}": copy.deepcopy(expert) for i, expert in enumerate(experts)}
    local = layer_of(experts)
    expected = trained(local, [make_adam(local.parameters())])
    with (
        serving(hosted, memory, "ram" if store == "ram" else tmp_path) as server,
        connect(server.address) as there,
    ):
        layer = layer_of(there)
        got = trained(layer, [make_adam(layer.parameters()), RemoteOptimizer(there)])
    for one, other in zip(expected, got, strict=True):
        torch.testing.assert_close(other, one)
