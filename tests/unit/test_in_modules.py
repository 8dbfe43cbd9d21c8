"""Deep modules are looked through before each call: what is found is as of now, and little is run for each part."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moe_autograd import parallel_apply
from moe_autograd.autograd.contents.in_modules import held_by_module
from moe_autograd.autograd.contents.reaching import Held


class Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)
        self.shape: Any = (2, 2)
        self.scale: Any = 1.0
        self.activation = F.relu

    def forward(self, x: Tensor) -> Tensor:
        scale = self.shape[1] if isinstance(self.shape[1], Tensor) else self.scale
        return self.activation(self.linear(x)) * scale


def deep(num_parts: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Part() for _ in range(num_parts)])


def as_number(part: Any, weight: Tensor) -> None:
    part.scale = weight * 2


def within_a_tuple(part: Any, weight: Tensor) -> None:
    part.shape = (2, weight * 2)


def by_a_function(part: Any, weight: Tensor) -> None:
    computed = weight * 2
    part.activation = lambda x: x * computed


def by_its_forward(part: Any, weight: Tensor) -> None:
    computed = weight * 2
    part.forward = lambda x: part.linear(x) * computed


def by_its_class(part: Any, weight: Tensor) -> None:
    computed = weight * 2

    class Other(Part):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * computed

    part.__class__ = Other


@pytest.mark.parametrize(
    "change",
    [as_number, within_a_tuple, by_a_function, by_its_forward, by_its_class],
    ids=lambda f: f.__name__,
)
@pytest.mark.parametrize("place", [0, 2])
def test_what_a_part_holds_only_since_the_last_map_gets_its_gradient(
    change: Callable[[Any, Tensor], None], place: int
) -> None:
    def gradient(apply: Callable[..., Any]) -> Tensor:
        modules, weight = [deep(3) for _ in range(3)], torch.ones(2, requires_grad=True)
        inputs = [(torch.ones(1, 2),)] * 3
        apply(modules, inputs)
        for module in modules:
            change(module[place], weight)
        sum(y.sum() for y in apply(modules, inputs)).backward()
        assert weight.grad is not None
        return weight.grad

    def loop(modules: Any, inputs: Any) -> list[Tensor]:
        return [module(*own) for module, own in zip(modules, inputs, strict=True)]

    assert torch.equal(gradient(parallel_apply), gradient(loop))


def test_what_the_function_that_several_parts_share_encloses_is_found_in_each_module() -> None:
    weight = torch.ones(2, requires_grad=True)
    computed = weight * 2
    modules = [deep(2) for _ in range(2)]

    def scaled(x: Tensor) -> Tensor:
        return x * computed

    for part in (part for module in modules for part in module.children()):
        vars(part)["activation"] = scaled
    held = [held_by_module(module, Held()) for module in modules]
    assert [any(one is computed for one in own) for own in held] == [True, True]


def num_python_calls(module: nn.Module) -> int:
    count = 0

    def see(frame: object, event: str, arg: object) -> None:
        nonlocal count
        count += event == "call"

    held_by_module(module, Held())  # what is remembered of a class
    sys.setprofile(see)
    try:
        held_by_module(module, Held())
    finally:
        sys.setprofile(None)
    return count


def test_few_functions_run_for_each_part() -> None:
    few, many = (num_python_calls(deep(num_parts)) for num_parts in (10, 110))
    assert many - few <= 100 * 2 * 10  # each has a part of its own
