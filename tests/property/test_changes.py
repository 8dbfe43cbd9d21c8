"""Whatever calls do to memory that they share, a map differentiates it as a plain loop does, or refuses it.

Random programs: a pool of leaves, constants, tensors with history and views of them; calls that take some and hold
others in their closures; within a call, operators, views, changes in place, detached copies; results of which some are
inputs; changes in place afterwards; gradients of first and second order.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from moe_autograd import parallel_apply
from tests.support.comparison import MapFunction, Raised, assert_same_values, attempt, one_after_another

NUM_PROGRAMS, AT_ONCE = 600, 50
CLOSE = 1e-9

OPERATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sin": lambda x, y: x.sin(),
    "scale": lambda x, y: x * 1.5,
    "tanh": lambda x, y: x.tanh(),
    "sum": lambda x, y: x.tanh().sum(),
    "add": lambda x, y: x + y if x.shape == y.shape else x,
    "multiply": lambda x, y: x * y if x.shape == y.shape else x,
    "part": lambda x, y: x[1:] if x.dim() else x,
    "transpose": lambda x, y: x.t() if x.dim() == 2 else x,
    "clone": lambda x, y: x.clone().mul_(2).add_(1),
    "detach": lambda x, y: x.detach(),
    "change": lambda x, y: x.mul_(0.5),
    "change tanh": lambda x, y: x.tanh_(),
}


class Program:
    """What is drawn from one seed.

    Args:
        seed: of everything that is random.
        changes: whether memory is changed in place.

    Attributes:
        depends_on_order: whether a call has changed what others may take, and autograd knows nothing of it.
    """

    def __init__(self, seed: int, changes: bool) -> None:
        self.seed, self.changes = seed, changes
        self.depends_on_order = False

    def __call__(self, apply: MapFunction) -> Any:
        draw, generator = random.Random(self.seed), torch.Generator().manual_seed(self.seed)
        leaves = [torch.randn(3, 4, generator=generator, dtype=torch.float64) for _ in range(3)]
        constant = torch.randn(3, 4, generator=generator, dtype=torch.float64)
        for leaf in leaves:
            leaf.requires_grad_()
        computed = [leaves[0] + 1, leaves[1].sin(), leaves[2] * constant]
        views = [computed[0][:2], computed[0][1:].t(), computed[1].t(), computed[2].view(-1)]
        pool = [*leaves, constant, *computed, *draw.sample(views, draw.randint(0, 4))]

        calls, inputs = [], []
        for _ in range(draw.randint(1, 4)):
            held = draw.choices(pool, k=draw.choice([0, 0, 1, 2]))
            calls.append(self._call(draw.randrange(1 << 30), held, apply if draw.random() < 0.15 else None))
            inputs.append(tuple(draw.choices(pool, k=draw.randint(1, 3))))
        results = [t for t in tree_leaves(apply(calls, inputs)) if isinstance(t, Tensor)]

        if self.changes and draw.random() < 0.3:
            draw.choice(results).mul_(3)
        if self.changes and draw.random() < 0.2:
            draw.choice(pool[4:]).mul_(2)
        values = [t.detach().clone() for t in (*results, *pool)]
        used = [t for t in results if t.requires_grad and draw.random() < 0.8]
        used += [t for t in pool if t.requires_grad and draw.random() < 0.3]
        loss = sum(((t**2) * (i + 1)).sum() for i, t in enumerate(used))
        if not isinstance(loss, Tensor):
            return values
        if draw.random() < 0.4:
            grads = torch.autograd.grad(loss, leaves, allow_unused=True, create_graph=True)
            twice = [(grad**2).sum() for grad in grads if grad is not None and grad.requires_grad]
            loss = torch.stack([loss, *twice]).sum()
        loss.backward()
        return [*values, *[leaf.grad for leaf in leaves]]

    def _call(self, seed: int, held: list[Tensor], nested: MapFunction | None) -> Callable[..., Any]:
        allowed = [name for name in OPERATORS if self.changes or not name.startswith("change")]

        def call(*given: Tensor) -> Any:
            draw = random.Random(seed)
            known = [*given, *held]
            taken = {tensor.untyped_storage().data_ptr() for tensor in known}
            for _ in range(draw.randint(1, 5)):
                name, first, second = draw.choice(allowed), draw.choice(known), draw.choice(known)
                if name.startswith("change") and not first.requires_grad:
                    self.depends_on_order |= first.untyped_storage().data_ptr() in taken
                known.append(OPERATORS[name](first, second))
            results = draw.choices(known, k=draw.randint(1, 3))
            return [results[0], tuple(results), {"all": results, "none": None}][draw.randrange(3)]

        if nested is None:
            return call
        return lambda *given: nested([call, lambda *others: others[0] * 2], [given, given])


@pytest.mark.parametrize("max_concurrency", [None, 1])
@pytest.mark.parametrize("changes", [False, True])
@pytest.mark.parametrize("first", range(0, NUM_PROGRAMS, AT_ONCE))
def test_a_random_program_is_differentiated_right_or_refused(
    first: int, changes: bool, max_concurrency: int | None
) -> None:
    def apply(*args: Any) -> Any:
        return parallel_apply(*args, max_concurrency=max_concurrency)

    for seed in range(first, first + AT_ONCE):
        program = Program(seed, changes)
        native, mapped = attempt(Program(seed, changes), one_after_another), attempt(program, apply)
        if isinstance(mapped, Raised):
            assert changes or isinstance(native, Raised), f"program {seed}: only the map raised {mapped}"
            assert mapped.type is RuntimeError, f"program {seed}: {mapped}"
            continue
        if program.depends_on_order and max_concurrency is None:
            continue  # whether autograd finds a value changed that it has saved does so, too
        assert not isinstance(native, Raised), f"program {seed}: the map did not raise {native}"
        for place, (one, other) in enumerate(zip(native, mapped, strict=True)):
            assert (one is None) == (other is None), f"program {seed}, {place}"
            if one is not None:
                assert_same_values(one, other, f"program {seed}, {place}", tolerance=CLOSE)
