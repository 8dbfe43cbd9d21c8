"""What is done to offloaded experts between their calls counts as with plain modules: freezing them, for one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from moe_autograd.autograd.offload import OffloadedExperts
from tests.support.offloading import OPTIMIZERS, assert_same_gradients, assert_same_weights, both, ffn

sgd = OPTIMIZERS["sgd"]
X = torch.linspace(-1, 1, 32).view(4, 8)


def loss_of(modules: OffloadedExperts | list[nn.Module], x: Tensor = X) -> Tensor:
    return sum(module(x).square().mean() for module in modules)


def step(experts: OffloadedExperts, optimizers: list[torch.optim.Optimizer]) -> None:
    experts.step()
    experts.zero_grad()
    for one in optimizers:
        one.step()
        one.zero_grad()


# ---- freezing


@pytest.mark.parametrize("update", ["on_step", "on_backward"])
@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_a_frozen_expert_stays_as_it_is_until_it_thaws(
    optimizer: str, update: str, store: str | Path
) -> None:
    make = OPTIMIZERS[optimizer]
    experts, plain = both(ffn, optimizer=make, update=update, store=store)
    optimizers = [make(module.parameters()) for module in plain]
    with experts:
        for is_frozen in (False, True, True, False):
            for modules in (experts, plain):
                assert modules[1].requires_grad_(not is_frozen) is modules[1]  # it may be absent
                leaf = X.clone().requires_grad_()
                loss_of(modules, leaf).backward()
                assert leaf.grad is not None
            if update == "on_step":
                assert_same_gradients(experts, plain)
            step(experts, optimizers)
            assert_same_weights(experts, plain)


def test_when_all_are_frozen_nothing_requires_a_gradient_and_no_step_updates() -> None:
    experts, plain = both(ffn, optimizer=sgd)
    for expert in experts:
        expert.requires_grad_(False)
    assert not experts[0](X).requires_grad
    loss_of(experts, X.clone().requires_grad_()).backward()
    experts.step()
    assert_same_weights(experts, plain)


@pytest.mark.parametrize("num_microbatches", [None, 2])
def test_a_backward_asks_as_well_whether_an_expert_is_frozen(num_microbatches: int | None) -> None:
    experts, plain = both(ffn, optimizer=sgd, num_microbatches=num_microbatches)
    for modules in (experts, plain):
        loss = loss_of(modules)
        modules[2].requires_grad_(False)
        loss.backward()
    assert_same_gradients(experts, plain)


def test_gradients_of_before_it_froze_update_an_expert() -> None:
    experts, plain = both(ffn, optimizer=sgd)
    optimizers = [sgd(module.parameters()) for module in plain]
    for modules in (experts, plain):
        loss_of(modules).backward()
        modules[0].requires_grad_(False)
    step(experts, optimizers)
    assert_same_weights(experts, plain)


def test_what_was_frozen_when_it_was_taken_over_does_not_thaw() -> None:
    module = ffn()
    module[0].weight.requires_grad_(False)
    experts = OffloadedExperts([module], sgd, max_resident_bytes=10_000)
    experts[0].requires_grad_(False)
    with pytest.raises(
        RuntimeError, match=r"expert-00000: expected 0\.weight to stay frozen, as it was when it"
    ):
        experts[0].requires_grad_()
    assert not any(parameter.requires_grad for parameter in module.parameters())
