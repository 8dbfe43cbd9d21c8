"""Experts made by `torch.compile`: compiled as often as in a loop, and side by side once they are."""

from __future__ import annotations

import contextlib
import functools
import gc
import threading
from collections.abc import Callable, Iterator
from types import CodeType, FunctionType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._C._dynamo.eval_frame import _debug_get_cache_entry_list
from torch._dynamo.utils import counters
from torch.utils.checkpoint import checkpoint

from moe_autograd import (
    MixtureOfExperts,
    TopKRouter,
    map_with_parallel_backward,
    parallel_apply,
    run_isolated_backward,
    run_isolated_forward,
    split_backward,
)
from moe_autograd.autograd.contents import compiled
from moe_autograd.autograd.recompute import Recompute
from moe_autograd.errors import UnsupportedTransformError
from tests.support.comparison import MapFunction, Raised, assert_same_program, one_after_another
from tests.support.module_programs import finish, parameters, seeded

NUM_EXPERTS = 12  # more than dynamo compiles of one kind
pytestmark = pytest.mark.filterwarnings("ignore")  # torch's compiler warns of itself


@pytest.fixture(autouse=True)
def nothing_is_compiled() -> Iterator[None]:
    torch._dynamo.reset()
    compiled._known.clear()
    compiled._met.clear()
    yield
    torch._dynamo.reset()


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh()


def by_call(module: nn.Module) -> Callable[..., Any]:
    return torch.compile(module, backend="eager", fullgraph=True)


def in_place(module: nn.Module) -> Callable[..., Any]:
    module.compile(backend="eager", fullgraph=True)
    return module


def in_a_function(module: nn.Module) -> Callable[..., Any]:
    return torch.compile(lambda x: module(x) * 2, backend="eager", fullgraph=True)


def inside(module: nn.Module) -> Callable[..., Any]:
    return nn.Sequential(by_call(module), nn.Tanh())


def checkpointed(calls: Any, inputs: Any) -> list[Any]:
    return [checkpoint(call, *x, use_reentrant=False) for call, x in zip(calls, inputs, strict=True)]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("compile_it", [by_call, in_place, in_a_function, inside])
def test_experts_are_compiled_as_often_as_in_a_loop(compile_it: Any, recompute: bool) -> None:
    """Calls of one shape first, then of another, then each of its own; of one row, or none, dynamo compiles apart."""

    def program(apply: MapFunction) -> Any:
        torch._dynamo.reset()
        before = counters["stats"]["unique_graphs"]
        modules = seeded(Expert, NUM_EXPERTS)
        calls, said = [compile_it(module) for module in modules], []
        for rows in (
            [9] * NUM_EXPERTS,
            [7] * NUM_EXPERTS,
            range(2, 2 + NUM_EXPERTS),
            range(20, 20 + NUM_EXPERTS),
            [1] * NUM_EXPERTS,
            [0] * NUM_EXPERTS,
        ):
            xs = [torch.linspace(-1, 1, 4 * n, dtype=torch.float64).view(n, 4).requires_grad_() for n in rows]
            said.append(finish(apply(calls, [(x * 2,) for x in xs]), *xs, *parameters(modules)))
        return said, counters["stats"]["unique_graphs"] - before

    said = assert_same_program(
        program,
        native_apply=checkpointed if recompute else one_after_another,
        mapped_apply=functools.partial(parallel_apply, recompute=recompute),
        tolerance=1e-12,
    )
    assert not isinstance(said, Raised), said


@pytest.mark.parametrize(
    "change",
    [
        "no_grad",
        "inference_mode",
        "autocast",
        "eval",
        "freeze",
        "dtype",
        "requires_grad",
        "keyword",
        "transposed",
        "compile",
    ],
)
@pytest.mark.parametrize("compile_it", [by_call, in_place, in_a_function])
def test_what_is_compiled_anew_though_shapes_are_as_before_is_compiled_once(
    compile_it: Any, change: str
) -> None:
    """A layer that was trained is evaluated, for instance: each thread compiled it, until dynamo refused."""

    def program(apply: MapFunction) -> Any:
        torch._dynamo.reset()
        compiled._known.clear()
        before = counters["stats"]["unique_graphs"]
        modules = seeded(Expert, NUM_EXPERTS)
        calls = [compile_it(module) for module in modules]
        xs = [torch.linspace(-1, 1, 16, dtype=torch.float64).view(4, 4) for _ in modules]
        said = [finish(apply(calls, [(x,) for x in xs]), *parameters(modules)) for _ in range(4)]
        world: Any = contextlib.nullcontext()
        if change in ("no_grad", "inference_mode"):
            world = getattr(torch, change)()
        elif change == "autocast":
            world = torch.autocast("cpu", dtype=torch.bfloat16)
        elif change == "dtype":
            xs = [x.float() for x in xs]
        elif change == "requires_grad":
            xs = [x.requires_grad_() for x in xs]
        elif change == "transposed":
            xs = [x.T for x in xs]
        elif change == "compile":
            calls = [torch.compile(module, backend="aot_eager", fullgraph=True) for module in modules]
        for module in modules if change in ("eval", "freeze", "dtype") else ():
            module.eval() if change == "eval" else module.requires_grad_(False)
            module.to(xs[0].dtype)
        with world:
            if change == "keyword":
                calls = [functools.partial(call, x=x) for call, x in zip(calls, xs, strict=True)]
                returned = apply(calls, [()] * NUM_EXPERTS)
            else:
                returned = apply(calls, [(x,) for x in xs])
        return said, [y.detach() for y in returned], counters["stats"]["unique_graphs"] - before

    said = assert_same_program(
        program, native_apply=one_after_another, mapped_apply=parallel_apply, tolerance=1e-6
    )
    assert not isinstance(said, Raised), said


def test_compiled_experts_take_nested_tensors() -> None:
    rows = [[torch.randn(n, 4, dtype=torch.float64) for n in sizes] for sizes in ((2, 3), (1, 5), (4, 1))]

    def program(apply: MapFunction) -> Any:
        experts = seeded(Expert, 3)
        nested = [torch.nested.nested_tensor(own, layout=torch.jagged) for own in rows]
        results = apply([by_call(expert) for expert in experts], [(x,) for x in nested])
        values = [result.values() for result in results]
        torch.cat(values).square().sum().backward()
        return values, [parameter.grad for parameter in parameters(experts)]

    said = assert_same_program(
        program, native_apply=one_after_another, mapped_apply=parallel_apply, tolerance=1e-12
    )
    assert not isinstance(said, Raised)


def test_once_compiled_experts_may_wait_for_each_other() -> None:
    barrier = threading.Barrier(2)
    is_open = True

    @torch._dynamo.disable
    def meet() -> None:
        if not is_open:
            barrier.wait(120)

    class Meets(Expert):
        def forward(self, x: Tensor) -> Tensor:
            x = super().forward(x)
            meet()
            return x * 2

    calls = [torch.compile(module, backend="eager") for module in seeded(Meets, 2)]
    for rows in (4, 5, 6, 7):
        x = torch.ones(rows, 4, dtype=torch.float64)
        is_open = rows < 7
        parallel_apply(calls, [(x,)] * 2)


def test_of_a_map_within_a_compiled_function_nothing_is_compiled_for_each_number_of_calls() -> None:
    layer = MixtureOfExperts(TopKRouter(4, 4, 1), [Expert() for _ in range(4)])
    tolerant = MixtureOfExperts(layer.router, layer.experts, on_failure="drop")

    def all_of_them(xs: list[Tensor]) -> Tensor:
        doubled = map_with_parallel_backward(Double, *[(x,) for x in xs])
        applied = parallel_apply([*layer.experts, *layer.experts][: len(xs)], doubled)
        return torch.cat([*applied, layer(xs[0]), tolerant(xs[0])]).sum()

    function = torch.compile(all_of_them, backend="eager", dynamic=False)
    for num_calls in range(1, 5):
        xs = [torch.randn(num_calls, 4, requires_grad=True) for _ in range(num_calls)]
        torch.testing.assert_close(function(xs), all_of_them(xs))
    own: Any = [map_with_parallel_backward, parallel_apply, layer._through_experts]
    for function in own:
        assert not _debug_get_cache_entry_list(function.__code__), function
    assert counters["stats"]["unique_graphs"] > 0


LAYER = MixtureOfExperts(TopKRouter(4, 6, 2), [nn.Linear(4, 4) for _ in range(6)])
TRAINED: dict[str, Callable[[list[Tensor]], Any]] = {
    "functions": lambda xs: map_with_parallel_backward(Double, *[(x,) for x in xs]),
    "modules": lambda xs: parallel_apply(LAYER.experts[: len(xs)], xs),
    "recomputed": lambda xs: parallel_apply(LAYER.experts[: len(xs)], xs, recompute=True),
    "deferred": lambda xs: parallel_apply(LAYER.experts[: len(xs)], xs, defer_weight_grads=True),
    "layer": lambda xs: [LAYER(torch.cat(xs))],
}


@pytest.mark.parametrize("call", TRAINED.values(), ids=TRAINED)
def test_a_backward_that_compiled_code_begins_compiles_nothing_of_ours(call: Any) -> None:
    """Nodes and hooks were compiled, anew for each number of calls, until the compiler warned of `recompile_limit`."""

    def train(x: Tensor, num_calls: int) -> Tensor | None:
        results = call([x * 2] * num_calls)
        results[0].register_hook(lambda grad: grad * 3)
        sum(y.square().sum() for y in results).backward()
        return x.grad

    function = torch.compile(train, backend="eager")
    for num_calls in range(1, 5):
        x, same = (torch.linspace(-1, 1, 12).view(3, 4).requires_grad_() for _ in range(2))
        torch.testing.assert_close(function(x, num_calls), train(same, num_calls))
    # what leads from the compiled code to ours is compiled for one number, and then for any
    assert {
        code.co_qualname for code in codes_of_ours() if len(_debug_get_cache_entry_list(code)) > 2
    } == set()


def codes_of_ours() -> set[CodeType]:
    """Return the code of all functions in our files, and of what dynamo has made of them."""
    gc.unfreeze()  # `tests/conftest.py` has frozen what was there before the tests
    functions = [one for one in gc.get_objects() if type(one) is FunctionType]
    gc.freeze()
    return {one.__code__ for one in functions if "/moe_autograd/" in one.__code__.co_filename}


@pytest.mark.parametrize(
    "options", [{}, {"on_failure": "drop"}, {"zero_grads_for_idle_experts": True}], ids=str
)
def test_a_layer_is_not_compiled_for_each_number_of_tokens(options: dict[str, Any]) -> None:
    """Which experts have tokens, and which have one, differed each time: the compiler warned of `recompile_limit`."""
    layer = MixtureOfExperts(TopKRouter(4, 6, 2), [Expert() for _ in range(6)], **options)
    model = nn.Sequential(nn.Linear(4, 4), layer)
    function, weights = torch.compile(model, backend="eager"), [*model.parameters()]

    def train(num_tokens: int) -> None:
        x = torch.randn(num_tokens, 4)
        expected = torch.autograd.grad(model(x).square().sum(), weights, allow_unused=True)
        found = torch.autograd.grad(function(x).square().sum(), weights, allow_unused=True)
        torch.testing.assert_close(found, expected)

    for num_tokens in (1, 40, 3):  # from the third on for any number; one row is compiled apart
        train(num_tokens)
    num_graphs = counters["stats"]["unique_graphs"]
    for num_tokens in (2, 4, 5, 7, 9, 33, 1):
        train(num_tokens)
    assert counters["stats"]["unique_graphs"] == num_graphs


@pytest.mark.parametrize("transform", [torch.func.vmap, torch.func.grad, torch.func.jacrev])
def test_a_layer_in_a_compiled_transform_is_refused_in_words_of_ours(transform: Callable[..., Any]) -> None:
    """Dispatch failed first: `False != True`, or data that cannot be accessed."""
    layer = MixtureOfExperts(TopKRouter(4, 3, 1), [Expert() for _ in range(3)])
    function = torch.compile(lambda x: transform(lambda x: layer(x).sum())(x), backend="eager")
    with pytest.raises(UnsupportedTransformError, match=r"expected no active torch\.func transform"):
        function(torch.randn(2, 5, 4))


def test_isolated_calls_and_split_backwards_in_compiled_code() -> None:
    """The compiler traced into them, and bound the arguments of another function."""

    def both(x: Tensor) -> tuple[Tensor, ...]:
        ctx, y = run_isolated_forward(Double, x)
        leaf, weight = (t.detach().requires_grad_() for t in (y, y.T))
        (grad,), pending = split_backward(leaf @ weight, torch.ones(len(x), len(x)), leaf, weight)
        return *run_isolated_backward(Double, ctx, grad), *pending.run()

    function = torch.compile(both, backend="eager")
    for rows in (2, 3, 4):
        torch.testing.assert_close(function(torch.ones(rows, 4)), both(torch.ones(rows, 4)))


def test_a_call_that_is_recomputed_by_hand_in_compiled_code() -> None:
    """The compiler failed within itself."""

    def train(x: Tensor) -> Tensor | None:
        Recompute()(lambda x: (x * x).sin(), x).sum().backward()
        return x.grad

    function = torch.compile(train, backend="eager")
    for rows in (2, 3, 4):
        x, same = (torch.linspace(-1, 1, rows).requires_grad_() for _ in range(2))
        torch.testing.assert_close(function(x), train(same))
