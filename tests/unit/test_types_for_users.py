"""What a type checker makes of a user's program: what the pages show is accepted, and results have their types."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

PROGRAM = """
from collections.abc import Iterator
from typing import assert_type

import torch
from torch import Tensor, nn

from experts_server import ExpertsServer
from moe_autograd import FeedForwardExpert, MixtureOfExperts, Routing, TopKRouter, parallel_apply, split_backward
from moe_autograd.autograd.offload import OffloadedExpert, OffloadedExperts
from moe_autograd.autograd.split_backward import PendingWeightGradients
from moe_autograd.remote import HostedExpert, RemoteExpert, RemoteOptimizer, connect
from moe_autograd.timeline import Span, record_timeline


class HashRouter(nn.Module):
    num_experts = 2

    def forward(self, x: Tensor) -> Routing:
        logits = x.new_zeros(len(x), 2)
        return Routing(logits, logits.softmax(-1), (torch.arange(len(x)) % 2)[:, None], x.new_ones(len(x), 1))


class Logged(MixtureOfExperts):
    def forward(self, x: Tensor, *, return_routing: bool = False) -> Tensor | tuple[Tensor, Routing]:
        y, routing = super().forward(x, return_routing=True)
        print(routing.num_dropped)
        return (y, routing) if return_routing else y


def calls(members: nn.ModuleList, heads: nn.ModuleDict, x: Tensor, mask: Tensor) -> list[Tensor]:
    parallel_apply([torch.relu, nn.ReLU()], ((x,), [x]), max_concurrency=2, names=("f", "m"))
    parallel_apply(heads.values(), (x for _ in heads))
    masks: list[dict[str, Tensor]] = [{"mask": mask} for _ in members]
    return parallel_apply(members, [(x,)] * len(members), masks)


def layers(members: list[FeedForwardExpert], offloaded: OffloadedExperts, x: Tensor) -> None:
    MixtureOfExperts(TopKRouter(8, 4, 2), members, on_failure="drop")
    MixtureOfExperts(TopKRouter(8, 4, 2), offloaded)
    Logged(HashRouter(), nn.ModuleDict({"a": nn.Linear(8, 8), "b": nn.Linear(8, 8)}))
    assert_type(offloaded[0], OffloadedExpert)
    assert_type(offloaded[1:], list[OffloadedExpert])
    assert_type(offloaded.gradients(0), dict[str, Tensor | None])


def in_two_parts(stage: nn.Linear, x: Tensor) -> list[PendingWeightGradients]:
    y = stage(x)
    (grad_x,), pending = split_backward(y, torch.ones_like(y), x, stage.parameters())
    assert_type(grad_x, Tensor | None)
    assert_type(pending.run(), tuple[Tensor | None, ...])
    return [pending]


def server() -> Iterator[ExpertsServer]:
    with ExpertsServer({"ffn.0": nn.Linear(8, 8)}, optimizer=torch.optim.Adam, config={"drain_timeout_s": 1}) as up:
        assert_type(up.num_updates, dict[str, int])
        yield up


def remote(up: ExpertsServer) -> None:
    with connect(up.address) as experts, record_timeline() as timeline:
        MixtureOfExperts(TopKRouter(8, len(experts), 1), experts)
        optimizer = RemoteOptimizer(experts, on_failure="drop")
        RemoteOptimizer([experts["ffn.0"]])
        assert_type(optimizer.step(lambda: 1.0), float)
        assert_type(experts["ffn.0"], RemoteExpert)
        assert_type(experts.info(), dict[str, HostedExpert])
        assert_type(timeline.spans, list[Span])
"""


def test_a_users_program_passes_a_strict_type_checker(tmp_path: Path) -> None:
    """With our own options, for which the check of our own code has left what it knows of torch: 30 s otherwise."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    ended = subprocess.run(
        [sys.executable, "-m", "mypy", str(program)], cwd=ROOT, capture_output=True, text=True, timeout=280
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
