"""Modules with several results, those that were computed from each other too, as experts in several places."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn

from experts_server import ExpertsServer
from moe_autograd import parallel_apply
from moe_autograd.autograd.offload import OffloadedExperts
from moe_autograd.remote import connect
from tests.support.offloading import OPTIMIZERS

D = 4
Where = Literal["offloaded", "in micro-batches", "computed again", "remote", "remote, computed again"]


class Features(nn.Module):
    """Returns features, and classes that it computes from them."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.classes = nn.Linear(D, D), nn.Linear(D, D)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = self.features(x).tanh()
        return features, self.classes(features)


class Heads(Features):
    """Two results, neither of which was computed from the other."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.features(x), self.classes(x)


class Chain(Features):
    """Each result was computed from the one before."""

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        first = self.features(x)
        second = first.tanh()
        return first, second, self.classes(second)


class Doubled(Features):
    """Returns one tensor twice."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = self.features(x)
        return features, features


class Passing(Features):
    """Returns its input, beside what it computes from it."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return x, self.classes(x)


@contextlib.contextmanager
def expert_of(module: nn.Module, where: Where) -> Iterator[nn.Module]:
    """Hand a module over, and yield the expert that it has become."""
    if where.startswith("remote"):
        config = {"memory": {"recompute": where.endswith("again")}}
        with (
            ExpertsServer({"e.0": module}, optimizer=None, config=config, listen="127.0.0.1:0") as server,
            connect(server.address) as experts,
        ):
            yield experts["e.0"]
    else:
        options: Any = {"num_microbatches": 2} if where == "in micro-batches" else {}
        with OffloadedExperts([module], OPTIMIZERS["sgd"], max_resident_bytes=1 << 14, **options) as experts:
            yield experts[0]


def both(make: Callable[[], nn.Module]) -> tuple[nn.Module, nn.Module]:
    """Return one, and its copy."""
    torch.manual_seed(0)
    module = make()
    return module, copy.deepcopy(module)


def results_of(
    expert: nn.Module, where: Where = "offloaded", *, in_a_map: bool = False
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return an input, and what an expert makes of it."""
    x = torch.linspace(-1, 1, 2 * D).reshape(2, D).requires_grad_()
    if in_a_map:
        return x, parallel_apply([expert, torch.sin], [(x,), (x,)], recompute=where == "computed again")[0]
    if where == "computed again":
        return x, parallel_apply([expert], [(x,)], recompute=True)[0]
    return x, expert(x)
