"""Random programs whose calls return what they computed on the way, along with what they computed from it.

A plan says which operators a call applies to what it has so far, and which of these it returns. Two or three calls
follow one plan, each with a weight of its own. Their results are looked at in all ways that PyTorch has.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from tests.support.comparison import MapFunction

SIZE = 3
UNARY: dict[str, Callable[[Tensor], Tensor]] = {
    "sin": torch.sin,
    "exp": lambda x: (x * 0.1).exp(),  # saves its result
    "tanh": torch.tanh,
    "view": lambda x: x.view(-1).view(SIZE, SIZE),
    "clone": torch.clone,
    "hooked": lambda x: hooked(x * 1.5).clone(),
}
BINARY: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": torch.add,
    "mul": torch.mul,
    "matmul": lambda x, y: x @ y * 0.3,
}


def hooked(x: Tensor) -> Tensor:
    x.register_hook(lambda grad: grad * 0.5)
    return x


class Step(NamedTuple):
    """One operator, and the places of what it takes; `chunk` and `map` have two results each."""

    operator: str
    takes: tuple[int, ...]


class Plan(NamedTuple):
    """What calls do, and what is done with their results."""

    steps: list[Step]
    returned: list[int]
    in_loss: list[bool]
    watched: dict[int, str]
    way: str
    wanted: list[int]
    num_calls: int
    is_nested: bool

    @classmethod
    def at_random(cls, draw: random.Random) -> Plan:
        steps: list[Step] = []
        num_values = 2  # the input and the weight
        for _ in range(draw.randint(2, 7)):
            operator = draw.choice([*UNARY, *BINARY, *BINARY, "chunk", "map"])
            takes = tuple(draw.randrange(num_values) for _ in range(2 if operator in BINARY else 1))
            steps.append(Step(operator, takes))
            num_values += 1 + (operator in ("chunk", "map"))
        own = range(2, num_values)
        returned = draw.sample(own, draw.randint(min(2, len(own)), min(4, len(own))))
        return cls(
            steps,
            returned,
            [draw.random() < 0.7 for _ in returned],
            {i: draw.choice(["hook", "retain", "both", "nothing"]) for i in range(len(returned))},
            draw.choice(
                ["backward", "twice", "grad", "inputs", "second", "second by name", "all of results"]
            ),
            [i for i in range(len(returned)) if draw.random() < 0.5],
            draw.randint(2, 3),
            draw.random() < 0.3,
        )


def follow(plan: Plan, apply: MapFunction, x: Tensor, weight: Tensor) -> list[Tensor]:
    """Make one call."""
    values = [x, weight]
    for operator, takes in plan.steps:
        taken = [values[place] for place in takes]
        if operator == "chunk":
            values += [part.repeat(1, 3)[:, :SIZE] for part in (taken[0] * 1.5).chunk(2, 1)]
        elif operator == "map":
            (first, last), _ = apply([_two, _two], [(taken[0],), (taken[0].cos(),)])
            values += [first, last]
        elif operator in UNARY:
            values.append(UNARY[operator](*taken))
        else:
            values.append(BINARY[operator](*taken))
    return [values[place] for place in plan.returned]


def _two(x: Tensor) -> tuple[Tensor, Tensor]:
    hidden = x.sin()
    return hidden, hidden * x


def _in_a_map(apply: MapFunction, call: Callable[..., Any], x: Tensor) -> Any:
    return apply([call], [(x,)])[0]


def run(plan: Plan, apply: MapFunction) -> Any:
    """Return all that the program says of gradients."""
    generator = torch.Generator().manual_seed(3)
    made = [
        torch.randn(SIZE, SIZE, dtype=torch.float64, generator=generator).requires_grad_()
        for _ in range(2 * plan.num_calls)
    ]
    xs, weights = made[: plan.num_calls], made[plan.num_calls :]
    calls = [functools.partial(follow, plan, apply, weight=weight) for weight in weights]
    if plan.is_nested:
        calls = [functools.partial(_in_a_map, apply, call) for call in calls]
    results = apply(calls, [(x.cos(),) for x in xs])
    log: dict[tuple[int, int], Tensor] = {}
    for i, own in enumerate(results):
        for place, how in plan.watched.items() if plan.way != "all of results" else ():
            _watch(own[place], how, log, (i, place), in_parts=plan.way.startswith("second"))
    in_loss = [
        result.sin().sum() * (i + 1.0)
        for i, own in enumerate(results)
        for result, counts in zip(own, plan.in_loss, strict=True)
        if counts
    ]
    if not in_loss:
        in_loss = [results[0][-1].sum()]
    asked = [own[place] for own in results for place in plan.wanted] + made
    found = _differentiate(torch.stack(in_loss).sum(), plan.way, asked, made)
    kept = [result.grad for result in tree_leaves(results) if result.retains_grad]
    return [[None if one is None else one.detach() for one in own] for own in (found, kept)], sorted(
        log.items()
    )


def _watch(
    result: Tensor, how: str, log: dict[tuple[int, int], Tensor], key: tuple[int, int], *, in_parts: bool
) -> None:
    def note(grad: Tensor) -> Tensor:
        log[key] = log.get(key, 0) + grad.detach()
        return grad * 0.5 if in_parts else grad.clamp(-0.7, 0.9)  # of parts it would be another one

    if how in ("hook", "both"):
        result.register_hook(note)
    if how in ("retain", "both"):
        result.retain_grad()


def _differentiate(
    loss: Tensor, way: str, asked: Sequence[Tensor], leaves: Sequence[Tensor]
) -> Sequence[Tensor | None]:
    if way == "grad":
        return torch.autograd.grad(loss, asked, allow_unused=True)
    if way == "inputs":
        loss.backward(inputs=[*asked])
    elif way == "twice":
        loss.backward(retain_graph=True)
        loss.backward()
    elif way == "backward":
        loss.backward()
    elif way == "all of results":
        return _three_orders(loss, asked, leaves)
    else:
        wanted = asked if way == "second by name" else leaves
        grads = torch.autograd.grad(loss, wanted, create_graph=True, allow_unused=True)
        found = [grad for grad in grads if grad is not None]
        parts = [grad.sin().sum() for grad in found if grad.requires_grad]
        if parts:
            torch.stack(parts).sum().backward()
        return [*found, *[leaf.grad for leaf in leaves]]
    return [tensor.grad for tensor in leaves]


def _three_orders(loss: Tensor, asked: Sequence[Tensor], leaves: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """Return gradients of the leaves, and those of these, and theirs, of all that is asked for."""
    found: list[Tensor | None] = []
    for wanted in (leaves, asked, asked):
        grads = torch.autograd.grad(loss, wanted, create_graph=True, allow_unused=True)
        found += grads
        loss = loss + sum(grad.sin().sum() for grad in grads if grad is not None)
    return found
