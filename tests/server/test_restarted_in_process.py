"""A server that is started again in its process goes on, or back, as one of another process does."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from experts_server import ExpertsServer
from tests.support.checkpointing import BEGUN_AND_STOPPED, D
from tests.support.servers import WireClient, tokens


class Slowing(torch.optim.SGD):
    """What it learns is in its groups, as that of schedule-free optimizers is."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1)
        self.param_groups[0]["num_steps"] = 0

    def step(self, closure: Any = None) -> None:
        self.param_groups[0]["num_steps"] += 1
        self.param_groups[0]["lr"] = 0.1 / self.param_groups[0]["num_steps"]
        self.param_groups[0]["slowed"] = True
        super().step()


def server_in(folder: Path | None) -> ExpertsServer:
    torch.manual_seed(0)
    config = {} if folder is None else {"checkpoint_dir": str(folder), "keep_checkpoints": 9}
    return ExpertsServer({"e": nn.Linear(D, D)}, optimizer=Slowing, config=config)


def train(server: ExpertsServer, num_steps: int) -> dict[str, Tensor]:
    with WireClient(server.address) as client:
        client.sequence = 1000 * server.num_updates["e"]
        for _ in range(num_steps):
            client.forward("e", tokens(5, D))
            client.backward("e", tokens(5, D, seed=1))
            client.step()
            client.zero_grad()
        return client.get_state()["e"]


def group_of(server: ExpertsServer) -> dict[str, Any]:
    training = server._experts["e"].training
    assert training is not None
    return training.optimizer.param_groups[0]


def test_what_an_optimizer_keeps_in_its_groups_outlives_starts_in_one_process(tmp_path: Path) -> None:
    with server_in(None) as server:
        expected = train(server, 7)
    server = server_in(tmp_path)
    for num_steps in (3, 2, 0):
        with server:
            train(server, num_steps)
    with server_in(tmp_path) as another:  # as a new process does
        assert group_of(another)["num_steps"] == 5
        torch.testing.assert_close(train(another, 2), expected, rtol=0, atol=0)


def test_going_back_to_an_earlier_generation_in_one_process_goes_back_in_the_groups_too(
    tmp_path: Path,
) -> None:
    server = server_in(tmp_path)
    for num_steps in (0, 2, 3):
        with server:
            train(server, num_steps)
    for path in tmp_path.glob("generation-*"):
        if path.name not in BEGUN_AND_STOPPED:  # before the first step
            shutil.rmtree(path)
    with server:
        group = group_of(server)
        assert (group["num_steps"], group["lr"], "slowed" in group) == (0, 0.1, False)
