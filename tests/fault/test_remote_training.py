"""Training goes on while servers are killed and started again: no step is lost, and it learns as well."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from moe_autograd.errors import GradientsLostError
from moe_autograd.moe.experts import FeedForwardExpert
from moe_autograd.moe.layer import MixtureOfExperts
from moe_autograd.moe.routers import TopKRouter
from moe_autograd.remote import RemoteOptimizer, RetryPolicy, connect
from tests.support.servers import ServerProcess

NUM_SERVERS, EXPERTS_EACH, WIDTH, CLASSES = 3, 2, 16, 4
STEPS_AFTER = 60  # the last killed server's

CONFIG = """
checkpoint_dir = "{folder}"
checkpoint_interval_s = 0.5
optimizer = {{ name = "adam", lr = 1e-2 }}
[experts."ffn.[{first}:{stop}]"]
class = "ffn"
args = {{ d_model = {width} }}
"""


def start(index: int, folder: Path, address: str = "127.0.0.1:0") -> ServerProcess:
    file = folder / f"{index}.toml"
    first = index * EXPERTS_EACH
    checkpoints = folder / str(index)
    file.write_text(CONFIG.format(folder=checkpoints, first=first, stop=first + EXPERTS_EACH, width=WIDTH))
    return ServerProcess("--config", str(file), "--listen", address).start()


def make_batch(generator: torch.Generator, num_points: int = 64) -> tuple[Tensor, Tensor]:
    """Points around one centre a class."""
    centres = torch.randn(CLASSES, WIDTH, generator=torch.Generator().manual_seed(9))
    labels = torch.randint(CLASSES, (num_points,), generator=generator)
    return centres[labels] + 0.5 * torch.randn(num_points, WIDTH, generator=generator), labels


def make_model(experts) -> nn.Module:
    torch.manual_seed(0)
    router = TopKRouter(WIDTH, num_experts=len(experts), top_k=2)
    return nn.Sequential(MixtureOfExperts(router, experts), nn.Linear(WIDTH, CLASSES))


def accuracy_of(model: nn.Module) -> float:
    points, labels = make_batch(torch.Generator().manual_seed(2), num_points=4096)
    with torch.no_grad():
        return (model(points).argmax(dim=1) == labels).float().mean().item()


class Killer(threading.Thread):
    """Kills the servers in turn, as a power cut would, and starts each again where it was.

    Args:
        servers: by index; replaced as they are started again.
        folder: of their files.
        every_s: from one to the next, at least.
        for_s: how long; each is killed once at least.
    """

    def __init__(self, servers: list[ServerProcess], folder: Path, every_s: float, for_s: float) -> None:
        super().__init__()
        self.servers = servers
        self.folder = folder
        self.every_s = every_s
        self.for_s = for_s
        self.num_kills = 0
        self.all_restarted = threading.Event()
        self.given_up = threading.Event()

    def run(self) -> None:
        try:
            until = time.monotonic() + self.for_s
            while self.num_kills < len(self.servers) or time.monotonic() < until:
                index = self.num_kills % len(self.servers)
                address = self.servers[index].address
                self.servers[index].kill()
                self.servers[index] = start(index, self.folder, address)
                self.num_kills += 1
                if self.given_up.wait(self.every_s):
                    return
        finally:
            self.all_restarted.set()


def train_among_kills(folder: Path, every_s: float, for_s: float) -> tuple[int, int, float]:
    """Train over three servers, from before the first kill until after the last; return kills, steps and accuracy."""
    servers = [start(index, folder) for index in range(NUM_SERVERS)]
    killer = Killer(servers, folder, every_s, for_s)
    try:
        addresses = [server.address for server in servers]
        with connect(addresses, timeout_s=1000.0, retry=RetryPolicy(patience_s=900.0)) as experts:
            model, remote = make_model(experts), RemoteOptimizer(experts)
            local = torch.optim.Adam(model.parameters(), lr=1e-2)
            generator = torch.Generator().manual_seed(1)
            num_steps = num_steps_after = 0
            while num_steps_after < STEPS_AFTER:
                num_steps_after += killer.all_restarted.is_set()
                num_steps += 1
                points, labels = make_batch(generator)
                is_done = False
                while not is_done:
                    local.zero_grad()
                    remote.zero_grad()
                    nn.functional.cross_entropy(model(points), labels).backward()
                    try:
                        remote.step()
                        is_done = True
                    except GradientsLostError:
                        assert killer.ident is not None, "only a server that was killed loses gradients"
                local.step()
                if num_steps == 5:
                    killer.start()
            return killer.num_kills, num_steps, accuracy_of(model)
    finally:
        killer.given_up.set()
        if killer.ident is not None:
            killer.join()
        for server in servers:
            if server.process.returncode is None:
                server.kill()


def train_undisturbed(num_steps: int) -> float:
    """Train the same experts here, on the same batches; return the accuracy."""
    model = make_model([FeedForwardExpert(WIDTH) for _ in range(NUM_SERVERS * EXPERTS_EACH)])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    for _ in range(num_steps):
        points, labels = make_batch(generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(points), labels).backward()
        optimizer.step()
    return accuracy_of(model)


@pytest.mark.timeout(1200)  # six servers start, three of them after the first steps
def test_killing_and_restarting_each_server_in_turn_loses_no_step(tmp_path):
    num_kills, num_steps, accuracy = train_among_kills(tmp_path, every_s=0.0, for_s=0.0)
    assert num_kills == NUM_SERVERS
    assert num_steps > STEPS_AFTER + 5
    assert accuracy > 0.9


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_a_kill_every_five_seconds_costs_no_accuracy(tmp_path, request, capsys):
    """Both learn it all but wholly; of 4,096 points one in fifty more or less is taken for noise."""
    for_s = 60 * request.config.getoption("--soak-minutes")
    num_kills, num_steps, accuracy = train_among_kills(tmp_path, every_s=5.0, for_s=for_s)
    undisturbed = train_undisturbed(min(num_steps, 1000))  # more steps no longer change it
    with capsys.disabled():
        print(f"{num_kills} kills, {num_steps} steps: accuracy {accuracy:.4f}, undisturbed {undisturbed:.4f}")
    assert accuracy > undisturbed - 0.02
