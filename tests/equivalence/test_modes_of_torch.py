"""Dispatch modes that torch comes with count on the order of operators: calls under them are made as by a loop."""

from __future__ import annotations

import dataclasses
import functools
import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd.function import Function
from torch.utils.checkpoint import (
    _CachedTorchDispatchMode,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from torch.utils.flop_counter import FlopCounterMode
from torch.utils.module_tracker import ModuleTracker

from moe_autograd import map_with_parallel_backward, parallel_apply
from moe_autograd.autograd.runs import is_under_mode_of_torch
from tests.support.comparison import MapFunction, Raised, assert_same_program, one_after_another
from tests.support.functions_context import SavesInput
from tests.support.module_programs import NUM_CALLS, leaves, parameters, seeded
from tests.support.operators import CountOperators

NUM_REPEATS = 5
addmm, tanh, mul = torch.ops.aten.addmm.default, torch.ops.aten.tanh.default, torch.ops.aten.mul.Tensor


@pytest.mark.parametrize("kept", [[addmm], [tanh], [addmm, tanh]])
def test_a_selective_checkpoint_around_a_map_keeps_what_each_call_has_computed(kept: list[Any]) -> None:
    """It hands out in its second run what it kept in the first one, by the number of the operator."""

    def program(apply: MapFunction) -> Any:
        modules = seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)))
        xs = leaves()
        contexts = functools.partial(create_selective_checkpoint_contexts, kept)

        def block(x: Tensor) -> Tensor:
            return torch.cat(apply(modules, [(x[: 1 + i % 2],) for i in range(NUM_CALLS)])).tanh()

        for x in xs:
            checkpoint(block, x, use_reentrant=False, context_fn=contexts).square().sum().backward()
        return [x.grad for x in [*xs, *parameters(modules)]]

    for _ in range(NUM_REPEATS):
        said = assert_same_program(
            program, native_apply=one_after_another, mapped_apply=parallel_apply, tolerance=1e-12
        )
        assert not isinstance(said, Raised)


def test_a_selective_checkpoint_around_mapped_functions_keeps_what_each_call_has_computed() -> None:
    def program(apply: MapFunction) -> Any:
        xs = leaves()
        contexts = functools.partial(create_selective_checkpoint_contexts, [mul])

        def block(x: Tensor) -> Tensor:
            return torch.cat(apply(SavesInput, *[(x[: 1 + i % 2] * i,) for i in range(NUM_CALLS)])).tanh()

        for x in xs:
            checkpoint(block, x, use_reentrant=False, context_fn=contexts).square().sum().backward()
        return [x.grad for x in xs]

    for _ in range(NUM_REPEATS):
        assert not isinstance(assert_same_program(program), Raised)


class Overlaps(nn.Module):
    """Notes how many calls there are at once."""

    running, most = 0, 0

    def forward(self, x: Tensor) -> Tensor:
        Overlaps.running += 1
        Overlaps.most = max(Overlaps.most, Overlaps.running)
        for _ in range(20):
            x = x @ x.T
        Overlaps.running -= 1
        return x


class OfTheirs(_CachedTorchDispatchMode):
    """As libraries derive their own."""


@pytest.mark.parametrize(
    "mode",
    [
        lambda: FlopCounterMode(display=False),
        lambda: create_selective_checkpoint_contexts([mul])[0],
    ],
)
def test_calls_are_made_one_after_the_other_under_modes_of_torch(mode: Any) -> None:
    Overlaps.running = Overlaps.most = 0
    with mode():
        assert is_under_mode_of_torch()
        parallel_apply([Overlaps() for _ in range(NUM_CALLS)], [(torch.eye(200),)] * NUM_CALLS)
    assert Overlaps.most == 1


class Cubes(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, threads: list[int]) -> Tensor:
        ctx.save_for_backward(x)
        threads.append(threading.get_ident())
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return 3 * ctx.saved_tensors[0] ** 2 * grad, None


FAKE: dict[str, Any] = {
    "inputs": lambda noted, x, _: (noted, [(x,)] * NUM_CALLS, {}),
    "inputs in lists, recomputed": lambda noted, x, _: (
        (lambda xs: noted(xs[0].detach() * xs[1])),
        [([x.detach(), x],)] * NUM_CALLS,
        {"recompute": True},
    ),
    "closures": lambda noted, x, _: ((lambda: noted(x.sin())), [()] * NUM_CALLS, {}),
    "weights": lambda noted, _, module: ((lambda: noted(module.weight)), [()] * NUM_CALLS, {}),
}


@pytest.mark.parametrize("where", FAKE)
def test_fake_tensors_outside_of_their_mode_are_computed_with_one_after_the_other(where: str) -> None:
    """Their mode, which all share, raised for calls side by side that it is in a kernel already, or that it is not."""
    with FakeTensorMode():
        x, module = torch.randn(5, 4, requires_grad=True), nn.Linear(4, 4)
    threads: list[int] = []

    def noted(y: Tensor) -> Tensor:
        threads.append(threading.get_ident())
        for _ in range(20):
            y = y.sin()
        return y

    call, inputs, options = FAKE[where](noted, x, module)
    outputs = parallel_apply([call] * NUM_CALLS, inputs, **options)
    torch.stack(outputs).sum().backward()
    assert {*threads} == {threading.get_ident()}
    assert type(module.weight.grad if where == "weights" else x.grad) is FakeTensor


def test_functions_of_fake_tensors_are_made_one_after_the_other() -> None:
    with FakeTensorMode():
        x = torch.randn(5, 4, requires_grad=True)
    threads: list[int] = []
    torch.stack(map_with_parallel_backward(Cubes, *[(x, threads)] * NUM_CALLS)).sum().backward()
    assert type(x.grad) is FakeTensor
    assert {*threads} == {threading.get_ident()}


class CubesOfHeld(Cubes):
    @staticmethod
    def forward(ctx: Any, held: Any, threads: list[int]) -> Tensor:
        x = held.x if isinstance(held, Holds) else held[0]
        for _ in range(20):
            x = x.sin()
        return Cubes.forward(ctx, x, threads)


@dataclasses.dataclass
class Holds:
    x: Tensor


@pytest.mark.parametrize("hold", [lambda x: [x, 1], lambda x: (x,), Holds])
def test_functions_of_fake_tensors_that_their_arguments_hold_are_made_one_after_the_other(hold: Any) -> None:
    with FakeTensorMode():
        x = torch.randn(5, 4)
    threads: list[int] = []
    outputs = map_with_parallel_backward(CubesOfHeld, *[(hold(x), threads)] * NUM_CALLS)
    assert {*map(type, outputs)} == {FakeTensor}
    assert {*threads} == {threading.get_ident()}


def test_modes_derived_from_those_of_torch_are_known_and_those_of_users_let_be() -> None:
    assert not is_under_mode_of_torch()
    with OfTheirs(None, {}):
        assert is_under_mode_of_torch()
    with CountOperators():
        assert not is_under_mode_of_torch()
    with ModuleTracker():
        assert is_under_mode_of_torch()
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    assert not is_under_mode_of_torch()
    handle.remove()


def test_operations_are_counted_for_each_module_as_in_a_loop() -> None:
    """Whose they are in the backward is known by hooks of `register_multi_grad_hook` on inputs and results."""

    def program(apply: MapFunction) -> Any:
        modules = nn.ModuleList(seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))))
        with FlopCounterMode(modules, display=False) as counter:
            outputs = apply(list(modules), [(x * 2,) for x in leaves()])
            torch.stack(outputs).sum().backward()
        return {name: dict(counts) for name, counts in counter.get_flop_counts().items()}

    assert_same_program(program, native_apply=one_after_another, mapped_apply=parallel_apply)
