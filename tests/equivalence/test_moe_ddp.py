"""Where gradients are averaged over ranks, idle experts get zeros and training equals that of one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from moe_autograd.moe.experts import FeedForwardExpert
from moe_autograd.moe.layer import MixtureOfExperts
from moe_autograd.moe.routers import TopKRouter
from tests.support.ranks import end_rank
from tests.support.subprocesses import run_ranks

D_MODEL, NUM_EXPERTS, NUM_RANKS, NUM_STEPS = 6, 4, 2, 3


def layer_whose_last_expert_is_idle() -> MixtureOfExperts:
    """Positive tokens go to experts 0 and 1, depending on which half is larger; 2 and 3 get none."""
    torch.manual_seed(0)
    experts = [FeedForwardExpert(D_MODEL) for _ in range(NUM_EXPERTS)]
    layer = MixtureOfExperts(
        TopKRouter(D_MODEL, NUM_EXPERTS, top_k=1), experts, zero_grads_for_idle_experts=True
    )
    with torch.no_grad():
        layer.router.weight.zero_()
        layer.router.weight[0, :3] = layer.router.weight[1, 3:] = 1.0
        layer.router.weight[2:] = -1.0
    return layer.double()


def tokens_of(rank: int) -> Tensor:
    """Rank 0 has tokens for expert 0 alone, rank 1 for expert 1."""
    x = torch.full((5, D_MODEL), 0.1, dtype=torch.float64)
    x[:, 3 * rank : 3 * rank + 3] += torch.rand(
        5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(rank)
    )
    return x


def loss_of(y: Tensor) -> Tensor:
    y += 1.0  # in place, as a residual connection may be
    return y.square().sum()


def whole(tensor: Tensor | None) -> Tensor | None:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def sharded(layer: MixtureOfExperts) -> nn.Module:
    return fully_shard(layer, mesh=init_device_mesh("cpu", (NUM_RANKS,)))


WAYS: dict[str, Callable[[MixtureOfExperts], nn.Module]] = {
    "DistributedDataParallel": DistributedDataParallel,
    "fully_shard": sharded,
}


def train_one_rank(rank: int, folder: str, way: str) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=NUM_RANKS
    )
    layer = layer_whose_last_expert_is_idle()
    model = WAYS[way](layer)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        loss_of(model(tokens_of(rank))).backward()
        optimizer.step()
    weights = {name: whole(weight) for name, weight in layer.state_dict().items()}
    grads = {name: whole(parameter.grad) for name, parameter in layer.named_parameters()}
    if rank == 0:
        save_file(weights, f"{folder}/weights")
        save_file(grads, f"{folder}/grads")
    end_rank()


@pytest.mark.parametrize("way", WAYS)
def test_two_processes_train_the_layer_as_one_does(way: str, tmp_path: Path) -> None:
    program = (
        f"import sys; from {__name__} import train_one_rank; "
        f"train_one_rank(int(sys.argv[1]), sys.argv[2], {way!r})"
    )
    run_ranks(program, tmp_path, num_ranks=NUM_RANKS)
    weights, grads = load_file(tmp_path / "weights"), load_file(tmp_path / "grads")

    layer = layer_whose_last_expert_is_idle()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    for _ in range(NUM_STEPS):
        optimizer.zero_grad()
        losses = [loss_of(layer(tokens_of(rank))) for rank in range(NUM_RANKS)]
        (torch.stack(losses).sum() / NUM_RANKS).backward()  # DDP takes the mean over ranks
        optimizer.step()
    torch.testing.assert_close(weights, dict(layer.state_dict()))
    torch.testing.assert_close(grads, {name: p.grad for name, p in layer.named_parameters()})
    assert not grads["experts.2.up.weight"].any()
    assert grads["experts.0.up.weight"].any()
    assert grads["experts.1.up.weight"].any()
