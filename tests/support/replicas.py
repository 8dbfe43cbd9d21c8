"""Replicas of an expert that are stopped and started, each at one address or the other, with checkpoints."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from experts_server import ExpertsServer
from experts_server.configuration.config import ServingConfig
from moe_autograd.errors import ServerUnavailableError
from moe_autograd.remote import RemoteExperts
from tests.support.hosting import sgd


class Replicas:
    """Two replicas of `ffn.0`, each with a folder of checkpoints, at two addresses."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.addresses = ["127.0.0.1:0", "127.0.0.1:0"]
        self._at: list[tuple[int, ExpertsServer]] = []
        self.restart([0, 1])
        self.addresses = [server.address for _, server in self._at]

    def restart(self, which: Sequence[int | None]) -> None:
        """Start at each address this one of them, from its checkpoint."""
        self.stop()
        for address, replica in zip(self.addresses, which, strict=True):
            if replica is not None:
                module = nn.Linear(4, 4)
                nn.init.constant_(module.weight, replica + 1.0)
                config = ServingConfig(checkpoint_dir=self._folder / str(replica))
                server = ExpertsServer({"ffn.0": module}, optimizer=sgd, listen=address, config=config)
                self._at.append((replica, server.start()))

    def stop(self) -> None:
        while self._at:
            self._at.pop()[1].stop()

    def weight(self, which: int) -> Tensor:
        """Return the weight that one of them began with."""
        return torch.full((4, 4), which + 1.0)

    def num_updates(self, which: int) -> int:
        (server,) = [server for replica, server in self._at if replica == which]
        return server.num_updates["ffn.0"]


def is_lost(experts: RemoteExperts, address: str) -> bool:
    """Ask all servers; tell whether one does not answer."""
    with contextlib.suppress(ServerUnavailableError):
        experts.info()
    return experts.connection._finding.placement.is_lost(address)
