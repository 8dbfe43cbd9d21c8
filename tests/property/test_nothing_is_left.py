"""Whatever fails in a training step, and wherever a graph is dropped: nothing is left, and the next step is right.

Random programs: two layers of calls that save memory in one way or another, inside checkpoints and saved-tensor hooks.
A step fails in a forward, in a second run, in a backward or in a hook, or its graph goes after a backward through a
part of it, or without any. Then, with `gc` disabled, no tensor that a call made is alive; and a step that goes well
gives the gradients of a plain loop.
"""

from __future__ import annotations

import contextlib
import gc
import random
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed.pipelining._backward  # where that is, backwards look under which schedule they run
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from moe_autograd import parallel_apply
from moe_autograd.autograd import in_turn
from moe_autograd.autograd.offload import OffloadedExperts
from tests.support.comparison import one_after_another
from tests.support.offloading import OPTIMIZERS

NUM_PROGRAMS, AT_ONCE = 60, 20
WIDTH, CLOSE = 3, 1e-9

MODES: list[dict[str, bool]] = [{}, {"recompute": True}, {"defer_weight_grads": True}]
MODES.append({"recompute": True, "defer_weight_grads": True})
WITHIN = ["", "", "checkpoint", "map", "recomputed map"]
AROUND = ["", "", "checkpoint", "hooks"]
FAULTS = ["", "forward", "forward", "second run", "backward", "pack", "unpack"]
ENDS = ["backward", "backward", "a part", "gradients", "kept and dropped", "none"]


pytestmark = pytest.mark.usefixtures("no_gc")


@pytest.fixture(autouse=True)
def _after_a_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_turn, "MOST_SMALL", -1)
    Program(0).step(parallel_apply)  # the first checkpoint of a process imports something
    gc.collect()


class Faulty(Exception):
    pass


@dataclass
class Events:
    """What fails, and what calls have made."""

    fault: str = ""
    made: list[weakref.ref[Tensor]] = field(default_factory=list)

    def happen(self, event: str) -> None:
        if event == self.fault:
            raise Faulty

    def num_alive(self) -> int:
        alive, self.made = sum(ref() is not None for ref in self.made), []
        return alive


class _Passes(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, events: Events) -> Tensor:
        ctx.events = events
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.events.happen("backward")
        return grad * 1, None


class Expert(nn.Module):
    """Saves its own results, and those of what it calls."""

    def __init__(self, events: Events, within: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH, dtype=torch.float64))
        self.events, self.within, self.is_faulty = events, within, False

    def forward(self, x: Tensor) -> Tensor:
        is_second = torch._C._current_graph_task_id() != -1
        h = _Passes.apply(x, self.events if self.is_faulty else Events())
        y = torch.tanh(h @ self.weight)
        self.events.made += [weakref.ref(h), weakref.ref(y)]
        if self.is_faulty:
            self.events.happen("second run" if is_second else "forward")
        if self.within == "checkpoint":
            y = checkpoint(lambda z: torch.tanh(z @ self.weight), y, use_reentrant=False)
        elif self.within:
            calls = [lambda z: torch.tanh(z @ self.weight), torch.sigmoid]
            y = sum(parallel_apply(calls, [(y,), (h,)], recompute=self.within == "recomputed map"))
        self.events.made.append(weakref.ref(y))
        return y


class Program:
    """What is drawn from one seed."""

    def __init__(self, seed: int) -> None:
        draw = random.Random(seed)
        torch.manual_seed(seed)
        self.events, self.fault = Events(), draw.choice(FAULTS)
        experts = [
            [Expert(self.events, draw.choice(WITHIN)) for _ in range(draw.randint(2, 3))] for _ in range(2)
        ]
        draw.choice(draw.choice(experts)).is_faulty = True
        self.layers: list[Sequence[nn.Module]] = [*experts]
        self.modes, self.around = draw.choices(MODES, k=2), draw.choices(AROUND, k=2)
        self.end, self.is_used = draw.choice(ENDS), [draw.random() < 0.7 for _ in range(3)]
        self.x = torch.randn(4, WIDTH, dtype=torch.float64, requires_grad=True)
        self.trained = [self.x, *[expert.weight for layer in experts for expert in layer]]

    def step(self, apply: Callable[..., Sequence[Tensor]]) -> list[Tensor | None]:
        """Return the gradients."""
        results, h = list[Tensor](), self.x
        for layer, mode, around in zip(self.layers, self.modes, self.around, strict=True):
            h = self._layer(apply, layer, mode, around, h)
            results.append(h)
        loss = torch.stack([result.square().mean() for result in results]).sum()
        match self.end:
            case "none":
                return []
            case "gradients":
                return list(torch.autograd.grad(loss, self.trained, allow_unused=True))
            case "a part":
                results[0].sum().backward()
            case "kept and dropped":
                loss.backward(retain_graph=True)
            case _:
                loss.backward()
        return self._take_gradients()

    def _take_gradients(self) -> list[Tensor | None]:
        grads = [tensor.grad for tensor in self.trained]
        for tensor in self.trained:
            tensor.grad = None
        return grads

    def _layer(
        self,
        apply: Callable[..., Sequence[Tensor]],
        experts: Sequence[nn.Module],
        mode: dict[str, bool],
        around: str,
        x: Tensor,
    ) -> Tensor:
        def run(x: Tensor) -> Tensor:
            results = apply(experts, [(x * (i + 1),) for i in range(len(experts))], **mode)
            used = [y for y, is_used in zip(results, self.is_used, strict=False) if is_used] or results[:1]
            return sum(used)  # type: ignore[return-value]

        if around == "checkpoint":
            return checkpoint(run, x, use_reentrant=False)  # type: ignore[return-value]
        with saved_tensors_hooks(self._pack, self._unpack) if around else contextlib.nullcontext():
            return run(x)

    def _pack(self, tensor: Tensor) -> Tensor:
        self.events.happen("pack")
        return tensor.detach().clone()

    def _unpack(self, tensor: Tensor) -> Tensor:
        self.events.happen("unpack")
        return tensor

    def fail(self, apply: Callable[..., Sequence[Tensor]]) -> None:
        """Make a step in which something fails, if it comes to that."""
        self.events.fault = self.fault
        with contextlib.suppress(Faulty):
            self.step(apply)
        self.events.fault = ""
        torch.ones(
            (), requires_grad=True
        ).backward()  # until then the engine keeps the nodes of one that failed
        self._take_gradients()


@pytest.mark.parametrize("first", range(0, NUM_PROGRAMS, AT_ONCE))
def test_nothing_is_left_of_steps_that_fail_and_the_next_is_right(first: int) -> None:
    for seed in range(first, first + AT_ONCE):
        program = Program(seed)
        program.fail(parallel_apply)
        assert program.events.num_alive() == 0, f"program {seed}: left by a step that failed"
        mapped = program.step(parallel_apply)
        assert program.events.num_alive() == 0, f"program {seed}: left by a step"
        torch.testing.assert_close(
            mapped,
            program.step(one_after_another),
            rtol=CLOSE,
            atol=CLOSE,
            msg=lambda text, seed=seed: f"program {seed}: {text}",
        )


@pytest.mark.parametrize("first", range(0, NUM_PROGRAMS, AT_ONCE))
def test_nothing_is_left_of_steps_of_offloaded_experts(first: int) -> None:
    for seed in range(first, first + AT_ONCE):
        program = Program(seed)
        with OffloadedExperts(program.layers[0], OPTIMIZERS["sgd"], max_resident_bytes=1 << 16) as experts:
            program.layers[0], program.trained = list(experts), [program.x]
            program.fail(parallel_apply)
            assert program.events.num_alive() == 0, f"program {seed}: left by a step that failed"
            program.step(parallel_apply)
            assert program.events.num_alive() == 0, f"program {seed}: left by a step"
