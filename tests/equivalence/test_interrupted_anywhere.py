"""Ctrl-C may come anywhere within a step. Then the next step is the same as if there had been none."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.functional import dropout

from moe_autograd import (
    map_with_parallel_backward,
    parallel_apply,
    run_isolated_backward,
    run_isolated_forward,
)
from moe_autograd.moe.dispatch import concatenate
from tests.support.interrupting import interrupted_everywhere
from tests.support.servers import wait_until

D = 4
OWN_GENERATOR = torch.random.default_generator

# Where a generator is let go of, Python itself drops what is raised.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        return dropout(self.linear(x), 0.5)


def assert_steps_go_on(experts: list[Dropping], *, every: int = 1, **options: Any) -> None:
    tokens = torch.randn(5, D)

    def step() -> list[Tensor | None]:
        x = tokens.clone().requires_grad_()
        for expert in experts:
            expert.zero_grad()
        sum(parallel_apply(experts, [(x,)] * len(experts), **options)).square().sum().backward()
        return [x.grad, *[p.grad for expert in experts for p in expert.parameters()]]

    def seeded_step() -> list[Tensor | None]:
        torch.manual_seed(3)
        return step()

    expected, num_points = seeded_step(), 0
    for point in interrupted_everywhere(step, every=every):
        num_points += 1
        # Calls that had begun on other threads may still run.
        wait_until(lambda: torch.random.default_generator is OWN_GENERATOR)
        torch.testing.assert_close(
            seeded_step(), expected, rtol=0, atol=0, msg=lambda text, at=point: f"{at}: {text}"
        )
    assert num_points > 100


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad + 0 * ctx.saved_tensors[0]


def mapped() -> None:
    xs = torch.randn(3, D, requires_grad=True)
    sum(map_with_parallel_backward(Scaled, *[(x,) for x in xs])).sum().backward()


def applied() -> None:
    xs = torch.randn(3, D, requires_grad=True)
    sum(parallel_apply([Scaled.apply] * 3, [(x,) for x in xs])).sum().backward()


def isolated() -> None:
    context, y = run_isolated_forward(Scaled, torch.randn(D, requires_grad=True))
    run_isolated_backward(Scaled, context, torch.ones_like(y))


@pytest.mark.parametrize(
    ("program", "hooks"),
    [
        (mapped, contextlib.nullcontext()),
        (isolated, contextlib.nullcontext()),
        (mapped, saved_tensors_hooks(lambda tensor: 1 * tensor, lambda tensor: tensor)),
        (applied, saved_tensors_hooks(lambda tensor: 1 * tensor, lambda tensor: tensor)),
    ],
    ids=["map", "isolated", "map under hooks", "modules under hooks"],
)
def test_after_ctrl_c_gradients_and_hooks_are_on_as_before(
    program: Callable[[], None], hooks: contextlib.AbstractContextManager[None]
) -> None:
    num_points, top_hooks = 0, torch._C._autograd._top_saved_tensors_default_hooks
    with hooks:
        before = top_hooks(True)
        for point in interrupted_everywhere(program):
            num_points += 1
            is_on = torch.is_grad_enabled(), torch._C._is_fwd_grad_enabled()
            torch.set_grad_enabled(True)
            torch._C._set_fwd_grad_enabled(True)
            assert is_on == (True, True), point
            assert top_hooks(True) == before, point
            wait_until(lambda: torch.random.default_generator is OWN_GENERATOR)
    assert num_points > 50


def test_after_ctrl_c_in_a_layer_autocast_ends_where_it_would_have() -> None:
    """Else the weights that it has cast would be kept beyond the next update."""
    outputs = [torch.ones(2, D, dtype=torch.float16), torch.ones(1, D)]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        points = interrupted_everywhere(lambda: concatenate(outputs))
        for point in points:
            assert torch.is_autocast_enabled("cpu"), point
            torch.autocast_increment_nesting()
            assert torch.autocast_decrement_nesting() == 1, point


@pytest.mark.parametrize("num_experts", [1, 2])
@pytest.mark.parametrize("options", [{}, {"max_concurrency": 1}, {"defer_weight_grads": True}], ids=str)
def test_a_step_after_ctrl_c_draws_and_computes_what_it_would_have(
    num_experts: int, options: dict[str, Any]
) -> None:
    # Two calls have nearly twice the points of one, at which the same is done.
    assert_steps_go_on([Dropping() for _ in range(num_experts)], every=4 * num_experts + 3, **options)


@pytest.mark.usefixtures("some_are_small")
def test_a_step_made_in_turn_does_so_too() -> None:
    assert_steps_go_on([Dropping() for _ in range(3)])
