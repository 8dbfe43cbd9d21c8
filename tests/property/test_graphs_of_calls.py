"""However the calls of maps hang together in a graph, it is differentiated as the graph of plain calls.

Random programs: a pool of leaves, of what is computed from them, and of what maps have returned. Calls are functions,
partials and modules; each takes some tensors of the pool, holds others, and uses modules that others use too. Within a
call: operators, views, gradients, checkpoints, another map. Among its results: inputs, held tensors, parameters, views,
detached tensors. Then one of many kinds of backward.

All that is random is drawn from a program's seed, which a failure names: `assert_same_graphs(seed, {})` runs it again.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from moe_autograd import parallel_apply
from tests.support.comparison import Raised, assert_same, attempt, one_after_another

NUM_PROGRAMS, AT_ONCE = 100, 25
CLOSE = 1e-9
SIZE = 3

Operator = Callable[[Tensor], Tensor]
Apply = Callable[..., Sequence[Any]]  # as `parallel_apply`
RunBackward = Callable[[Callable[[], Any]], Any]
Call = tuple[Callable[..., Any], tuple[Tensor, ...], dict[str, Tensor]]

OPERATORS: list[Operator] = [
    lambda x: x.sin(),
    lambda x: x * 2,
    lambda x: x.t(),
    lambda x: x[:, [2, 0, 1]],
    lambda x: x.exp().tanh(),
    lambda x: x.clone().mul_(1.5),
    lambda x: x @ x,
    lambda x: x.reshape(-1).flip(0).view(SIZE, SIZE),
    lambda x: x.softmax(0),
]
WAYS = ["function", "partial", "module with a list", "module with attributes"]
WITHIN = ["", "", "", "", "gradient", "gradient of a weight", "checkpoint", "map", "map"]
RETURNED = ["", "", "", "tuple", "view", "input", "held", "nested", "detached", "twice", "parameter"]
BACKWARDS = ["backward", "backward", "twice", "in two parts", "to some", "gradients", "second order"]


@dataclass(frozen=True)
class Body:
    """What a call computes. The tensors that it holds come as an argument: they are held elsewhere, in many ways."""

    operators: tuple[Operator, Operator, Operator]
    within: str
    returned: str
    modules: tuple[nn.Module, ...]
    calls: tuple[Call, ...]
    apply: Apply

    def __call__(self, held: Sequence[Tensor], x: Tensor, *others: Tensor) -> Any:
        on_input, on_held, on_result = self.operators
        taken = x
        for other in others:
            taken = taken + other.cos()
        y = on_input(taken)
        for i, tensor in enumerate(held):
            y = y + tensor if i else y * on_held(tensor)
        for module in self.modules:
            y = module(y).tanh()
        y = self._computed_within(taken, y)
        return self._with_company(on_result(y), y, x, held)

    def _computed_within(self, taken: Tensor, y: Tensor) -> Tensor:
        match self.within:
            case "gradient" if taken.requires_grad:
                z = taken * 1
                return y + torch.autograd.grad((z.sin() * z).sum(), z, create_graph=True)[0]
            case "gradient of a weight" if self.modules:
                loss = self.modules[0](taken.detach()).square().sum()
                weight = next(self.modules[0].parameters())
                return y + 0.01 * torch.autograd.grad(loss, weight, create_graph=True)[0]
            case "checkpoint":
                z = checkpoint(lambda v: v.sin() * v, y, use_reentrant=False)
                assert isinstance(z, Tensor)
                return z
            case "map" if self.calls:
                for result in tensors_in(made(self.apply, [(f, (y, *x[1:]), k) for f, x, k in self.calls])):
                    y = y + 0.3 * result if is_square(result) else y
        return y

    def _with_company(self, result: Tensor, y: Tensor, x: Tensor, held: Sequence[Tensor]) -> Any:
        match self.returned:
            case "tuple":
                return result, y * 2, 3
            case "view":
                return result, result[:2]
            case "input":
                return result, x
            case "held" if held:
                return result, held[0]
            case "nested":
                return {"result": result, "others": [y * 3, None]}
            case "detached":
                return result, result.detach() * 2
            case "twice":
                return result, result
            case "parameter" if self.modules:
                return result, next(self.modules[0].parameters())
        return result


class Holds(nn.Module):
    """Holds tensors in a list, or as attributes and in a dictionary."""

    def __init__(self, body: Body, held: Sequence[Tensor], in_list: bool) -> None:
        super().__init__()
        self.body, self.used, self.num_held = body, nn.ModuleList(body.modules), len(held)
        self.listed = list(held) if in_list else None
        if not in_list:
            self.by_name = {"last": held[-1]} if held else {}
            for i, tensor in enumerate(held[:-1]):
                setattr(self, f"held_{i}", tensor)

    def forward(self, x: Tensor, other: Tensor | None = None) -> Any:
        held = self.listed
        if held is None:
            held = [*(getattr(self, f"held_{i}") for i in range(self.num_held - 1)), *self.by_name.values()]
        return self.body(held, *both(x, other))


def holding(way: str, body: Body, held: Sequence[Tensor]) -> Callable[..., Any]:
    """Return a call that holds tensors in one of `WAYS`."""
    if way == "function":
        return lambda x, other=None: body(held, *both(x, other))
    if way == "partial":
        return functools.partial(lambda h, x, other=None: body(h, *both(x, other)), held)
    return Holds(body, held, in_list=way == "module with a list")


def both(x: Tensor, other: Tensor | None) -> tuple[Tensor, ...]:
    return (x,) if other is None else (x, other)


def made(apply: Apply, calls: Sequence[Call]) -> Any:
    funcs, args, kwargs = zip(*calls, strict=True)
    return apply(funcs, args, kwargs)


def tensors_in(results: Any) -> list[Tensor]:
    return [x for x in tree_leaves(results) if isinstance(x, Tensor)]


def is_square(x: Tensor) -> bool:
    return x.shape == (SIZE, SIZE)


class Program:
    """What is drawn from one seed; made for one run.

    Args:
        seed: of everything that is random.
        apply: makes the calls.
        run_backward: runs the backward; on this thread if none is given.
    """

    def __init__(self, seed: int, apply: Apply, run_backward: RunBackward = lambda run: run()) -> None:
        self._draw, self._generator = random.Random(seed), torch.Generator().manual_seed(seed)
        self._apply, self._run_backward = apply, run_backward
        leaves = [self._random(SIZE, SIZE).requires_grad_(self._is_likely(0.85)) for _ in range(3)]
        self._modules = [nn.Linear(SIZE, SIZE, dtype=torch.float64) for _ in range(3)]
        weights = [weight for module in self._modules for weight in module.parameters()]
        with torch.no_grad():
            for weight in weights:
                weight.copy_(self._random(*weight.shape))
        self._trained = [*(leaf for leaf in leaves if leaf.requires_grad), *weights]
        self._pool: list[Tensor] = leaves

    def run(self) -> dict[str, Any]:
        """Return all that is to be equal."""
        results: list[Any] = []
        for _ in range(self._draw.randint(1, 3)):
            for _ in range(self._draw.randint(0, 2)):
                self._pool.append(self._one_of(OPERATORS)(self._one_of(self._pool)))
            results += made(self._apply, [self._call(may_nest=True) for _ in range(self._draw.randint(2, 4))])
            self._pool = [*self._pool, *(x for x in tensors_in(results) if is_square(x))]
        values = [x.detach().clone() if isinstance(x, Tensor) else x for x in tree_leaves(results)]
        kinds = [(x.requires_grad, x.is_leaf) for x in tensors_in(results)]
        computed = [x for x in self._pool if x.requires_grad and not x.is_leaf]
        used = [x for x in computed if self._is_likely(0.7)] or computed[-1:]
        losses = [((i + 1) * 0.1 * x).tanh().sum() for i, x in enumerate(used)]
        asked = self._run_backward(lambda: self._backward(losses)) if losses else []
        grads = numbers(x.grad for x in self._trained)
        return {"results": values, "kinds": kinds, "asked": numbers(asked), "gradients": grads}

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self._generator, dtype=torch.float64)

    def _is_likely(self, probability: float) -> bool:
        return self._draw.random() < probability

    def _one_of(self, choices: Sequence[Any]) -> Any:
        return self._draw.choice(choices)

    def _call(self, may_nest: bool) -> Call:
        taken = self._draw.choices(self._pool, k=self._draw.randint(1, 2))
        held = self._draw.choices(self._pool, k=self._one_of([0, 0, 0, 1, 1, 2]))
        modules = self._draw.choices(self._modules, k=self._one_of([0, 1, 1, 2]))
        operators = (self._one_of(OPERATORS), self._one_of(OPERATORS), self._one_of(OPERATORS))
        way, within, returned = self._one_of(WAYS), self._one_of(WITHIN), self._one_of(RETURNED)
        # What the calls within a module's own call hold is not looked for.
        nests = may_nest and within == "map" and way in ("function", "partial")
        calls = [self._call(may_nest=False) for _ in range(self._draw.randint(1, 2))] if nests else []
        body = Body(operators, within, returned, tuple(modules), tuple(calls), self._apply)
        call = holding(way, body, held)
        by_name = len(taken) == 2 and self._is_likely(0.3)
        return (call, (taken[0],), {"other": taken[1]}) if by_name else (call, tuple(taken), {})

    def _backward(self, losses: Sequence[Tensor]) -> Sequence[Tensor | None]:
        """Differentiate, and return the gradients that are not kept in `.grad`."""
        loss, how = torch.stack(list(losses)).sum(), self._one_of(BACKWARDS)
        match how:
            case "twice":
                loss.backward(retain_graph=True)
                loss.backward()
            case "in two parts":
                self._one_of(losses).backward(retain_graph=True)
                loss.backward()
            case "to some":
                loss.backward(inputs=[x for x in self._trained if self._is_likely(0.5)] or self._trained[:1])
            case "gradients":
                return torch.autograd.grad(loss, self._trained, allow_unused=True)
            case "second order":
                grads = torch.autograd.grad(loss, self._trained, create_graph=True, allow_unused=True)
                penalties = [x.sin().sum() for x in grads if x is not None and x.requires_grad]
                if penalties:
                    torch.stack(penalties).sum().backward()
                return grads
            case _:
                loss.backward()
        return []


def numbers(grads: Iterable[Tensor | None]) -> list[Tensor | None]:
    """The gradients' numbers alone: their strides are nobody's business."""
    return [
        None if grad is None else grad.detach().clone(memory_format=torch.contiguous_format) for grad in grads
    ]


def assert_same_graphs(seed: int, options: dict[str, Any], *where: RunBackward) -> None:
    """Run the program of one seed with plain calls and with maps, and compare."""
    native = Program(seed, one_after_another, *where).run()
    mapped = attempt(lambda: Program(seed, functools.partial(parallel_apply, **options), *where).run())
    assert not isinstance(mapped, Raised), f"program {seed}: {mapped}"
    assert_same(native, mapped, f"program {seed}", tolerance=CLOSE)


@pytest.mark.parametrize("first", range(0, NUM_PROGRAMS, AT_ONCE))
@pytest.mark.parametrize(
    "options",
    [{}, {"max_concurrency": 1}, {"defer_weight_grads": True}, {"recompute": True}],
    ids=["side by side", "one at a time", "deferred", "recomputed"],
)
def test_graphs_of_calls_are_differentiated_as_those_of_plain_calls(
    options: dict[str, Any], first: int
) -> None:
    for seed in range(first, first + AT_ONCE):
        assert_same_graphs(seed, options)


@pytest.mark.parametrize("options", [{}, {"defer_weight_grads": True}], ids=["side by side", "deferred"])
def test_another_thread_differentiates_them_as_the_one_that_made_them(options: dict[str, Any]) -> None:
    def run_elsewhere(run: Callable[[], Any]) -> Any:
        with ThreadPoolExecutor(1) as other:  # it numbers the nodes that it makes from nought
            return other.submit(run).result()

    for seed in range(150, 200):
        assert_same_graphs(seed, options, run_elsewhere)
