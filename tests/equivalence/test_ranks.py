"""Layers spread over two processes, real ones: what they compute and learn is what a plain loop there does."""

from __future__ import annotations

import functools
import inspect
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from moe_autograd import MixtureOfExperts, TopKRouter, map_with_parallel_backward, parallel_apply
from moe_autograd.autograd import in_turn
from moe_autograd.autograd.contents.telling import TALKING
from tests.support.comparison import MapFunction, one_after_another
from tests.support.plain_layer import plain_loop
from tests.support.ranks import end_rank
from tests.support.subprocesses import run_ranks

WIDTH, NUM_RANKS, NUM_STEPS = 8, 2, 2
CPU = torch.device("cpu")
OPTIONS: list[dict[str, Any]] = [{}, {"recompute": True}, {"defer_weight_grads": True}]


class PlainLoop(MixtureOfExperts):
    def forward(self, x: Tensor, *, return_routing: bool = False) -> Tensor:
        return plain_loop(self, x)


class Model(nn.Module):
    """A mixture of experts and a map of calls of one size between two linear layers."""

    def __init__(self, apply: MapFunction, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(1)
        make = lambda: nn.Sequential(nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, WIDTH))  # noqa: E731
        self.apply_to = apply
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        kind = PlainLoop if apply is one_after_another else MixtureOfExperts
        self.layer = kind(TopKRouter(WIDTH, 4, 2), [make() for _ in range(4)], **options)
        self.experts = nn.ModuleList([make() for _ in range(4)])
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        x = x + self.layer(x)
        outputs = self.apply_to(list(self.experts), [(x * i,) for i in range(4)])
        return self.last(torch.stack(outputs).sum(0))


def in_flat_parameters(model: Model, *, use_orig_params: bool, wraps_experts: bool = False) -> nn.Module:
    wrap = functools.partial(FullyShardedDataParallel, use_orig_params=use_orig_params, device_id=CPU)
    for experts in (model.layer.experts, model.experts) if wraps_experts else ():
        for i, expert in enumerate(experts):
            experts[i] = wrap(expert)
    model.layer = wrap(model.layer)
    return wrap(model)


def fully_sharded(model: Model, mesh: Any) -> nn.Module:
    fully_shard(model.layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def replicated_one_by_one(model: Model) -> nn.Module:
    for i, expert in enumerate(model.experts):
        # It broadcasts its buckets in the second forward.
        model.experts[i] = DistributedDataParallel(expert)
    return model


def tensor_parallel(model: Model, mesh: Any) -> nn.Module:
    for expert in (*model.layer.experts, *model.experts):
        parallelize_module(expert, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    return model


def whole(tensor: Tensor | None) -> Tensor | None:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else None if tensor is None else tensor.clone()


def learned(model: nn.Module, seed: int) -> list[Tensor | None]:
    """Train for some steps of two micro-batches each; return losses, gradients and weights."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    said: list[Tensor | None] = []
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        for _ in range(2):
            x = torch.randn(24, WIDTH, dtype=torch.float64, generator=generator).requires_grad_()
            loss = model(x).square().mean()
            loss.backward()
            said += [loss.detach(), x.grad]
        said += [whole(p.grad) for p in model.parameters()]
        optimizer.step()
    return said + [whole(p.detach()) for p in model.parameters()]


def join_group(rank: int, folder: str) -> None:
    warnings.simplefilter("ignore")  # torch has some to say about a CPU
    in_turn.MOST_SMALL = -1
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=NUM_RANKS,
        timeout=timedelta(seconds=200),
    )


class SumOverRanks(torch.autograd.Function):
    """As tensor parallel layers have it."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return summed(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return summed(grad)


def summed(x: Tensor) -> Tensor:
    x = x.clone()
    dist.all_reduce(x)
    return x


class SumOfExperts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return SumOverRanks.apply(self.linear(x))


def exchanged(x: Tensor) -> Tensor:
    return all_to_all_single_autograd(x, None, None, dist.group.WORLD)


def talk_by_themselves(rank: int, folder: str) -> None:
    join_group(rank, folder)
    experts = [SumOfExperts() for _ in range(8)]
    ways: list[tuple[Callable[[Any], Any], Callable[[Any], Any]]] = [
        (
            lambda xs: [SumOverRanks.apply(x) for x in xs],
            lambda xs: map_with_parallel_backward(SumOverRanks, *zip(xs)),
        ),
        (lambda xs: [exchanged(x) for x in xs], lambda xs: parallel_apply([exchanged] * 8, list(zip(xs)))),
        *[
            (
                lambda xs: one_after_another(experts, list(zip(xs))),
                lambda xs, options=options: parallel_apply(experts, list(zip(xs)), **options),
            )
            for options in OPTIONS
        ],
    ]
    weights = [p for expert in experts for p in expert.parameters()]
    for natively, ours in ways * 3:
        x = torch.randn(8, 6, WIDTH, dtype=torch.float64).requires_grad_()
        said = []
        for way in (natively, ours):
            outputs = way(x.unbind())
            loss = sum(((i + 1) * y).square().sum() for i, y in enumerate(outputs))
            said.append([*outputs, *torch.autograd.grad(loss, [x, *weights], allow_unused=True)])
        torch.testing.assert_close(*said)
    end_rank()


def train_one_rank(rank: int, folder: str) -> None:
    join_group(rank, folder)
    mesh = dist.init_device_mesh("cpu", (NUM_RANKS,))
    ways: list[tuple[Callable[[Model], nn.Module], int]] = [
        (functools.partial(in_flat_parameters, use_orig_params=True), rank),
        (functools.partial(in_flat_parameters, use_orig_params=False), rank),
        (functools.partial(in_flat_parameters, use_orig_params=False, wraps_experts=True), rank),
        (functools.partial(fully_sharded, mesh=mesh), rank),
        (replicated_one_by_one, rank),
        (functools.partial(tensor_parallel, mesh=mesh), 0),  # all ranks have the same tokens
    ]
    for spread, seed in ways:
        natively = learned(spread(Model(one_after_another)), seed)
        for options in OPTIONS:
            ours = learned(spread(Model(functools.partial(parallel_apply, **options), **options)), seed)
            torch.testing.assert_close(
                ours, natively, msg=lambda text, where=(spread, options): f"{where}: {text}"
            )
    end_rank()


def test_layers_spread_over_two_ranks_learn_as_plain_loops_there(tmp_path: Path) -> None:
    """Also where each call talks with the other rank: then they take turns, for they have to talk in one order."""
    _run(train_one_rank, tmp_path)


def test_calls_that_name_a_collective_are_made_one_after_the_other(tmp_path: Path) -> None:
    """By a function of theirs, in an autograd function's backward as well: side by side they get each other's sums."""
    _run(talk_by_themselves, tmp_path)


# names that much else has, and functions that call no other rank, or make groups of them
NAMES_OF_OTHERS = {"barrier", "gather", "recv", "reduce", "scatter", "send"}
NO_COLLECTIVES = {
    *("get_backend", "get_backend_config", "get_backend_impl", "get_global_rank", "get_group_rank"),
    *("get_process_group_ranks", "get_rank", "get_world_size", "set_timeout"),
    *("destroy_process_group", "new_subgroups", "shrink_group"),
}


def test_every_collective_is_known_by_its_name() -> None:
    """A new version of torch that has another one fails here."""
    functions = [name for name, one in vars(dist).items() if type(one) is FunctionType and name[0] != "_"]
    found = {name for name in functions if "group" in inspect.signature(getattr(dist, name)).parameters}
    assert "all_reduce" in found
    assert found - NAMES_OF_OTHERS - NO_COLLECTIVES <= TALKING


def _run(one_rank: Callable[[int, str], None], folder: Path) -> None:
    name = one_rank.__name__
    program = f"import sys; from {__name__} import {name}; {name}(int(sys.argv[1]), sys.argv[2])"
    run_ranks(program, folder, num_ranks=NUM_RANKS)
