"""Tensors with history that leave a call otherwise than as its result: an error, never a sum with a part missing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe_autograd import MixtureOfExperts, TopKRouter, parallel_apply
from tests.support.comparison import one_after_another

NUM_CALLS = 3
OPTIONS: list[dict[str, Any]] = [
    {},
    {"recompute": True},
    {"defer_weight_grads": True},
    {"max_concurrency": 1},
]
ESCAPED = "expected tensors with history to leave a call as its result, got one that left by another way"


class KeepsLoss(nn.Module):
    """A body that keeps a loss on itself, for the trainer to add."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.kept = nn.Linear(4, 4), torch.zeros(())

    def forward(self, x: Tensor) -> Any:
        y = self.inner(x).tanh()
        self.kept = y.square().mean()
        return y


def loss_of(experts: list[KeepsLoss], xs: list[Tensor], **options: Any) -> Tensor:
    outputs = parallel_apply(experts, [(x,) for x in xs], **options)
    return torch.stack([y.sum() for y in outputs]).sum() + sum(expert.kept for expert in experts)


def made() -> tuple[list[KeepsLoss], Tensor, list[Tensor]]:
    """Return experts, a weight of a trunk, and what comes of it for each expert."""
    weight = torch.randn(4, 4, requires_grad=True)
    trunk = torch.randn(5, 4) @ weight
    return [KeepsLoss() for _ in range(NUM_CALLS)], weight, [trunk * i for i in range(1, NUM_CALLS + 1)]


BACKWARDS: list[Callable[[Tensor, list[Tensor]], object]] = [
    lambda loss, asked: loss.backward(),
    lambda loss, asked: loss.backward(inputs=asked),
    lambda loss, asked: torch.autograd.grad(loss, asked),
    lambda loss, asked: torch.autograd.grad(loss, asked, retain_graph=True),
    lambda loss, asked: torch.autograd.grad(loss, asked, create_graph=True),
    lambda loss, asked: torch.autograd.grad([loss, loss.sin()], asked),
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("run", BACKWARDS, ids=range(len(BACKWARDS)))
def test_a_backward_that_would_miss_what_has_escaped_says_so(
    options: dict[str, Any], run: Callable[[Tensor, list[Tensor]], object]
) -> None:
    for asks_for_inputs in (False, True):
        experts, weight, xs = made()
        with pytest.raises(RuntimeError, match=ESCAPED):
            run(loss_of(experts, xs, **options), xs if asks_for_inputs else [weight])


def test_what_escaped_and_is_not_in_the_loss_harms_nobody() -> None:
    experts, weight, xs = made()
    args = [(x,) for x in xs]
    wanted = [weight, *xs, *nn.ModuleList(experts).parameters()]
    outputs, natively = parallel_apply(experts, args), one_after_another(experts, args)
    for asked in (wanted, wanted[:1]):
        both = [
            torch.autograd.grad([y.sum() for y in ys], asked, retain_graph=True) for ys in (outputs, natively)
        ]
        assert all(map(torch.equal, *both))
    torch.autograd.backward([y.sum() for y in outputs])
    assert weight.grad is not None


def test_what_escaped_from_calls_that_nobody_asks_about_is_not_complained_of() -> None:
    (kept, other, _), _, (x, _, _) = made()
    z = torch.randn(5, 4, requires_grad=True)
    y, of_z = parallel_apply([kept, other], [(x,), (z,)])
    loss, other.kept = y.sum() + of_z.sum() + kept.kept, torch.zeros(())
    (grad,) = torch.autograd.grad(loss, z, retain_graph=True)
    assert torch.equal(grad, torch.autograd.grad(other(z).sum(), z)[0])
    with pytest.raises(RuntimeError, match=ESCAPED):
        torch.autograd.grad(loss, [z, x])


def test_a_routing_that_a_hook_keeps_within_an_expert_is_not_left_out() -> None:
    def layer(*experts: nn.Module) -> MixtureOfExperts:
        return MixtureOfExperts(TopKRouter(4, num_experts=2, top_k=2), experts)

    nested = layer(layer(KeepsLoss(), KeepsLoss()), layer(KeepsLoss(), KeepsLoss()))
    routings: list[Any] = []
    for router in (module for module in nested.modules() if isinstance(module, TopKRouter)):
        router.register_forward_hook(lambda module, args, routing: routings.append(routing))
    x = torch.randn(6, 4, requires_grad=True)
    y = nested(x)
    outer, *inner = routings
    assert len(inner) == 2
    torch.autograd.grad(y.sum() + outer.z_loss, x, retain_graph=True)
    with pytest.raises(RuntimeError, match=ESCAPED):
        torch.autograd.grad(y.sum() + sum(one.z_loss for one in routings), x)
