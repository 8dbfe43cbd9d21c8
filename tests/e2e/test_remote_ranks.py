"""Experts of servers in a model whose other weights `DistributedDataParallel` keeps alike on several ranks."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from experts_server import ExpertsServer
from moe_autograd import FeedForwardExpert, MixtureOfExperts, TopKRouter
from moe_autograd.remote import RemoteOptimizer, connect
from tests.support.hosting import sgd
from tests.support.ranks import end_rank
from tests.support.subprocesses import run_ranks

D_MODEL, NUM_EXPERTS, NUM_RANKS, NUM_STEPS, NUM_TOKENS = 6, 4, 2, 4, 8

WAYS = {
    "plain": DistributedDataParallel,
    "static_graph": partial(DistributedDataParallel, static_graph=True),
    "find_unused_parameters": partial(DistributedDataParallel, find_unused_parameters=True),
}


def make_experts() -> dict[str, FeedForwardExpert]:
    torch.manual_seed(0)
    return {f"ffn.{i}": FeedForwardExpert(D_MODEL).double() for i in range(NUM_EXPERTS)}


def make_model(experts: Mapping[str, nn.Module]) -> nn.Module:
    torch.manual_seed(1)
    layer = MixtureOfExperts(TopKRouter(D_MODEL, NUM_EXPERTS, top_k=2), experts)
    return nn.Sequential(nn.Linear(D_MODEL, D_MODEL), layer).double()


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    """Return the loss of the tokens that one rank has in one step; later ranks have more."""
    numbers = torch.Generator().manual_seed(NUM_RANKS * step + rank)
    x = torch.randn(NUM_TOKENS + rank, D_MODEL, dtype=torch.float64, generator=numbers)
    y: Tensor = model(x)
    return y.square().mean()


def train_one_rank(rank: int, folder: str, *addresses: str) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=NUM_RANKS
    )
    with connect(addresses, timeout_s=60) as experts:
        for way, wrap in WAYS.items():
            model = make_model({name: experts[name] for name in experts if name.startswith(way)})
            train_with(wrap(model), model, RemoteOptimizer(experts), rank)
            save_file(without_experts(model), f"{folder}/{way}-{rank}")
        if rank == 0:
            save_file(experts.state_dict(), f"{folder}/experts")
    end_rank()


def train_with(wrapped: Any, model: nn.Module, there: RemoteOptimizer, rank: int) -> None:
    here = sgd(model.parameters())
    for step in range(NUM_STEPS):
        here.zero_grad(), there.zero_grad()
        if step % 2:  # two micro-batches
            with wrapped.no_sync():
                loss_of(wrapped, rank, NUM_STEPS + step).backward()
        loss_of(wrapped, rank, step).backward()
        dist.barrier()  # no rank computes with weights that another one has updated
        here.step(), there.step()
        dist.barrier()


def train_here(model: nn.Module) -> None:
    """Train as all ranks together do: those of each rank are an update of the hosted experts, which so get the sum."""
    optimizer = sgd(model.parameters())
    averaged = [p for name, p in model.named_parameters() if ".experts." not in name]
    for step in range(NUM_STEPS):
        optimizer.zero_grad()
        for rank in range(NUM_RANKS):
            if step % 2:
                loss_of(model, rank, NUM_STEPS + step).backward()
            loss_of(model, rank, step).backward()
        for parameter in averaged:
            assert parameter.grad is not None
            parameter.grad /= NUM_RANKS
        optimizer.step()


def without_experts(model: nn.Module) -> dict[str, Tensor]:
    return {name: weight for name, weight in model.state_dict().items() if ".experts." not in name}


def test_ranks_with_experts_on_two_servers_train_as_one_process_does(tmp_path: Path) -> None:
    program = (
        f"import sys; from {__name__} import train_one_rank; train_one_rank(int(sys.argv[1]), *sys.argv[2:])"
    )
    hosted = [(f"{way}.{name}", expert) for way in WAYS for name, expert in make_experts().items()]
    with (
        ExpertsServer(dict(hosted[::2]), optimizer=sgd) as one,
        ExpertsServer(dict(hosted[1::2]), optimizer=sgd) as other,
    ):
        run_ranks(program, tmp_path, one.address, other.address, num_ranks=NUM_RANKS)

    local = make_experts()
    model = make_model(local)
    before = copy.deepcopy(local)
    train_here(model)
    trained = load_file(tmp_path / "experts")
    for way in WAYS:
        for name, expert in local.items():
            for key, weight in expert.state_dict().items():
                torch.testing.assert_close(trained[f"{way}.{name}.{key}"], weight)
        for rank in range(NUM_RANKS):
            torch.testing.assert_close(load_file(tmp_path / f"{way}-{rank}"), without_experts(model))
    assert not torch.allclose(local["ffn.0"].up.weight, before["ffn.0"].up.weight)
