"""Ten thousand updates through a network with every fault, and a hundred kills: each update counts once."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import nn

from experts_server import ExpertsServer
from moe_autograd import parallel_apply
from moe_autograd.remote import RemoteOptimizer, RetryPolicy, connect
from tests.support.proxy import Proxy
from tests.support.scale import Scale
from tests.support.subprocesses import ROOT

NUM_EXPERTS, NUM_STEPS, D = 100, 100, 4


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.01, momentum=0.9)


def make_experts() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    return {f"e.{n}": Scale(D) for n in range(NUM_EXPERTS)}


def weights_of(modules: Mapping[str, nn.Module]) -> list[nn.Parameter]:
    return [parameter for module in modules.values() for parameter in module.parameters()]


def train(experts: Iterable[nn.Module], optimizer: torch.optim.Optimizer | RemoteOptimizer) -> None:
    generator = torch.Generator().manual_seed(1)
    for _ in range(NUM_STEPS):
        x = torch.randn(3, D, generator=generator)
        optimizer.zero_grad()
        outputs = parallel_apply(list(experts), [(x,)] * NUM_EXPERTS)
        torch.stack(outputs).square().sum().backward()
        optimizer.step()


def test_ten_thousand_updates_through_a_faulty_network_are_bit_equal_to_those_made_here() -> None:
    here, there = make_experts(), make_experts()
    train(here.values(), sgd(weights_of(here)))
    retry = RetryPolicy(
        patience_s=100.0, budget=10_000.0, max_retries=1000, update_attempt_s=5.0, max_pause_s=0.05
    )
    with (
        ExpertsServer(there, optimizer=sgd) as server,
        Proxy(server.address, seed=7) as proxy,
        connect(proxy.address, timeout_s=200.0, retry=retry) as experts,
    ):
        proxy.flip_chance = proxy.cut_chance = proxy.repeat_chance = 0.01
        proxy.delay_s = 0.0005
        train(experts.values(), RemoteOptimizer(experts))
        counts = server.num_updates
    assert set(counts.values()) == {NUM_STEPS}
    assert min(proxy.num_flipped, proxy.num_cut, proxy.num_repeated) >= 3
    assert all(torch.equal(a, b) for a, b in zip(weights_of(here), weights_of(there), strict=True))


def test_after_a_hundred_kills_every_restart_loads_and_no_update_is_lost_or_counted_twice(
    tmp_path: Path,
) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "tests.support.kill_while_saving", str(tmp_path), "100"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    kills, interrupted = (int(word) for word in ended.stdout.split())
    assert kills == 100
    assert interrupted >= 10, "kills hit saves under way"
    assert {path.name.partition("-")[0] for path in tmp_path.iterdir()} <= {
        "generation",
        "lock",
        "writing",
        "removing",
    }
