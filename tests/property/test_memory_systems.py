"""However programs train experts to save memory, they compute what plain PyTorch computes, or end as it does.

Random programs: experts of many kinds, some of which share weights; up to three maps in a graph, whose results may go
unused and whose inputs may be shared; micro-batches that add up, and steps between them; weights that are frozen and
thawed; hooks; backwards of many kinds. Compared are results, gradients of first and second order, buffers, weights,
the optimizer's state, what hooks have seen and, where a program ends with an error, its class.
"""

from __future__ import annotations

import contextlib
import itertools
import random
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils._pytree import tree_leaves

from moe_autograd.autograd.joining import accumulating
from tests.support.comparison import Raised, assert_same_values, attempt
from tests.support.memory_worlds import (
    EXPERTS,
    ROWS_ALONE,
    WIDTH,
    Counting,
    Fact,
    MappedWorld,
    Mode,
    Nested,
    Noise,
    Noisy,
    OffloadedWorld,
    Plain,
    World,
)
from tests.support.offloading import OPTIMIZERS

NUM_PROGRAMS, AT_ONCE = 80, 20
CLOSE = 1e-8

RECOMPUTED, DEFERRED, BOTH = Mode(recompute=True), Mode(defer_weight_grads=True), Mode(True, True)
IN_MEMORY = {
    "recomputed": [RECOMPUTED],
    "deferred": [DEFERRED],
    "mixed": [Mode(), RECOMPUTED, DEFERRED, BOTH],
}
OFFLOADED: dict[str, dict[str, Any]] = {
    "update on step": {},
    "update on backward": {"update": "on_backward"},
    "in slices": {"num_microbatches": 2},
}

ONE_BACKWARD = ["backward", "backward", "some gradients", "backward to some"]
FIRST_ORDER = [*ONE_BACKWARD, "twice", "in two parts", "some gradients first", "after it was freed"]
ANY_BACKWARD = [*FIRST_ORDER, "second order", "a changed input", "a changed weight"]

Context = Callable[[], AbstractContextManager[Any]]
SAVING: list[Context] = [save_on_cpu, lambda: saved_tensors_hooks(lambda x: x.detach().clone(), lambda x: x)]
AROUND_FORWARDS: list[Context] = [contextlib.nullcontext, contextlib.nullcontext, *SAVING]
AROUND_BACKWARDS: list[Context] = [contextlib.nullcontext, torch.no_grad, torch.enable_grad, *SAVING]


@pytest.fixture(autouse=True)
def _all_is_large(monkeypatch: pytest.MonkeyPatch, nothing_is_small: None) -> None:
    """Gradients are added at once, as those of large weights are, and calls defer."""
    monkeypatch.setattr(accumulating, "LEAST_ADDED", 1)


class Program:
    """What is drawn from one seed; made for one run.

    Args:
        seed: of everything that is random.
        world: in which it runs.
        noise: what experts draw.
        kinds: of experts.
        modes: one of which each map is in.
        backwards: one of which each micro-batch ends with.
    """

    def __init__(
        self,
        seed: int,
        world: World,
        noise: Noise,
        kinds: Sequence[type[nn.Module]],
        modes: Sequence[Mode],
        backwards: Sequence[str],
    ) -> None:
        self._draw, self._generator = random.Random(seed), torch.Generator().manual_seed(seed)
        self._world, self._noise, self._modes, self._backwards = world, noise, modes, backwards
        self._places = itertools.count()
        self._said: list[Fact] = []
        self._seen: list[tuple[int, float]] = []  # by hooks, which run in any order
        torch.manual_seed(seed)
        modules = [self._make(self._draw.choice(kinds)) for _ in range(self._draw.randint(2, 4))]
        if world.may_share and self._is_likely(0.4):
            modules.append(Plain(shared=next(modules[0].parameters())))
        self._is_noisy = [isinstance(module, Noisy) for module in modules]
        # Those of a group take their turn together: not in the order of the calls, where one stands in between.
        self._may_be_held = [world.may_share or not isinstance(module, Counting) for module in modules]
        self._weights = list({p: None for module in modules for p in module.parameters()})
        self._experts = world.take(modules, OPTIMIZERS[self._draw.choice(list(OPTIMIZERS))])

    def _make(self, kind: type[nn.Module]) -> nn.Module:
        if kind is Nested:
            return Nested(self._world.call)
        return Noisy(self._noise) if kind is Noisy else kind()

    def _is_likely(self, probability: float) -> bool:
        return self._draw.random() < probability

    def run(self) -> list[Fact]:
        """Train; return all that is to be equal."""
        if self._world.may_share and self._is_likely(0.4):
            self._add_hooks()
        for _ in range(self._draw.randint(1, 2)):
            for _ in range(self._draw.randint(1, self._world.most_micro_batches)):
                self._micro_batch()
            self._world.step()
            self._say(self._world.facts())
            if self._is_likely(0.7):
                self._world.zero_grad()
            if self._world.may_share and self._is_likely(0.3):
                weight = self._draw.choice(self._weights)
                weight.requires_grad_(not weight.requires_grad)
        return [*self._said, *[("seen by hooks", torch.tensor(one)) for one in sorted(self._seen)]]

    def _say(self, facts: Iterable[Fact]) -> None:
        self._said += [
            (name, value.detach().clone() if isinstance(value, Tensor) else value) for name, value in facts
        ]

    def _add_hooks(self) -> None:
        scaled, watched = self._draw.choices(range(len(self._weights)), k=2)
        self._weights[scaled].register_hook(lambda grad: grad * 1.5)

        def see(weight: Tensor) -> None:
            assert weight.grad is not None
            self._seen.append((watched, weight.grad.sum().item()))

        self._weights[watched].register_post_accumulate_grad_hook(see)

    def _micro_batch(self) -> None:
        leaves = [
            torch.randn(4, WIDTH, generator=self._generator, dtype=torch.float64)
            for _ in range(self._draw.randint(1, 3))
        ]
        for leaf in leaves:
            leaf.requires_grad_(self._is_likely(0.75))
        tensors, results = list(leaves), list[Tensor]()
        with self._draw.choice(AROUND_FORWARDS)():
            for _ in range(self._draw.randint(1, 3)):
                made = self._map(tensors)
                results += made
                tensors += [t for t in made if t.shape == leaves[0].shape]
        used = [t for t in results if t.requires_grad and self._is_likely(0.7)]
        losses = [(t.tanh() if i % 2 else t * t).sum() * (i + 1) for i, t in enumerate(used)]
        if losses:
            with self._draw.choice(AROUND_BACKWARDS)():
                self._backward(losses, leaves)
            self._world.after_backward()
        self._say(("gradient of an input", leaf.grad) for leaf in leaves)
        self._say(self._world.facts())

    def _map(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Call some of the experts, some of them twice, and return the tensors that they return."""
        chosen = self._draw.choices(range(len(self._experts)), k=self._draw.randint(1, 4))
        calls: list[Callable[..., Any]] = []
        for i in chosen:
            expert = self._experts[i]
            is_held = self._may_be_held[i] and self._is_likely(0.15)
            calls.append(_times(expert, self._draw.choice(tensors)) if is_held else expert)
        inputs = [(self._draw.choice(tensors),) for _ in chosen]
        kwargs = [{"place": next(self._places)} if self._is_noisy[i] else {} for i in chosen]
        mode, bound = self._draw.choice(self._modes), self._draw.choice([None, None, 1, 2])
        returned = tree_leaves(self._world.call(calls, inputs, kwargs, mode, bound))
        self._say(("result", value) for value in returned)
        made = [value for value in returned if isinstance(value, Tensor)]
        self._say(("requires_grad", value.requires_grad) for value in made)
        return made

    def _backward(self, losses: Sequence[Tensor], leaves: Sequence[Tensor]) -> None:
        how, loss = self._draw.choice(self._backwards), torch.stack(list(losses)).sum()
        trained = [*leaves, *(self._weights if self._world.may_share else [])]
        asked = [x for x in trained if x.requires_grad and self._is_likely(0.5)]
        match how:
            case "some gradients" if asked:
                self._say_gradients(torch.autograd.grad(loss, asked, allow_unused=True))
            case "backward to some" if asked:
                loss.backward(inputs=asked)
            case "twice":
                loss.backward(retain_graph=True)
                loss.backward()
            case "in two parts" if len(losses) > 1:
                losses[0].backward(retain_graph=True)
                torch.stack(list(losses[1:])).sum().backward()
            case "some gradients first" if asked:
                self._say_gradients(torch.autograd.grad(loss, asked, allow_unused=True, retain_graph=True))
                loss.backward()
            case "after it was freed":
                loss.backward()
                loss.backward()
            case "second order" if asked:
                grads = torch.autograd.grad(loss, asked, allow_unused=True, create_graph=True)
                self._say_gradients(grads)
                torch.stack(
                    [loss, *[grad.square().sum() for grad in grads if grad is not None]]
                ).sum().backward()
            case "a changed input" | "a changed weight":
                with torch.no_grad():
                    self._draw.choice(leaves if how == "a changed input" else self._weights).mul_(1.1)
                loss.backward()
            case _:
                loss.backward()

    def _say_gradients(self, grads: Iterable[Tensor | None]) -> None:
        self._say(("gradient asked for", grad) for grad in grads)


def _times(expert: Callable[..., Any], held: Tensor) -> Callable[..., Any]:
    """Return a call that takes one tensor and holds another."""
    return lambda x, **kwargs: [
        t * held for t in tree_leaves(expert(x, **kwargs)) if isinstance(t, Tensor) and t.shape == held.shape
    ]


def assert_same_programs(seed: int, native: World, mapped: World, *what: Any) -> None:
    """Run the program of one seed in both worlds and compare what is said."""
    noise = Noise()
    with contextlib.closing(mapped):
        theirs = attempt(lambda: Program(seed, mapped, noise, *what).run())
    ours = attempt(lambda: Program(seed, native, Noise(noise.drawn), *what).run())
    if isinstance(ours, Raised) or isinstance(theirs, Raised):
        classes = [one.type if isinstance(one, Raised) else None for one in (ours, theirs)]
        assert classes[0] is classes[1], f"program {seed}: {ours} became {theirs}"
        return
    for place, ((name, one), (other_name, other)) in enumerate(zip(ours, theirs, strict=True)):
        where = f"program {seed}, {place}: {name}"
        assert name == other_name, where
        if isinstance(one, Tensor) and isinstance(other, Tensor):
            assert_same_values(one, other, where, tolerance=CLOSE)
        else:
            assert one == other, where


@pytest.mark.parametrize("first", range(0, NUM_PROGRAMS, AT_ONCE))
@pytest.mark.parametrize("modes", IN_MEMORY)
def test_maps_that_save_memory_train_as_plain_loops(modes: str, first: int) -> None:
    kinds = [*EXPERTS, Nested]
    # The second runs change buffers in the order of the calls, and not of the backward.
    if modes == "deferred":
        kinds.append(Counting)
    for seed in range(first, first + AT_ONCE):
        assert_same_programs(seed, World(), MappedWorld(), kinds, IN_MEMORY[modes], ANY_BACKWARD)


@pytest.mark.parametrize("first", range(0, NUM_PROGRAMS, AT_ONCE))
@pytest.mark.parametrize("how", OFFLOADED)
def test_offloaded_experts_train_as_plain_ones(how: str, first: int, tmp_path: Path) -> None:
    kinds = ROWS_ALONE if how == "in slices" else [*EXPERTS, Counting, Nested]
    backwards = ONE_BACKWARD if how == "update on backward" else FIRST_ORDER
    for seed in range(first, first + AT_ONCE):
        native = World(updates_on_backward=how == "update on backward", may_share=False)
        store = tmp_path / str(seed) if seed % 2 else "ram"
        mapped = OffloadedWorld(store=store, **OFFLOADED[how])
        assert_same_programs(seed, native, mapped, kinds, [Mode(), DEFERRED], backwards)
