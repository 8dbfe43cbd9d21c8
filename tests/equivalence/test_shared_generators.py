"""Calls that share a `torch.Generator` take turns: they draw from it what a plain loop does, on each run."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from moe_autograd import map_with_parallel_backward, parallel_apply
from tests.equivalence.test_statistics import Gate
from tests.support.comparison import (
    MapFunction,
    Raised,
    assert_same_program,
    loss_of,
    one_after_another,
)
from tests.support.functions_waiting import PATIENCE_S
from tests.support.module_programs import leaves

pytestmark = pytest.mark.usefixtures("nothing_is_small")

Draw = Callable[[Tensor], Tensor]
global_generator: torch.Generator


def draw(x: Tensor, generator: torch.Generator) -> Tensor:
    return x * torch.rand(x.shape, generator=generator, dtype=x.dtype)


class Draws(nn.Module):
    """Draws from what it holds, or takes."""

    def __init__(self, held: torch.Generator | None = None) -> None:
        super().__init__()
        self.held = held

    def forward(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        own = self.held if generator is None else generator
        assert own is not None
        return draw(x, own)


class NamesGlobal(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return draw(x, global_generator)


def draw_from_global(x: Tensor) -> Tensor:
    return draw(x, global_generator)


class Within(nn.Module):
    """Calls something when it is let in, with what it holds itself."""

    def __init__(self, call: Any, gate: Gate) -> None:
        super().__init__()
        self.call, self.gate = call, gate

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        return self.call(self.gate.pass_first(x), *args, **kwargs)


def as_attribute(generator: torch.Generator) -> Any:
    return Draws(generator)


def in_a_closure(generator: torch.Generator) -> Any:
    return lambda x: draw(x, generator)


def in_a_global(generator: torch.Generator) -> Any:
    return NamesGlobal()


def in_a_global_of_a_function(generator: torch.Generator) -> Any:
    return draw_from_global


WAYS = [
    as_attribute,
    in_a_closure,
    in_a_global,
    in_a_global_of_a_function,
]


def new_generator() -> torch.Generator:
    global global_generator
    global_generator = torch.Generator().manual_seed(3)
    return global_generator


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_numbers_from_a_generator_that_calls_share_are_those_of_a_loop(
    way: Callable[[torch.Generator], Any],
) -> None:
    def program(apply: MapFunction) -> Any:
        generator, xs, gate = new_generator(), leaves(), Gate(apply)
        calls = [Within(way(generator), gate), way(generator), way(generator), gate.open]
        outputs = apply(calls, [(x,) for x in xs])
        loss_of(outputs).backward()
        return outputs, [x.grad for x in xs], torch.rand(3, generator=generator)

    said = assert_same_program(program, native_apply=one_after_another, mapped_apply=parallel_apply)
    assert not isinstance(said, Raised)


@pytest.mark.parametrize("by_keyword", [False, True])
def test_numbers_from_a_generator_that_calls_take_are_those_of_a_loop(by_keyword: bool) -> None:
    def program(apply: MapFunction) -> Any:
        generator, xs, gate = new_generator(), leaves(), Gate(apply)
        calls = [Within(Draws(), gate), Draws(), Draws(), gate.open]
        own = {"generator": generator}
        args = [(x,) if by_keyword else (x, generator) for x in xs[:3]]
        return apply(calls, [*args, (xs[3],)], [*[own if by_keyword else {}] * 3, {}])

    said = assert_same_program(program, native_apply=one_after_another, mapped_apply=parallel_apply)
    assert not isinstance(said, Raised)


class DrawsTogether(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, generator: torch.Generator, meet: Callable[[], object]) -> Tensor:
        meet()
        ctx.save_for_backward(drawn := torch.rand(x.shape, generator=generator, dtype=x.dtype))
        return x * drawn

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * ctx.saved_tensors[0], None, None


def test_calls_of_an_autograd_function_are_made_in_turn_where_they_take_one_generator() -> None:
    nobody_comes, generators = threading.Barrier(2, timeout=0.1), [new_generator() for _ in range(2)]
    with pytest.raises(threading.BrokenBarrierError):
        map_with_parallel_backward(DrawsTogether, *[(x, generators[0], nobody_comes.wait) for x in leaves(2)])
    both_are_here = threading.Barrier(2, timeout=PATIENCE_S)
    own = zip(leaves(2), generators, strict=True)
    results = map_with_parallel_backward(DrawsTogether, *[(x, one, both_are_here.wait) for x, one in own])
    assert_close(results[0] / leaves()[0], results[1] / leaves()[1])


def test_calls_with_generators_of_their_own_wait_for_each_other() -> None:
    barrier = threading.Barrier(4)

    class Waits(Draws):
        def forward(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
            barrier.wait(PATIENCE_S)
            return super().forward(x, generator)

    calls = [Waits(torch.Generator()) for _ in range(4)]
    assert len(parallel_apply(calls, [(x,) for x in leaves()])) == 4


def test_forwards_that_are_run_again_draw_in_the_order_of_a_loop_that_runs_them_twice() -> None:
    def program(apply: MapFunction) -> Any:
        generator, xs = new_generator(), leaves(8)
        modules = [Draws(generator) for _ in xs]
        if apply is one_after_another:
            again = functools.partial(checkpoint, use_reentrant=False)
            outputs = apply([functools.partial(again, one) for one in modules], xs)
        else:
            outputs = apply(modules, [(x,) for x in xs], recompute=True)
        loss_of(outputs).backward()
        return outputs, [x.grad for x in xs], torch.rand(3, generator=generator)

    assert_same_program(program, native_apply=one_after_another, mapped_apply=parallel_apply)
