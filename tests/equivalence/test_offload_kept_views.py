"""Views of its own weights that an expert keeps from call to call follow them, as in a plain module."""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from tests.support.offloading import OPTIMIZERS, assert_same_weights, both

ROOM_FOR_TWO = 2 * 72 * 4
X = torch.linspace(-1, 1, 32).view(4, 8)


class Keeps(nn.Module):
    """Looks up a view of its weight in its first call."""

    def __init__(self, keep: Callable[[nn.Module, Tensor], Any], kept: Callable[[nn.Module], Tensor]) -> None:
        super().__init__()
        self.own, self.memo, self.has_kept = nn.Linear(8, 8), {}, False
        self.keep, self.kept = keep, kept

    def forward(self, x: Tensor) -> Tensor:
        if not self.has_kept:
            self.keep(self, self.own.weight)
            self.has_kept = True
        return torch.tanh(self.own(x)) @ self.kept(self)


class Named(NamedTuple):
    columns: Tensor


@dataclasses.dataclass(slots=True)
class Box:
    named: Any


class Secretive(dict):
    def values(self) -> Any:
        raise AssertionError

    __iter__ = items = keys = values


def keep_in_a_dict(module: Any, weight: Tensor) -> None:
    module.memo["columns"] = weight.t()


def keep_in_a_closure(module: Any, weight: Tensor) -> None:
    columns = weight.t()
    module.look_up = lambda: columns


def keep_on_the_weight(module: Any, weight: Any) -> None:
    weight.columns = weight.t()


WAYS: dict[str, tuple[Callable[[Any, Tensor], Any], Callable[[Any], Tensor]]] = {
    "an attribute": (lambda m, weight: setattr(m, "columns", weight.t()), lambda m: m.columns),
    "of a part": (lambda m, weight: setattr(m.own, "columns", weight.t()), lambda m: m.own.columns),
    "without a graph": (lambda m, weight: setattr(m, "columns", weight.detach().t()), lambda m: m.columns),
    "by .data": (lambda m, weight: setattr(m, "columns", weight.data), lambda m: m.columns),
    "in a dict": (keep_in_a_dict, lambda m: m.memo["columns"]),
    "in a list": (
        lambda m, weight: setattr(m, "rows", [weight[:3], weight[3:]]),
        lambda m: torch.cat(m.rows),
    ),
    "in an object": (
        lambda m, weight: setattr(m, "box", Box(collections.deque([Named(weight.t())]))),
        lambda m: m.box.named[0].columns,
    ),
    "in a list in a dict that runs code of its own": (
        lambda m, weight: setattr(m, "memo", Secretive(columns=[weight.t()])),
        lambda m: m.memo["columns"][0],
    ),
    "in a closure": (keep_in_a_closure, lambda m: m.look_up()),
    "in a partial": (
        lambda m, weight: setattr(m, "look_up", functools.partial(torch.clone, weight.t())),
        lambda m: m.look_up(),
    ),
    "on the weight": (keep_on_the_weight, lambda m: m.own.weight.columns),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_view_that_is_kept_is_of_the_experts_own_weight_in_any_order(way: str) -> None:
    experts, plain = both(lambda: Keeps(*WAYS[way]), optimizer=None, max_resident_bytes=ROOM_FOR_TWO)
    with torch.no_grad():
        for order in ([0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]):
            for i in order:
                assert torch.equal(experts[i](X), plain[i](X))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("num_microbatches", [None, 2])
@pytest.mark.parametrize("update", ["on_step", "on_backward"])
def test_an_expert_that_keeps_a_view_trains_as_the_plain_module(
    way: str, update: str, num_microbatches: int | None, store: str | Path
) -> None:
    make = OPTIMIZERS["momentum"]
    experts, plain = both(
        lambda: Keeps(*WAYS[way]),
        optimizer=make,
        update=update,
        num_microbatches=num_microbatches,
        store=store,
    )
    optimizers = [make(module.parameters()) for module in plain]
    with experts:
        for _ in range(3):
            for modules in (experts, plain):
                sum(module(X).square().mean() for module in modules).backward()
            experts.step()
            experts.zero_grad()
            for one in optimizers:
                one.step()
                one.zero_grad()
            assert_same_weights(experts, plain)


def test_what_an_absent_expert_keeps_reads_as_nan_and_is_what_it_was_in_the_next_call() -> None:
    experts, plain = both(
        lambda: Keeps(*WAYS["an attribute"]), optimizer=None, max_resident_bytes=ROOM_FOR_TWO
    )
    with torch.no_grad():
        for modules in (experts, plain):
            for module in modules:
                module(X)
        kept = experts[0].stands_for.columns
        assert kept.isnan().all()
        assert torch.equal(experts[0](X), plain[0](X))
        assert torch.equal(kept, plain[0].columns)
