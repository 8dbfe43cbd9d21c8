"""A server that saves two small experts, and a client that trains them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn

from experts_server import ExpertsServer
from experts_server.checkpoints.snapshot import Snapshot
from experts_server.configuration.config import ServingConfig
from moe_autograd.moe.experts import FeedForwardExpert, SwiGLUExpert
from tests.support.servers import WireClient, tokens

D = 8
BEGUN_AND_STOPPED = ["generation-00000001", "generation-00000002"]


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=0.01)


def experts() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    return {"ffn.0": FeedForwardExpert(D), "glu.0": SwiGLUExpert(D, 4)}


def served(folder: Path, modules: dict[str, nn.Module] | None = None, optimizer: Any = adam) -> ExpertsServer:
    config = ServingConfig(checkpoint_dir=folder, keep_checkpoints=2)
    return ExpertsServer(experts() if modules is None else modules, optimizer=optimizer, config=config)


def train(client: WireClient, num_steps: int) -> None:
    for _ in range(num_steps):
        for name in ("ffn.0", "glu.0"):
            assert client.forward(name, tokens(5, D)).code == "OK"
            assert client.backward(name, tokens(5, D, seed=1)).code == "OK"
        client.step()
        client.zero_grad()


def snapshot_of(name: str, number: float) -> Snapshot:
    return Snapshot({"weights.w": torch.tensor([number])}, {"expert": name})
