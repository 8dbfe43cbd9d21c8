"""Operators that torch dispatches in Python serve in calls: autograd functions under `torch.func`, `torch.cond`."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops import map as map_of_torch
from torch._higher_order_ops import scan, while_loop
from torch._ops import HigherOrderOperator, _higher_order_ops
from torch.autograd import Function
from torch.func import grad, jvp, vmap
from torch.nn.attention.flex_attention import flex_attention
from torch.utils.checkpoint import checkpoint

from moe_autograd import parallel_apply
from tests.support.comparing_modules import ORDER, assert_same_without_error
from tests.support.comparison import MapFunction, Raised, assert_same_program, one_after_another
from tests.support.functions_waiting import PATIENCE_S
from tests.support.module_programs import NUM_CALLS, finish, leaves

pytestmark = pytest.mark.filterwarnings("ignore")  # torch's compiler warns of itself


class Cube(Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x**3

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)
        ctx.save_for_forward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return grad * 3 * x**2

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return tangent * 3 * x**2


def attend(x: Tensor) -> Tensor:
    q = x.detach().float().view(1, 1, 3, 4)  # on the CPU it knows no gradient
    return x * flex_attention(q, q, q).view_as(x)


def checkpointed(calls: Any, inputs: Any) -> list[Any]:
    return [checkpoint(call, *x, use_reentrant=False) for call, x in zip(calls, inputs, strict=True)]


def either(x: Tensor) -> Tensor:
    return torch.cond(x.sum() > 0, torch.sin, torch.cos, (x,))


def elsewhere(x: Tensor) -> Tensor:
    return either(x)


def until(x: Tensor) -> Tensor:
    return while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y * 2), (torch.tensor(0), x))[1]


def for_each_row(x: Tensor) -> Tensor:
    return map_of_torch(torch.sin, x)


def one_by_one(x: Tensor) -> Tensor:
    return scan(lambda carry, row: (carry + row, carry * row), torch.zeros_like(x[0]), x)[1]


KINDS: dict[str, Callable[[Tensor], Tensor]] = {
    "vmap": vmap(Cube.apply),
    "grad": grad(lambda x: Cube.apply(x).sum()),
    "vmap of grad": vmap(grad(lambda row: Cube.apply(row).sum())),
    "jvp": lambda x: jvp(Cube.apply, (x,), (x.detach(),))[1],
    "cond": either,
    "cond in a function": elsewhere,
    "while_loop": until,
    "map": for_each_row,
    "scan": one_by_one,
    "flex_attention": attend,
}


@pytest.fixture(autouse=True)
def _nothing_stays_compiled() -> Iterator[None]:
    yield
    torch._dynamo.reset()


def assert_same_calls(call: Callable[[Tensor], Tensor], options: dict[str, Any]) -> None:
    def program(apply: MapFunction) -> Any:
        xs = leaves()
        return finish(apply([call] * NUM_CALLS, [(x,) for x in xs]), *xs)

    # To a checkpoint `torch.func.grad` says no.
    native = checkpointed if "recompute" in options else one_after_another
    mapped = functools.partial(parallel_apply, **options)
    assert_same_program(program, native_apply=native, mapped_apply=mapped, tolerance=ORDER)


@pytest.mark.parametrize(
    "options", [{}, {"max_concurrency": 1}, {"recompute": True}, {"defer_weight_grads": True}], ids=str
)
@pytest.mark.parametrize("kind", ["vmap", "grad", "vmap of grad", "jvp", "cond"])
def test_in_the_forward_of_a_call(kind: str, options: dict[str, Any]) -> None:
    assert_same_calls(KINDS[kind], options)


@pytest.mark.parametrize("kind", ["cond in a function", "while_loop", "map", "scan", "flex_attention"])
def test_what_traces_for_its_gradient_does_so_one_after_the_other(kind: str) -> None:
    """What torch traces with is the process's: side by side it raised, and nothing could be compiled any more."""
    assert_same_calls(KINDS[kind], {})


@pytest.mark.parametrize("kind", ["vmap", "grad", "vmap of grad", "jvp"])
def test_at_second_order(kind: str) -> None:
    def program(apply: MapFunction) -> Any:
        xs = leaves()
        outputs = apply([KINDS[kind]] * NUM_CALLS, [(x,) for x in xs])
        grads = torch.autograd.grad([y.square().sum() for y in outputs], xs, create_graph=True)
        return grads, torch.autograd.grad([g.square().sum() for g in grads], xs)

    assert_same_without_error(program)


class Within(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.save_for_backward(x)
        ctx.call = call
        return call(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return grad * ctx.call(*ctx.saved_tensors), None


@pytest.mark.parametrize("kind", ["vmap", "vmap of grad", "cond", "flex_attention"])
def test_in_the_forward_and_the_backward_of_a_function(kind: str) -> None:
    call = KINDS[kind]

    def program(apply: MapFunction) -> Any:
        xs = leaves()
        return finish(apply(Within, *[(x, call) for x in xs]), *xs)

    assert not isinstance(assert_same_program(program), Raised)


@pytest.mark.parametrize("kind", ["cond", "flex_attention"])
@pytest.mark.parametrize("is_warm", [True, False])
def test_in_what_is_compiled(kind: str, is_warm: bool) -> None:
    compiled = torch.compile(KINDS[kind], backend="eager")
    if is_warm:
        compiled(*leaves(1))

    assert_same_calls(compiled, {})


def test_what_else_is_called_so_is_called_side_by_side() -> None:
    all_are_here = threading.Barrier(2)

    class Conditioned(nn.Module):
        def cond(self, x: Tensor) -> Tensor:
            all_are_here.wait(PATIENCE_S)
            return torch.sin(x)

        def forward(self, x: Tensor) -> Tensor:
            return torch.cos(self.cond(x))

    parallel_apply([Conditioned(), Conditioned()], [(torch.ones(1),)] * 2)


def test_one_that_is_made_after_the_first_map() -> None:
    parallel_apply([torch.sin] * 2, [(torch.ones(1),)] * 2)

    class Late(HigherOrderOperator):
        def __call__(self, x: Tensor) -> Tensor:
            return super().__call__(x)  # type: ignore[no-any-return]

    late = Late("late_of_tests")
    late.py_autograd_impl(torch.sin)
    try:
        x = torch.ones(3, requires_grad=True)
        results = parallel_apply([late] * 2, [(x,)] * 2)
    finally:
        del _higher_order_ops["late_of_tests"]
    for result in results:
        assert torch.equal(result, x.sin())
