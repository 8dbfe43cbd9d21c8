"""One of two processes that train a mapped layer in `DistributedDataParallel`; run as a program by a test.

Prints the largest difference between its gradients and those of one process over the whole batch.

    python -m tests.support.distributed_program RANK STORE_FILE FIND_UNUSED DEFER_WEIGHT_GRADS
"""

from __future__ import annotations

import contextlib
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from moe_autograd import parallel_apply
from moe_autograd.autograd import in_turn
from tests.support.module_programs import seeded
from tests.support.ranks import end_rank

NUM_EXPERTS = 4
in_turn.MOST_SMALL = -1  # the map's own machinery is what is tested


class Layer(nn.Module):
    """Experts over slices of the input; with `num_used` below their number, some get no gradient."""

    def __init__(self, num_used: int, *, is_mapped: bool, defers: bool = False) -> None:
        super().__init__()
        self.experts = nn.ModuleList(
            seeded(lambda: nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)))
        )
        self.num_used = num_used
        self.is_mapped = is_mapped
        self.defers = defers

    def forward(self, x: Tensor) -> Tensor:
        used = list(self.experts)[: self.num_used]
        if self.is_mapped:
            outputs = parallel_apply(used, [(x,)] * len(used), defer_weight_grads=self.defers)
        else:
            outputs = [expert(x) for expert in used]
        return torch.stack(outputs).sum(0)


def gradients(module: nn.Module, x: Tensor) -> list[Tensor | None]:
    no_sync = module.no_sync if isinstance(module, DistributedDataParallel) else contextlib.nullcontext
    for _ in range(2):  # the second pass uses the buckets that the first one built
        module.zero_grad()
        with no_sync():
            module(2 * x).pow(2).mean().backward()
        module(x).pow(2).mean().backward()  # its gradients add up to those of the other micro-batch
    return [p.grad for p in module.parameters()]


def main(rank: int, store: str, find_unused: bool, defers: bool) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=timedelta(seconds=60)
    )
    num_used = NUM_EXPERTS - find_unused
    whole = torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    expected = gradients(Layer(num_used, is_mapped=False), whole)
    layer = Layer(num_used, is_mapped=True, defers=defers)
    distributed = DistributedDataParallel(layer, find_unused_parameters=find_unused)
    got = gradients(distributed, whole.chunk(2)[rank])
    pairs = [(e, g) for e, g in zip(expected, got, strict=True) if e is not None]
    assert len(pairs) == 4 * num_used
    worst = max((e - g).abs().max().item() if g is not None else float("inf") for e, g in pairs)
    print("equal" if worst < 1e-12 else worst)
    end_rank()


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3] == "True", sys.argv[4] == "True")
