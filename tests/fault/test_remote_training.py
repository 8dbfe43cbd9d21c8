"""Training goes on while servers are killed and started again: no step is lost, and it learns as well."""

from __future__ import annotations

import threading
from pathlib import Path

import torch
from torch import Tensor, nn

from moe_autograd.errors import GradientsLostError
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


def make_batch(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Points around one centre a class."""
    centres = torch.randn(CLASSES, WIDTH, generator=torch.Generator().manual_seed(9))
    labels = torch.randint(CLASSES, (64,), generator=generator)
    return centres[labels] + 0.5 * torch.randn(64, WIDTH, generator=generator), labels


def test_killing_and_restarting_each_server_in_turn_loses_no_step(tmp_path):
    torch.manual_seed(0)
    servers = [start(index, tmp_path) for index in range(NUM_SERVERS)]
    addresses = [server.address for server in servers]
    all_restarted = threading.Event()

    def kill_each_in_turn() -> None:
        try:
            for index, address in enumerate(addresses):
                servers[index].kill()
                servers[index] = start(index, tmp_path, address)
        finally:
            all_restarted.set()

    killer = threading.Thread(target=kill_each_in_turn)
    try:
        with connect(addresses, timeout_s=120.0, retry=RetryPolicy(patience_s=100.0)) as experts:
            router = TopKRouter(WIDTH, num_experts=len(experts), top_k=2)
            model = nn.Sequential(MixtureOfExperts(router, experts), nn.Linear(WIDTH, CLASSES))
            optimizers = local, remote = (
                torch.optim.Adam(model.parameters(), lr=1e-2),
                RemoteOptimizer(experts),
            )
            generator = torch.Generator().manual_seed(1)
            num_steps = num_steps_after = 0
            while num_steps_after < STEPS_AFTER:
                num_steps_after += all_restarted.is_set()
                num_steps += 1
                points, labels = make_batch(generator)
                is_done = False
                while not is_done:
                    for optimizer in optimizers:
                        optimizer.zero_grad()
                    nn.functional.cross_entropy(model(points), labels).backward()
                    try:
                        remote.step()
                        is_done = True
                    except GradientsLostError:
                        assert killer.is_alive() or all_restarted.is_set()
                local.step()
                if num_steps == 5:
                    killer.start()
            points, labels = make_batch(generator)
            with torch.no_grad():
                accuracy = (model(points).argmax(dim=1) == labels).float().mean().item()
    finally:
        killer.join(200)
        for server in servers:
            if server.process.returncode is None:
                server.kill()
    assert num_steps > STEPS_AFTER + 5
    assert accuracy > 0.9
