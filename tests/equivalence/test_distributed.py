"""A mapped layer in `DistributedDataParallel` over two gloo processes has the gradients of one process."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.subprocesses import assert_prints, run_ranks


@pytest.mark.parametrize(("find_unused", "defers"), [(False, False), (True, False), (True, True)])
def test_two_processes_have_the_gradients_of_one(find_unused: bool, defers: bool, tmp_path: Path) -> None:
    """Also with an expert that is not used, which plain PyTorch serves with `find_unused_parameters=True`."""
    program = "import runpy; runpy.run_module('tests.support.distributed_program', run_name='__main__')"
    assert run_ranks(program, tmp_path / "store", find_unused, defers) == ["equal\n"] * 2


def test_a_mapped_layer_may_be_sharded_and_calls_that_would_reduce_too_early_are_refused() -> None:
    assert_prints(
        """
        import functools, warnings
        import torch, torch.distributed as dist
        from torch import nn
        from torch.distributed._composable import replicate
        from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
        from torch.nn.parallel import DistributedDataParallel
        from moe_autograd import parallel_apply
        from tests.support.comparison import one_after_another

        class Layer(nn.Module):
            def __init__(self, apply):
                super().__init__()
                torch.manual_seed(1)
                self.experts, self.apply_to = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)]), apply

            def forward(self, x):
                return sum(y.tanh() for y in self.apply_to([lambda x, m=m: m(x) for m in self.experts], [(x,)] * 4))

        def losses_of(model):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(3):
                loss = model(torch.ones(3, 4, requires_grad=True)).square().sum()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                yield round(loss.item(), 5)

        warnings.simplefilter("ignore")  # torch has some to say about one process
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        mesh = dist.init_device_mesh("cpu", (1,))
        options = dict(use_orig_params=True, device_id=torch.device("cpu"))
        for shard in (
            lambda layer: FullyShardedDataParallel(layer, **options),
            lambda layer: fully_shard(layer, mesh=mesh),
        ):
            applies = one_after_another, parallel_apply, functools.partial(parallel_apply, defer_weight_grads=True)
            natively, mapped, deferred = [list(losses_of(shard(Layer(apply)))) for apply in applies]
            assert natively == mapped == deferred, (natively, mapped, deferred)
        for wrap in (
            lambda expert: fully_shard(expert, mesh=mesh),
            lambda expert: FullyShardedDataParallel(expert, **options),
            lambda expert: DistributedDataParallel(expert, static_graph=True),
            lambda expert: replicate(expert, static_graph=True),
        ):
            layer = Layer(parallel_apply)
            for i, expert in enumerate(layer.experts):
                layer.experts[i] = wrap(expert)
            try:
                list(losses_of(layer))
            except TypeError as error:
                print("a step late" in str(error))
            with torch.no_grad():
                layer(torch.ones(3, 4))
            x = torch.ones(3, 4, requires_grad=True)
            frozen = layer.requires_grad_(False), Layer(one_after_another).requires_grad_(False)
            assert torch.equal(*[torch.autograd.grad(one(x).sum(), x)[0] for one in frozen])
        dist.destroy_process_group()
        """,
        "True True True True",
    )
