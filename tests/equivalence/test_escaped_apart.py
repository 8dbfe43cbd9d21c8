"""Backwards that are asked by name come to calls that are tied apart, as what they take has different histories."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe_autograd import parallel_apply
from tests.support.comparison import one_after_another
from tests.support.readable import wait

ESCAPED = "expected tensors with history to leave a call as its result"


def sine(x: Tensor) -> Any:
    return wait(x).sin()


class Force(nn.Module):
    """Differentiates within the call what a map of its own has computed of the call's input."""

    def __init__(self, apply: Callable[..., list[Any]]) -> None:
        super().__init__()
        self.inner, self.apply_all = nn.Linear(4, 4), apply

    def forward(self, x: Tensor) -> Any:
        h = self.inner(wait(x))
        energy = sum(self.apply_all([sine, sine], [(h,), (x * 3,)]))
        (by_x,) = torch.autograd.grad(energy.sum(), x, retain_graph=True)
        (by_h,) = torch.autograd.grad(energy.sum(), h, retain_graph=True)
        return h + by_x.detach() + energy * by_h


@pytest.mark.parametrize("options", [{}, {"recompute": True}, {"defer_weight_grads": True}], ids=str)
def test_maps_within_calls_may_be_differentiated_there_by_name(options: dict[str, Any]) -> None:
    x, results = torch.randn(3, 4, requires_grad=True), list[tuple[Tensor, ...]]()
    for within, around in ((one_after_another, one_after_another), (parallel_apply, parallel_apply)):
        torch.manual_seed(0)
        experts = [Force(within) for _ in range(2)]
        outputs = around(experts, [(x,), (x,)], **(options if around is parallel_apply else {}))
        weights = [expert.inner.weight for expert in experts]
        results.append(torch.autograd.grad(sum(outputs).sum(), [x, *weights]))
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(other, one)


class Keeps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.kept = torch.empty(0)

    def forward(self, x: Tensor) -> Any:
        self.kept = self.first(x).tanh()
        return self.second(self.kept)


def test_what_escaped_into_one_of_several_calls_is_named_to_who_asks_for_it() -> None:
    expert = Keeps()
    (y,) = parallel_apply([expert], [(wait(torch.randn(3, 4, requires_grad=True)),)])
    results = parallel_apply([sine, sine], [(y + expert.kept,), (expert.kept,)])
    with pytest.raises(RuntimeError, match=ESCAPED):
        torch.autograd.grad(sum(results).sum(), [expert.kept, expert.second.weight])


def test_results_of_one_call_that_lead_to_each_other_have_no_entries_between_them() -> None:
    """A leaf without elements is looked at closely, as entries have such."""
    x, nothing = torch.randn(3, 4, requires_grad=True), torch.randn(0, 4, requires_grad=True)

    def two(x: Tensor) -> tuple[Tensor, Tensor]:
        y = sine(x)
        return y, y * 2

    def differentiated(apply: Callable[..., list[Any]]) -> Tensor:
        ((first, second),) = apply([two], [(torch.cat([x, nothing]),)])
        return torch.autograd.grad((first + second).sum(), x)[0]

    assert torch.equal(differentiated(parallel_apply), differentiated(one_after_another))
