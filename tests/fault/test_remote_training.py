"""Training goes on while servers are killed and started again: no step is lost, and it learns as well."""

from __future__ import annotations

import contextlib
import itertools
import json
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
from moe_autograd.remote import RemoteExperts, RemoteOptimizer, RetryPolicy, connect
from tests.support.servers import ServerProcess

NUM_SERVERS, EXPERTS_EACH, WIDTH, CLASSES = 3, 2, 16, 4
NUM_EXPERTS = NUM_SERVERS * EXPERTS_EACH
NUM_KILLS, EVERY_S = 12, 5.0  # a minute
STEPS_AFTER = 100  # the last of them
PAUSE_S = 0.05  # between steps: a minute of them without one takes both cores from other tests
NOISE = 0.02

CONFIG = """
listen = "{address}"
checkpoint_dir = {folder}
checkpoint_interval_s = 0.5
optimizer = {{ name = "adam", lr = 1e-2 }}
[experts."ffn.[{first}:{stop}]"]
class = "ffn"
args = {{ d_model = {width} }}
"""


class Server:
    """One of the servers.

    Attributes:
        num_kills: how often it has been killed, or is just to be.
        num_starts: how often it has been started, and was ready.
    """

    def __init__(self, index: int, folder: Path) -> None:
        self.num_kills = self.num_starts = 0
        self._index, self._folder = index, folder
        self._file = folder / f"{index}.toml"
        self._process = ServerProcess("--config", str(self._file))

    def start(self, address: str = "127.0.0.1:0") -> None:
        first = self._index * EXPERTS_EACH
        checkpoints = json.dumps(str(self._folder / str(self._index)))
        self._file.write_text(
            CONFIG.format(
                address=address, folder=checkpoints, first=first, stop=first + EXPERTS_EACH, width=WIDTH
            )
        )
        self.address = self._process.start().address
        self.num_starts += 1

    @property
    def life(self) -> int | None:
        """Which of its lives it lives; None: it dies, or begins anew."""
        num_kills, num_starts = self.num_kills, self.num_starts
        return num_starts if num_starts == num_kills + 1 else None

    def kill_and_restart(self) -> None:
        self.num_kills += 1
        self._process.kill()
        self.start(self.address)

    def __enter__(self) -> Server:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._process.__exit__()


class Killer(threading.Thread):
    """Kills the servers in turn, one every five seconds, as a power cut would, and starts each again where it was."""

    def __init__(self, servers: list[Server]) -> None:
        super().__init__()
        self._servers = servers
        self._is_given_up = threading.Event()
        self.num_kills = 0
        self.is_done = threading.Event()

    def run(self) -> None:
        began_at = time.monotonic()
        try:
            for server in itertools.islice(itertools.cycle(self._servers), NUM_KILLS):
                next_at = began_at + EVERY_S * (self.num_kills + 1)
                if self._is_given_up.wait(next_at - time.monotonic()):
                    return
                self.num_kills += 1
                server.kill_and_restart()
        finally:
            self.is_done.set()

    def give_up(self) -> None:
        """Kill no more; returns when the last one runs again."""
        self._is_given_up.set()
        if self.ident is not None:
            self.join()


class Books:
    """How often servers say that their experts were updated, compared with what training was told.

    One that lives on has updated an expert once for each step in which it had tokens. A step that had to be made again,
    since another server had lost its gradients, may have counted at each try.
    """

    def __init__(self, experts: RemoteExperts, servers: list[Server]) -> None:
        self._experts, self._servers = experts, servers
        self.num_compared = 0
        self._before = self._counts()

    def _counts(self) -> dict[tuple[int, int], int]:
        """Return the number of updates by expert and life of its server; without those of one that dies meanwhile."""
        lives = [server.life for server in self._servers]
        hosted = self._experts.info()
        alike = [
            life if life == server.life else None for life, server in zip(lives, self._servers, strict=True)
        ]
        return {
            (index, life): hosted[name].num_updates
            for index, name in enumerate(self._experts)
            if name in hosted and (life := alike[index // EXPERTS_EACH]) is not None
        }

    def compare(self, num_tries: int, tokens_per_expert: Tensor) -> None:
        now = self._counts()
        for key in self._before.keys() & now.keys():
            least = int(tokens_per_expert[key[0]] > 0)
            most = least if num_tries == 1 else num_tries
            assert least <= now[key] - self._before[key] <= most, f"expert {key[0]}, of {num_tries} tries"
            self.num_compared += 1
        self._before = now


class Model(nn.Module):
    def __init__(self, experts: RemoteExperts | list[nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = MixtureOfExperts(TopKRouter(WIDTH, NUM_EXPERTS, top_k=2), experts)
        self.head = nn.Linear(WIDTH, CLASSES)

    def loss(self, points: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the loss, and how many tokens each expert had."""
        y, routing = self.layer(points, return_routing=True)
        return nn.functional.cross_entropy(self.head(y), labels), routing.tokens_per_expert

    @torch.no_grad()
    def accuracy(self) -> float:
        points, labels = make_batch(torch.Generator().manual_seed(2), num_points=4096)
        return (self.head(self.layer(points)).argmax(dim=1) == labels).float().mean().item()


def make_batch(generator: torch.Generator, num_points: int = 64) -> tuple[Tensor, Tensor]:
    """Points around one centre a class, so widely that one in twelve is nearer to another one."""
    centres = torch.randn(CLASSES, WIDTH, generator=torch.Generator().manual_seed(9))
    labels = torch.randint(CLASSES, (num_points,), generator=generator)
    return centres[labels] + 1.5 * torch.randn(num_points, WIDTH, generator=generator), labels


def train_among_kills(experts: RemoteExperts, servers: list[Server], killer: Killer) -> tuple[int, float]:
    """Train from before the first kill until well after the last; return steps and accuracy."""
    model, remote = Model(experts), RemoteOptimizer(experts)
    local = torch.optim.Adam(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    books = Books(experts, servers)
    num_steps = num_steps_after = 0
    while num_steps_after < STEPS_AFTER:
        num_steps_after += killer.is_done.is_set()
        num_steps += 1
        points, labels = make_batch(generator)
        num_tries, is_done = 0, False
        while not is_done:
            num_tries += 1
            local.zero_grad()
            remote.zero_grad()
            loss, tokens_per_expert = model.loss(points, labels)
            loss.backward()
            try:
                remote.step()
                is_done = True
            except GradientsLostError:
                assert killer.num_kills > 0, "only a server that was killed loses gradients"
        local.step()
        books.compare(num_tries, tokens_per_expert)
        killer.is_done.wait(PAUSE_S)
        if num_steps == 5:
            killer.start()
    assert books.num_compared > num_steps * NUM_EXPERTS / 2
    return num_steps, model.accuracy()


def train_undisturbed(num_steps: int) -> float:
    """Train the same experts here, on the same batches; return the accuracy."""
    model = Model([FeedForwardExpert(WIDTH) for _ in range(NUM_EXPERTS)])
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    for _ in range(num_steps):
        optimizer.zero_grad()
        model.loss(*make_batch(generator))[0].backward()
        optimizer.step()
    return model.accuracy()


@pytest.mark.timeout(900)
def test_a_kill_every_five_seconds_for_a_minute_loses_no_step_and_costs_no_accuracy(tmp_path):
    """Undisturbed runs of 200 to 1,600 steps, on other batches, ended between 0.898 and 0.920: that is the noise."""
    with contextlib.ExitStack() as running:
        servers = [running.enter_context(Server(index, tmp_path)) for index in range(NUM_SERVERS)]
        killer = Killer(servers)
        retry = RetryPolicy(patience_s=600.0)
        experts = running.enter_context(
            connect([server.address for server in servers], timeout_s=800.0, retry=retry)
        )
        running.callback(killer.give_up)
        num_steps, accuracy = train_among_kills(experts, servers, killer)
    assert [server.num_kills for server in servers] == [NUM_KILLS // NUM_SERVERS] * NUM_SERVERS
    undisturbed = train_undisturbed(min(num_steps, 500))  # more no longer change it
    assert abs(accuracy - undisturbed) < NOISE, (num_steps, accuracy, undisturbed)
