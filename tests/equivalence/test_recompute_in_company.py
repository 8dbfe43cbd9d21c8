"""Recompute with the other ways to save memory: offload, split backward, a checkpoint around the map."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import (
    checkpoint,
)

from moe_autograd.autograd.offload import OffloadedExperts
from moe_autograd.autograd.parallel import parallel_apply
from moe_autograd.autograd.split_backward import split_backward
from tests.support.operators import CountOperators
from tests.support.recomputing import (
    WORKERS,
    Checkpointed,
    assert_same,
    experts_of,
    ffn,
    gradients,
    one_after_another_checkpointed,
)


@pytest.mark.parametrize("workers", WORKERS)
def test_offloaded_and_recomputed_experts(workers: int) -> None:
    plain = experts_of(lambda: ffn(0.5))
    offloaded = OffloadedExperts(
        copy.deepcopy(plain), lambda p: torch.optim.SGD(p, lr=0.1), max_resident_bytes=1200
    )
    found = []
    for recompute in (False, True):
        x = torch.ones(5, 4, requires_grad=True)
        torch.manual_seed(5)
        outputs = parallel_apply(list(offloaded), [(x,)] * 8, max_concurrency=workers, recompute=recompute)
        torch.stack(outputs).sum().backward()
        found.append(
            [x.grad, *(offloaded.gradients(i)[name] for i in range(8) for name in offloaded.gradients(i))]
        )
        offloaded.zero_grad()
    assert_same(*found)
    assert offloaded.residency.peak_bytes <= 1200


class Counted(nn.Module):
    """Notes how many activations are alive, of all experts of one list."""

    def __init__(self, alive: list[weakref.ref[Tensor]]) -> None:
        super().__init__()
        self.weight, self.alive, self.most = nn.Parameter(torch.ones(4)), alive, 0

    def forward(self, x: Tensor) -> Tensor:
        h = (x * self.weight).exp()
        self.alive.append(weakref.ref(h))
        self.most = max(self.most, sum(one() is not None for one in self.alive))
        return h * h


@pytest.mark.usefixtures("no_gc")
def test_of_a_recomputed_layer_of_offloaded_experts_one_has_its_activations_at_a_time() -> None:
    alive: list[weakref.ref[Tensor]] = []
    modules = [Counted(alive) for _ in range(8)]
    offloaded = OffloadedExperts(modules, lambda p: torch.optim.SGD(p, lr=0.1), max_resident_bytes=64)
    x = torch.ones(5, 4, requires_grad=True)
    torch.stack(parallel_apply(list(offloaded), [(x,)] * 8, recompute=True)).sum().backward()
    assert len(alive) == 16
    assert [module.most for module in modules] == [1] * 8


def test_an_update_before_the_backward_of_a_recomputed_offloaded_expert_raises() -> None:
    offloaded = OffloadedExperts([ffn()], lambda p: torch.optim.SGD(p, lr=0.1), max_resident_bytes=1200)
    x = torch.ones(5, 4)
    first, second = (parallel_apply(list(offloaded), [(x,)], recompute=True)[0].sum() for _ in range(2))
    first.backward()
    offloaded.step()
    with pytest.raises(RuntimeError, match="updated 1 times since"):
        second.backward()


def test_recomputed_and_offloaded_experts_with_split_backward() -> None:
    plain = experts_of(ffn, num=3)
    offloaded = OffloadedExperts(
        copy.deepcopy(plain[:1]), lambda p: torch.optim.SGD(p, lr=0.1), max_resident_bytes=1200
    )
    recomputed = copy.deepcopy(plain)
    x = torch.randn(5, 4, requires_grad=True)
    h = offloaded[0](checkpoint(recomputed[1], x, use_reentrant=False))
    y = checkpoint(recomputed[2], h, use_reentrant=False)
    weights = [p for module in recomputed[1:] for p in module.parameters()]
    input_grads, pending = split_backward(y.sum(), None, x, weights)
    got = [*input_grads, *pending.run()]
    wanted_of = [p for module in plain[1:] for p in module.parameters()]
    total = plain[2](plain[0](plain[1](x))).sum()
    assert_same(got, torch.autograd.grad(total, [x, *wanted_of]))


def test_checkpoint_around_the_map() -> None:
    experts = experts_of(lambda: Checkpointed(ffn(0.5)), num=4)
    runs = []
    for around in (True, False):
        modules, x = copy.deepcopy(experts), torch.ones(5, 4, requires_grad=True)

        def layer(x: Tensor, modules: list[nn.Module] = modules) -> Tensor:
            return torch.stack(parallel_apply(modules, [(x,)] * 4)).sum(0)

        torch.manual_seed(2)
        y = checkpoint(layer, x, use_reentrant=False) if around else layer(x)
        y.sum().backward()
        runs.append([y, x.grad, *gradients(modules)])
    assert_same(*runs)


class HeadOfFrozen(nn.Module):
    """No gradient flows to its input, on which there is a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone, self.head = ffn(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x.register_hook(lambda grad: grad * 2)
        with torch.no_grad():
            features = self.backbone(x)
        return self.head(features)


def test_a_checkpoint_around_recomputed_calls_whose_inputs_nobody_asks_gradients_for() -> None:
    """In its second run the checkpoint keeps nothing that its backward does not ask for, such as these inputs."""
    said = []
    for apply in (parallel_apply, one_after_another_checkpointed):
        modules = [*experts_of(HeadOfFrozen, num=3), ffn()]
        x = torch.ones(5, 4, requires_grad=True)

        def layer(x: Tensor, apply: Any = apply, modules: list[nn.Module] = modules) -> Any:
            options = {"recompute": True} if apply is parallel_apply else {}
            return sum(apply(modules, [(x.sin(),) for _ in modules], **options))

        checkpoint(layer, x, use_reentrant=False).square().sum().backward()
        said.append([x.grad, *gradients(modules)])
    assert_same(*said)


def without_what_it_changed(x: Tensor) -> Tensor:
    changed = x.exp()
    scale = changed.sum().detach()
    changed.zero_()
    return x.sin() * scale


def with_what_it_changed(x: Tensor) -> Tensor:
    return x.exp().mul_(2)  # `exp` needs its result


AROUND: list[tuple[Callable[[], AbstractContextManager[object]], bool]] = [
    (save_on_cpu, False),
    (nullcontext, True),
]


@pytest.mark.parametrize(("hooks", "is_checkpointed"), AROUND, ids=["save_on_cpu", "checkpoint"])
def test_what_a_call_saved_and_then_changed_raises_in_a_backward_that_asks_for_it(
    hooks: Callable[[], AbstractContextManager[object]], is_checkpointed: bool
) -> None:
    """Hooks see it when the call has ended, too late; where it is left out of the graph, nobody asks."""

    def through(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        layer = lambda x: torch.stack(parallel_apply([function] * 4, [(x,)] * 4)).sum()  # noqa: E731
        with hooks():
            y = checkpoint(layer, x, use_reentrant=False) if is_checkpointed else layer(x)
        assert isinstance(y, Tensor)
        return y

    x = torch.ones(3, 4, requires_grad=True)
    y = through(without_what_it_changed, x)
    natively = torch.stack([without_what_it_changed(x) for _ in range(4)]).sum()
    assert_same(torch.autograd.grad(y, x), torch.autograd.grad(natively, x))
    y = through(with_what_it_changed, x)
    with pytest.raises(RuntimeError, match="before its saved-tensor hook could see it"):
        y.backward()


def test_modes_neither_see_nor_make_up_how_random_numbers_are_put_aside() -> None:
    """A checkpoint does so in each call; a plain one asks the generator alone, which is no operator."""

    def run() -> Tensor:
        x = torch.ones(3, 4, requires_grad=True)
        y = torch.stack(parallel_apply([nn.Linear(4, 4) for _ in range(4)], [(x,)] * 4, recompute=True)).sum()
        y.backward()
        return y

    with FakeTensorMode():
        assert isinstance(run(), FakeTensor)
    with CountOperators() as counting:
        run()
    assert "random_" not in counting.counts
    assert "equal" not in counting.counts
