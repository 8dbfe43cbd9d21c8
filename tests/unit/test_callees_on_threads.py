"""A function or method that may do more than compute gets a thread: it may wait for another."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.callees import Block, Other
from tests.support.made_in_turn import is_made_in_turn
from tests.support.readable import wait


def counts(block: Block) -> Any:
    count = 0

    def call(x: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return x

    return call


def is_not_there_yet(block: Block) -> Any:
    def call(x: Tensor) -> Any:
        return later(x)

    if block.scale > 1:
        later = block
    return call


def has_functions_of_its_own(block: Block) -> Any:
    return lambda x: (lambda y: block(y))(x)


def calls_what_it_closes_over(block: Block) -> Any:
    call = block.wait
    return lambda x: call(x)


def takes_from_a_list(block: Block) -> Any:
    blocks = [block]
    return lambda x: blocks[0](x)


def loops_over_a_list(block: Block) -> Any:
    blocks = [block]

    def call(x: Tensor) -> Any:
        for one in blocks:
            x = one(x)
        return x

    return call


def changes_a_module(block: Block) -> Any:
    def call(x: Tensor) -> Any:
        block.scale = 2
        return block(x)

    return call


def changes_in_place(block: Block) -> Any:
    def call(x: Tensor) -> Any:
        x *= block.scale
        return x

    return call


def has_a_hook(block: Block) -> Any:
    block.inner.register_forward_hook(lambda module, args, y: wait(y))
    return lambda x: block.mlp(x)


def has_another_method(block: Block) -> Any:
    block.mlp = wait  # type: ignore[method-assign]
    return lambda x: block.mlp(x)


def calls_super(block: Block) -> Any:
    return lambda x: super(Block, block).extra_repr()


def generates(x: Tensor) -> Any:
    yield x


EXPERT = nn.Linear(4, 4)


def names_a_global(x: Tensor) -> Any:
    return EXPERT(x)


def calls_what_has_its_own_name(block: Block) -> Any:
    def call(x: Tensor, call: Any = Waits()) -> Any:  # noqa: B008
        return call(x)

    return call


class Waits(Block):
    def forward(self, x: Tensor) -> Any:
        return wait(x)


class Locked:
    """Gives something else for an instance than for the class, as descriptors may."""

    def __init__(self, method: Any) -> None:
        self.method = method

    def __get__(self, block: Any, kind: Any = None) -> Any:
        return self.method if block is None else lambda x: wait(self.method(block, x))


class PerInstance:
    """Works for instances alone."""

    def __get__(self, block: Any, kind: Any = None) -> Any:
        return wait(block.weight)

    def __set__(self, block: Any, value: Any) -> None:
        pass


class WithDescriptors(Block):
    mlp = Locked(Block.mlp)
    alias = Block.mlp
    gain = PerInstance()


class Lazy(Block):
    def __getattr__(self, name: str) -> Any:
        return wait(super().__getattr__(name))


class LazyNumbers(Block):
    def __getattribute__(self, name: str) -> Any:
        return super().__getattribute__(name) if name != "scale" else wait(super().__getattribute__(name))


class Holds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lazy = Lazy()

    def mlp(self, x: Tensor) -> Any:
        return x @ self.lazy.weight

    def forward(self, x: Tensor) -> Any:
        return self.mlp(x)


def has_an_alias_of_its_own(block: Block) -> Any:
    other = WithDescriptors()
    other.alias = wait  # type: ignore[assignment]
    return lambda x: other.alias(x)


def has_something_before_a_part(block: Block) -> Any:
    vars(block)["inner"] = wait
    return lambda x: block.inner(x)


def has_other_builtins(block: Block) -> Any:
    namespace: dict[str, Any] = {"__builtins__": {"abs": wait}}
    exec("def call(x): return abs(x)", namespace)
    return namespace["call"]


def takes_a_tensor_with_a_method_of_its_own(block: Block) -> Any:
    y = torch.ones(4)
    y.sin = lambda: wait(y)  # type: ignore[method-assign]
    return lambda x: y.sin() + x


class Called:
    def __call__(self, x: Tensor) -> Tensor:
        return wait(x)


UNKNOWN: list[Callable[[Block], Any]] = [
    *(counts, is_not_there_yet, has_functions_of_its_own, calls_what_it_closes_over, takes_from_a_list),
    *(loops_over_a_list, changes_a_module, changes_in_place, has_a_hook, has_another_method, calls_super),
    *(calls_what_has_its_own_name, has_an_alias_of_its_own, has_something_before_a_part, has_other_builtins),
    takes_a_tensor_with_a_method_of_its_own,
    lambda block: lambda x, other=WithDescriptors(): other.mlp(x),  # noqa: B008
    lambda block: lambda x, other=WithDescriptors(): x * other.gain,  # noqa: B008
    lambda block: lambda x, lazy=Lazy(): x @ lazy.weight,  # noqa: B008
    lambda block: lambda x, lazy=Lazy(): lazy.inner(x),  # noqa: B008
    lambda block: lambda x, lazy=LazyNumbers(): x * lazy.scale,  # noqa: B008
    lambda block: Holds().mlp,
    lambda block: wait,
    lambda block: block.wait,
    lambda block: Other().mlp,
    lambda block: Called(),
    lambda block: generates,
    lambda block: lambda x: wait(x),
    lambda block: lambda x: names_a_global(x),
    lambda block: lambda x: block.wait(x),
    lambda block: lambda x: block.barrier.wait(),
    lambda block: lambda x: block.apply(wait),
    lambda block: lambda x: block.__call__(x),
    lambda block: lambda x: block.requires_grad_(False),
    lambda block: lambda *xs: xs[0],
    lambda block: lambda x, by=wait: by(x),
    lambda block: torch.no_grad()(block.mlp),
    lambda block: torch.sin_,
    lambda block: torch.rand_like,
    lambda block: functools.partial(torch.sin, out=torch.zeros(3, 4)),
    lambda block: functools.partial(F.relu, inplace=True),
    lambda block: functools.partial(block.mlp, wait),
]


@pytest.mark.parametrize("make", UNKNOWN, ids=range(len(UNKNOWN)))
def test_what_may_do_more_gets_a_thread(make: Callable[[Block], Any]) -> None:
    assert not is_made_in_turn(make(Block()))
