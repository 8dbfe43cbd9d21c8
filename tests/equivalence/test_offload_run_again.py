"""Offloaded experts draw what plain modules draw, also where a backward runs them again, and keep its buffers."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from moe_autograd import parallel_apply
from moe_autograd.autograd.offload import OffloadedExperts
from tests.support.offloading import OPTIMIZERS, assert_same_gradients, assert_same_weights, both, ffn


@pytest.mark.parametrize("options", [{}, {"recompute": True}, {"defer_weight_grads": True}], ids=str)
@pytest.mark.parametrize("beside", [0, 2])
def test_random_numbers_are_those_of_a_map_whose_experts_are_all_in_memory(
    beside: int, options: dict[str, Any]
) -> None:
    """Also where some are not offloaded."""
    experts, plain = both(lambda: nn.Sequential(ffn(), nn.Dropout(0.5)))
    mixed = [*plain[:beside], *list(experts)[beside:]]
    said = []
    for modules, own in ((plain, {}), (mixed, options)):
        x = torch.ones(4, 8, requires_grad=True)
        torch.manual_seed(4)
        outputs = parallel_apply(modules, [(x,)] * 5, **own)
        torch.stack(outputs).square().sum().backward()
        said.append([*outputs, x.grad, torch.rand(3)])
    torch.testing.assert_close(said[1], said[0])
    assert not torch.equal(said[0][0], said[0][1])


@pytest.mark.parametrize("options", [{}, {"recompute": True}], ids=str)
def test_random_numbers_of_backwards_are_those_of_a_map_whose_experts_are_all_in_memory(
    options: dict[str, Any],
) -> None:
    class Drawing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x).clone()
            y.register_hook(lambda grad: grad * torch.rand_like(grad))
            return y

    experts, plain = both(lambda: Drawing(8, 8))
    said = []
    for modules in (plain, list(experts)):
        x = torch.ones(4, 8, requires_grad=True)
        torch.manual_seed(4)
        outputs = parallel_apply(modules, [(x,)] * 5, **options)
        torch.stack(outputs).square().sum().backward()
        said.append([x.grad, torch.rand(3)])
    torch.testing.assert_close(said[1], said[0])
    assert_same_gradients(experts, plain)


@pytest.mark.parametrize("is_within", [True, False])
@pytest.mark.parametrize("in_a_map", [True, False])
def test_rrelu_is_run_again_in_the_backward(in_a_map: bool, is_within: bool) -> None:
    """A second run saves what the first one did: of rrelu, that depends on whose numbers it draws (`_random`)."""

    class Expert(nn.Sequential):
        def forward(self, x: Tensor) -> Any:
            run = super().forward
            return checkpoint(run, x, use_reentrant=False) if is_within else run(x)

    experts, plain = both(lambda: Expert(nn.Linear(8, 8), nn.RReLU(), nn.Linear(8, 8)), 1)
    x = torch.randn(4, 8)
    for one in (experts[0], plain[0]):
        torch.manual_seed(4)
        if in_a_map:
            (y,) = parallel_apply([one], [(x,)], recompute=not is_within)
        else:
            y = one(x) if is_within else checkpoint(one, x, use_reentrant=False)
        y.square().sum().backward()
    assert_same_gradients(experts, plain)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointed_by_the_caller_with_dropout(use_reentrant: bool) -> None:
    experts, plain = both(lambda: nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 8)))
    x = torch.randn(4, 8, requires_grad=True)
    found = []
    for modules in (experts, plain):
        torch.manual_seed(3)
        h = x
        for module in modules:
            h = checkpoint(module, h, use_reentrant=use_reentrant)
        found.append((h.detach(), *torch.autograd.grad(h.sum(), x)) if not use_reentrant else (h.detach(),))
        torch.manual_seed(3)
        h = x
        for module in modules:
            h = checkpoint(module, h, use_reentrant=use_reentrant)
        h.sum().backward()
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want)
    assert_same_gradients(experts, plain)


def step(experts: OffloadedExperts, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    for one in (experts, *optimizers):
        one.step()
        one.zero_grad()


def with_statistics() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Tanh())


class Checkpointed(nn.Module):
    """Runs its inside again in the backward."""

    def __init__(self, is_map: bool) -> None:
        super().__init__()
        self.inside, self.is_map = nn.ModuleList([with_statistics(), with_statistics()]), is_map

    def forward(self, x: Tensor) -> Tensor:
        if self.is_map:
            return sum(parallel_apply(list(self.inside), [(x,)] * 2, recompute=True))  # type: ignore[return-value]
        return sum(checkpoint(module, x, use_reentrant=False) for module in self.inside)  # type: ignore[return-value]


@pytest.mark.parametrize("is_map", [False, True])
@pytest.mark.parametrize("update", ["on_step", "on_backward"])
def test_buffers_that_a_backward_changes_are_kept(is_map: bool, update: Any) -> None:
    experts, plain = both(lambda: Checkpointed(is_map).double(), optimizer=OPTIMIZERS["sgd"], update=update)
    optimizers = [OPTIMIZERS["sgd"](module.parameters()) for module in plain]
    for _ in range(3):
        x = torch.randn(4, 8, dtype=torch.float64)
        for modules in (experts, plain):
            sum(module(x) for module in modules).square().sum().backward()
        step(experts, optimizers)
    assert_same_weights(experts, plain)


@pytest.mark.parametrize("is_map", [False, True])
@pytest.mark.parametrize("update", ["on_step", "on_backward"])
@pytest.mark.parametrize("retains_graph", [False, True])
def test_a_checkpoint_around_many_experts_runs_each_again_once(
    retains_graph: bool, update: Any, is_map: bool
) -> None:
    """For each backward that it sees it runs them all again, and each expert's own backward is one."""
    experts, plain = both(
        lambda: with_statistics().double(), num=4, optimizer=OPTIMIZERS["sgd"], update=update
    )
    optimizers = [OPTIMIZERS["sgd"](module.parameters()) for module in plain]

    def layer(modules: Any, x: Tensor) -> Any:
        ys = (
            parallel_apply(list(modules), [(x.sin(),)] * 4)
            if is_map
            else [module(x.sin()) for module in modules]
        )
        return sum(ys)

    for _ in range(3):
        x, found = torch.randn(4, 8, dtype=torch.float64, requires_grad=True), []
        for modules in (experts, plain):
            y = checkpoint(layer, modules, x, use_reentrant=False)
            if retains_graph and update == "on_step":
                torch.autograd.backward(y.cos().sum(), retain_graph=True)
            y.square().sum().backward()
            found.append(x.grad)
            x.grad = None
        torch.testing.assert_close(*found)
        step(experts, optimizers)
    assert_same_weights(experts, plain)


@pytest.mark.usefixtures("no_gc")
def test_what_a_checkpoint_has_computed_again_goes_with_its_backward() -> None:
    class Expert(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            made.append(weakref.ref(y.untyped_storage()))
            return y.tanh() * y.sin()

    made: list[weakref.ref[torch.UntypedStorage]] = []
    experts, _ = both(lambda: Expert(8, 8))
    x = torch.randn(4, 8, requires_grad=True)
    y = checkpoint(lambda x: sum(expert(x) for expert in experts), x, use_reentrant=False)
    assert len(made) == 5
    y.sum().backward()
    assert len(made) == 10
    assert all(storage() is None for storage in made)


class Shares(nn.Module):
    """Two parts share a buffer, and a call gives it to one first, and to the other after what it saves, or raises."""

    def __init__(self, first: str) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.parts = nn.ModuleDict({"a": nn.Module(), "b": nn.Module()})
        mean = torch.zeros(4)
        for part in self.parts.values():
            part.register_buffer("mean", mean)
        self.first, self.second = self.parts[first], self.parts["b" if first == "a" else "a"]

    def forward(self, x: Tensor) -> Tensor:
        self.first.mean = mean = self.first.mean * 0.9 + 1
        y: Tensor = self.linear(x + mean).relu()
        if y.isnan().any():
            raise FloatingPointError
        self.second.mean = mean
        return y


@pytest.mark.parametrize("first", ["a", "b"])
def test_a_second_run_ends_before_parts_that_share_a_buffer_all_have_the_new_one(first: str) -> None:
    """It had been refused."""
    experts, plain = both(lambda: Shares(first), num=3)
    for _ in range(3):
        grads = []
        for modules in (experts, plain):
            x = torch.ones(2, 4, requires_grad=True)
            torch.stack(parallel_apply(modules, [(x,)] * 3, recompute=True)).sum().backward()
            grads.append(x.grad)
        assert torch.equal(*grads)
        experts.zero_grad()
    for i, module in enumerate(plain):
        name = f"parts.{first}.mean"
        assert torch.equal(experts.state_dict(i)[name], module.state_dict()[name])


@pytest.mark.parametrize("first", ["a", "b"])
def test_what_a_call_raises_before_they_all_have_it_comes_out(first: str) -> None:
    experts, plain = both(lambda: Shares(first), num=1, optimizer=None)
    for modules in (experts, plain):
        with pytest.raises(FloatingPointError):
            modules[0](torch.full((2, 4), torch.nan))
    x = torch.ones(2, 4)
    for _ in range(2):
        assert torch.equal(experts[0](x), plain[0](x))
        torch.testing.assert_close(experts.state_dict(0), dict(plain[0].state_dict()))
