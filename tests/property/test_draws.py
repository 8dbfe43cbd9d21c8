"""What is drawn anywhere in a map does not depend on which of its threads come when.

Random programs: calls that draw in their forwards, backwards, hooks and second runs, in maps and checkpoints of their
own, in modules of their own or in one that all of them share. Where threads take turns every few microseconds, values
and gradients are those of one call after the other, and the caller's own stream goes on as it does then.
"""

from __future__ import annotations

import contextlib
import functools
import random
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from moe_autograd import parallel_apply
from moe_autograd.autograd import in_turn
from tests.support.functions_waiting import PATIENCE_S

NUM_PROGRAMS, AT_ONCE, NUM_RUNS = 60, 12, 4
NUM_CALLS, WIDTH = 5, 4
SWITCH_INTERVAL_S = 2e-6
CLOSE = 1e-9  # gradients that meet are added in another order

WITHIN = ["dropout", "hook", "hook of input", "function", "checkpoint", "map"]
WITHIN += ["backward", "saved", "hook of module", "hook of weight"]
AROUND = ["", "", "saved", "checkpoint", "reentrant checkpoint"]
MODES: list[dict[str, bool]] = [{}, {}, {"recompute": True}, {"defer_weight_grads": True}]


@pytest.fixture(autouse=True)
def _threads_take_turns_often(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(in_turn, "MOST_SMALL", -1)
    before = sys.getswitchinterval()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    yield
    sys.setswitchinterval(before)


def noisy(tensor: Tensor) -> Tensor:
    return tensor + 0.1 * torch.rand_like(tensor)


class Draws(Function):
    """Draws in its forward and in its backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * torch.rand_like(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * x * torch.rand_like(grad)


class Expert(nn.Module):
    def __init__(self, within: list[str], all_are_here: threading.Barrier) -> None:
        super().__init__()
        self.linear, self.within = nn.Linear(WIDTH, WIDTH, dtype=torch.float64), within
        self.all_are_here = all_are_here
        if "hook of module" in within:
            self.register_full_backward_hook(lambda module, grads, _: tuple(map(noisy, grads)))
        if "hook of weight" in within:
            self.linear.weight.register_hook(noisy)

    def forward(self, x: Tensor) -> Tensor:
        self.all_are_here.wait(PATIENCE_S)  # each on a thread of its own
        y = self.linear(x)
        for kind in self.within:
            y = self._through(kind, x, y)
        return y

    def _through(self, kind: str, x: Tensor, y: Tensor) -> Tensor:
        match kind:
            case "dropout":
                return F.dropout(y, 0.3)
            case "hook" if y.requires_grad:
                y.register_hook(noisy)
            case "hook of input" if x.requires_grad:
                x.register_hook(noisy)
            case "function":
                return Draws.apply(y)
            case "checkpoint":
                return checkpoint(lambda y: F.dropout(self.linear(y), 0.3), y, use_reentrant=False)
            case "map":
                return torch.stack(parallel_apply([lambda y: F.dropout(y) * y, Draws.apply], [(y,)] * 2)).sum(
                    0
                )
            case "backward":
                with torch.enable_grad():
                    inner = y.detach().requires_grad_()
                    return y + torch.autograd.grad(Draws.apply(inner).sum(), inner)[0]
            case "saved":
                with saved_tensors_hooks(noisy, noisy):
                    return y * y.sin()
        return y


class Program:
    """A step of random calls; in some programs they share a module and an input."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        self.within = draw.sample(WITHIN, draw.randint(1, 4))
        self.around, self.mode, self.is_shared = draw.choice(AROUND), draw.choice(MODES), draw.random() < 0.3
        self.makes_graph = draw.random() < 0.2 and self.around != "reentrant checkpoint"

    def step(self, max_concurrency: int) -> list[Tensor]:
        torch.manual_seed(0)
        num_modules, all_are_here = 1 if self.is_shared else NUM_CALLS, threading.Barrier(max_concurrency)
        own = [Expert(self.within, all_are_here) for _ in range(num_modules)]
        inputs = [torch.randn(3, WIDTH, dtype=torch.float64, requires_grad=True) for _ in range(num_modules)]
        modules, xs = (own * NUM_CALLS)[:NUM_CALLS], (inputs * NUM_CALLS)[:NUM_CALLS]

        def layer(*xs: Tensor) -> Tensor:
            args = [(x,) for x in xs]
            return torch.stack(
                parallel_apply(modules, args, max_concurrency=max_concurrency, **self.mode)  # type: ignore[arg-type]
            )

        hooks = saved_tensors_hooks(noisy, noisy) if self.around == "saved" else contextlib.nullcontext()
        torch.manual_seed(1)
        with hooks:
            if self.around.endswith("checkpoint"):
                layer = functools.partial(checkpoint, layer, use_reentrant="reentrant" in self.around)  # type: ignore[assignment]
            y = layer(*xs)
        weights = torch.arange(1, NUM_CALLS + 1, dtype=torch.float64).view(-1, 1, 1)
        (y * weights).sum().backward(create_graph=self.makes_graph)
        grads = [one.grad for one in (*inputs, *nn.ModuleList(own).parameters()) if one.grad is not None]
        return [y.detach(), *[grad.detach() for grad in grads], torch.rand(2)]


@pytest.mark.filterwarnings("ignore:Using backward\\(\\) with create_graph=True")
@pytest.mark.parametrize("first", range(0, NUM_PROGRAMS, AT_ONCE))
def test_what_is_drawn_does_not_depend_on_which_thread_comes_first(first: int) -> None:
    for seed in range(first, first + AT_ONCE):
        program = Program(seed)
        one_by_one = program.step(1)
        for _ in range(NUM_RUNS):
            torch.testing.assert_close(
                program.step(NUM_CALLS),
                one_by_one,
                rtol=CLOSE,
                atol=CLOSE,
                msg=lambda text, program=program: f"{vars(program)}: {text}",
            )
