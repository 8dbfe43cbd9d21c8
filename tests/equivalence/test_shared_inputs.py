"""What many calls compute for one tensor is added in the order of a loop, to the same bits, and as it comes."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo import compiled_autograd
from torch.autograd import Function
from torch.utils._python_dispatch import TorchDispatchMode

from moe_autograd import map_with_parallel_backward, parallel_apply
from moe_autograd.autograd.joining import accumulating
from tests.support.comparison import (
    MapFunction,
    Raised,
    assert_same,
    assert_same_program,
    natively,
    one_after_another,
)

NUM_CALLS = 9
PATIENCE_S = 60.0
BOUNDS = [1, 2, None]


@pytest.fixture(autouse=True, params=["each", "only large ones"])
def added_here(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "each":
        monkeypatch.setattr(accumulating, "LEAST_ADDED", 1)


class Product(Function):
    """Multiplies by a weight, after it was told to begin."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, begin: Callable[[], object] | None = None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.begin = begin
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        x, weight = ctx.saved_tensors
        if ctx.begin is not None:
            ctx.begin()
        return grad @ weight.t(), x.t() @ grad, None


def inputs_of(dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    """A weight, and batches of so different sizes that the order of a sum of their gradients can be told."""
    torch.manual_seed(0)
    weight = torch.randn(8, 8, dtype=dtype, requires_grad=True)
    return weight, [(10.0 ** (i % 4) * torch.randn(4, 8)).to(dtype) for i in range(NUM_CALLS)]


def backward_through(results: Any) -> None:
    torch.stack([(i + 1) * result.sin() for i, result in enumerate(results)]).sum().backward()


@pytest.mark.parametrize("max_concurrency", BOUNDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_functions_with_one_weight_and_one_batch(dtype: torch.dtype, max_concurrency: int | None) -> None:
    def program(apply: MapFunction) -> Any:
        weight, xs = inputs_of(dtype)
        batch = xs[0].clone().requires_grad_() * 1
        batch.retain_grad()
        pairs = [*[(x, weight) for x in xs], *[(batch, weight)] * 4]
        backward_through(apply(Product, *pairs, max_concurrency=max_concurrency))
        return weight.grad, batch.grad

    assert_same_program(program)


@pytest.mark.parametrize("is_deferred", [False, True])
@pytest.mark.parametrize("max_concurrency", BOUNDS)
def test_modules_with_one_weight_and_one_batch(is_deferred: bool, max_concurrency: int | None) -> None:
    def program(apply: MapFunction) -> Any:
        weight, xs = inputs_of(torch.float32)
        batch = xs[0].clone().requires_grad_() * 1
        batch.retain_grad()
        module = functools.partial(torch.nn.functional.linear, weight=weight)
        given = [*[(x,) for x in xs], *[(batch,)] * 4]
        modules = [lambda x: module(x)] * len(given)
        options = {"max_concurrency": max_concurrency, "defer_weight_grads": is_deferred}
        backward_through(apply(modules, given, **options))
        return weight.grad, batch.grad

    assert_same_program(program, native_apply=one_after_another, mapped_apply=parallel_apply)


def test_the_other_uses_of_a_small_tensor_are_added_first_as_in_a_loop() -> None:
    def program(apply: MapFunction) -> Any:
        weight, xs = inputs_of(torch.float32)
        results = apply(Product, *[(x, weight) for x in xs])
        backward_through([*results, (3e3 * weight[:4]).cos()])
        return weight.grad

    if accumulating.LEAST_ADDED > 1:  # of large ones the map hands on a sum
        assert_same_program(program)
    else:
        assert_same_program(program, tolerance=1e-3)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
def test_second_order() -> None:
    def program(apply: MapFunction) -> Any:
        weight, xs = inputs_of(torch.float32)
        loss = torch.stack([y.sin() for y in apply(Product, *[(x, weight) for x in xs])]).sum()
        (grad,) = torch.autograd.grad(loss, weight, create_graph=True)
        (second,) = torch.autograd.grad(grad.square().sum(), weight)
        return grad, second

    assert_same_program(program)


def test_whoever_ends_first_the_bits_are_the_same() -> None:
    """The last call, whose gradient is the first to be added, waits until all others have theirs."""

    def run(apply: MapFunction, begin: Callable[[int], Callable[[], object] | None]) -> Tensor | None:
        weight, xs = inputs_of(torch.float32)
        backward_through(apply(Product, *[(x, weight, begin(i)) for i, x in enumerate(xs)]))
        return weight.grad

    num_begun = threading.Semaphore(0)

    def wait_for_others() -> None:
        for _ in range(NUM_CALLS - 1):
            assert num_begun.acquire(timeout=PATIENCE_S)

    late = run(
        map_with_parallel_backward, lambda i: wait_for_others if i == NUM_CALLS - 1 else num_begun.release
    )
    assert_same(run(natively, lambda _: None), late)


class Tells(Function):
    """Returns for a shared tensor what it is told to return."""

    @staticmethod
    def forward(ctx: Any, shared: Tensor, grad_of: Callable[[], Tensor | None]) -> Tensor:
        ctx.grad_of = grad_of
        return shared.detach().clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return ctx.grad_of(), None


ODD_GRADS: dict[str, Callable[[], Tensor | None]] = {
    "none": lambda: None,
    "another dtype": lambda: torch.full((4, 8), 0.1, dtype=torch.float64),
    "sparse": lambda: torch.eye(8)[:4].to_sparse(),
    "expanded": lambda: torch.ones(1).expand(4, 8),
    "to be reduced": lambda: torch.ones(3, 4, 8),
    "with a graph": lambda: torch.ones(4, 8, requires_grad=True),
    "conjugate": lambda: torch.ones(4, 8, dtype=torch.complex64).conj().real,
    "made of nothing": lambda: torch._efficientzerotensor((4, 8)),
    "transposed": lambda: torch.arange(32.0).reshape(8, 4).t(),
}


@pytest.mark.parametrize("places", [{0}, {4}, {NUM_CALLS - 1}, {NUM_CALLS - 2, NUM_CALLS - 1}], ids=str)
@pytest.mark.parametrize("odd", ODD_GRADS)
def test_gradients_that_are_not_like_the_others(odd: str, places: set[int]) -> None:
    def program(apply: MapFunction) -> Any:
        shared = torch.zeros(4, 8, requires_grad=True)
        usual = [functools.partial(torch.full, (4, 8), 10.0 ** (i - 4)) for i in range(NUM_CALLS)]
        calls = [(shared, ODD_GRADS[odd] if i in places else usual[i]) for i in range(NUM_CALLS)]
        torch.stack(apply(Tells, *calls)).sum().backward()
        return shared.grad

    is_handed_on = odd in ("another dtype", "sparse", "to be reduced") and accumulating.LEAST_ADDED == 1
    assert_same_program(program, tolerance=1e-6 if is_handed_on else 0.0)


@pytest.mark.parametrize("grad_dtype", [torch.float32, torch.bfloat16, None])
def test_they_are_added_in_the_dtype_that_their_tensor_asks_for(grad_dtype: torch.dtype | None) -> None:
    """In bfloat16 a sum has no digits for the small ones."""

    def program(apply: MapFunction) -> Any:
        shared = torch.zeros(4, 8, dtype=torch.bfloat16, requires_grad=True)
        shared.grad_dtype = grad_dtype
        grads = [
            functools.partial(torch.full, (4, 8), 2.0 ** (i - 9), dtype=torch.bfloat16) for i in range(10)
        ]
        torch.stack(apply(Tells, *[(shared, grad) for grad in grads])).sum().backward()
        return shared.grad

    assert_same_program(program)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_nothing_that_a_call_returned_is_changed(count: int) -> None:
    own = [torch.ones(4, 8) for _ in range(count)]
    shared = torch.zeros(4, 8, requires_grad=True)
    calls = [(shared, lambda i=i: own[i] if i < count else None) for i in range(NUM_CALLS)]
    torch.stack(map_with_parallel_backward(Tells, *calls)).sum().backward()
    assert shared.grad is not None
    assert (shared.grad == count).all()
    assert all((one == 1).all() for one in own)


def test_a_backward_for_several_gradients_at_once() -> None:
    def program(apply: MapFunction) -> Any:
        weight, xs = inputs_of(torch.float32)
        result = torch.stack(apply(Product, *[(x, weight) for x in xs])).sum(0).flatten()
        return torch.autograd.grad(result, weight, torch.eye(len(result)), is_grads_batched=True)

    assert_same_program(program)


TRANSFORMS = {
    "vmap": lambda function, x: torch.vmap(function)(torch.stack([x, 2 * x])),
    "linearize": lambda function, x: torch.func.linearize(function, x)[1](x),
}


@pytest.mark.parametrize("transform", TRANSFORMS)
def test_a_backward_under_a_transform(transform: str) -> None:
    """It sees only the gradient that comes last, which is of many backwards at once; others are of one."""

    def program(apply: MapFunction) -> Any:
        weight, xs = inputs_of(torch.float64)
        results = apply(Product, *[(x, weight) for x in xs])
        ones = [torch.ones_like(result) for result in results]

        def function(grad: Tensor) -> Any:
            return torch.autograd.grad([*results], weight, [grad, *ones[1:]], retain_graph=True)[0]

        return TRANSFORMS[transform](function, ones[0])

    assert_same_program(program, tolerance=1e-9)


def functions_in_modules(func: type[Function], *calls: Any) -> Any:
    return parallel_apply([func.apply] * len(calls), calls)


@pytest.mark.parametrize("mapped", [map_with_parallel_backward, functions_in_modules])
@pytest.mark.parametrize("num_weights", [1, NUM_CALLS])
@pytest.mark.filterwarnings("ignore")  # torch's compiler warns of itself
def test_under_compiled_autograd(num_weights: int, mapped: MapFunction) -> None:
    """Whose graph adds up all gradients that it saw being returned; with a `.grad` already calls add to it."""

    def program(apply: MapFunction) -> Any:
        weight, xs = inputs_of(torch.float64)
        weights = [weight, *[weight.detach().clone().requires_grad_() for _ in xs]][:num_weights]
        for one in weights:
            one.grad = torch.ones_like(one)
        results = apply(Product, *[(x, weights[i % num_weights]) for i, x in enumerate(xs)])
        with compiled_autograd._enable(lambda graph: graph):
            (torch.stack(list(results)).sum() + sum(one.square().sum() for one in weights)).backward()
        return [one.grad for one in weights]

    assert_same_program(program, mapped_apply=mapped, tolerance=1e-9)


def test_calls_that_no_gradient_reaches_keep_no_one_waiting() -> None:
    def program(apply: MapFunction) -> Any:
        weight, xs = inputs_of(torch.float32)
        backward_through(apply(Product, *[(x, weight) for x in xs])[2:7])
        return weight.grad

    assert_same_program(program)


def test_calls_with_different_histories() -> None:
    def program(apply: MapFunction) -> Any:
        weight, xs = inputs_of(torch.float32)
        past = [Product.apply(x.requires_grad_(), torch.eye(8)) for x in xs]  # type: ignore[no-untyped-call]
        results = apply(Product, *[(x, weight) for x in past])
        backward_through(results[:4])
        return weight.grad, [x.grad for x in xs]

    assert_same_program(program, tolerance=1e-3)


def test_after_an_error_nothing_is_added() -> None:
    def fail() -> None:
        raise ValueError("no")

    weight, xs = inputs_of(torch.float32)
    results = map_with_parallel_backward(
        Product, *[(x, weight, fail if i == 3 else None) for i, x in enumerate(xs)]
    )
    with pytest.raises(ValueError, match="no"):
        backward_through(results)
    assert weight.grad is None


class Counted(Product):
    """Its gradients of the weight are counted."""

    seen: list[weakref.ref[Tensor]]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        found = Product.backward(ctx, grad)
        Counted.seen.append(weakref.ref(found[1]))
        return found


def counted_functions(weight: Tensor, xs: list[Tensor], look: Callable[[], object]) -> Any:
    return map_with_parallel_backward(Counted, *[(x, weight, look) for x in xs], max_concurrency=1)


def counted_modules(weight: Tensor, xs: list[Tensor], look: Callable[[], object]) -> Any:
    def call(x: Tensor) -> Any:
        return Counted.apply(x, weight, look)  # type: ignore[no-untyped-call]

    return parallel_apply([call] * NUM_CALLS, xs, max_concurrency=1)


@pytest.mark.parametrize("call_all", [counted_functions, counted_modules])
def test_there_is_never_more_than_one_gradient_beside_the_sum(
    call_all: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accumulating, "LEAST_ADDED", 1)
    Counted.seen = []
    num_alive: list[int] = []
    weight, xs = inputs_of(torch.float32)
    results = call_all(weight, xs, lambda: num_alive.append(sum(one() is not None for one in Counted.seen)))
    backward_through(results)
    assert num_alive == [0, 1] + [0] * (NUM_CALLS - 2)  # the first is the sum until the second is added


@pytest.mark.parametrize("kind", ["functions", "modules"])
def test_backwards_begin_with_the_last_call_as_in_a_loop(kind: str) -> None:
    begun: list[int] = []
    weight, xs = inputs_of(torch.float32)
    calls = [(x, weight, functools.partial(begun.append, i)) for i, x in enumerate(xs)]
    if kind == "functions":
        results: Any = map_with_parallel_backward(Product, *calls, max_concurrency=1)
    else:
        results = parallel_apply([Product.apply] * NUM_CALLS, calls, max_concurrency=1)
    backward_through(results)
    assert begun == list(reversed(range(NUM_CALLS)))


class CountsAdditions(TorchDispatchMode):
    """Counts what is added."""

    num_added = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_added += func.overloadpacket in (torch.ops.aten.add, torch.ops.aten.add_)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("wants_weight", [False, True])
def test_what_nobody_asks_for_is_not_added(wants_weight: bool) -> None:
    def program(apply: MapFunction) -> Any:
        weight, xs = inputs_of(torch.float32)
        for x in xs:
            x.requires_grad_()
        loss = torch.stack(apply(Product, *[(x, weight) for x in xs])).sum()
        with CountsAdditions() as counts:
            torch.autograd.grad(loss, [weight] if wants_weight else xs)
        return counts.num_added

    assert assert_same_program(program) == (NUM_CALLS - 1 if wants_weight else 0)


class Added(Function):
    """Adds the weight to a number."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        return x.sum() + weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        return None, 2 * grad


@pytest.mark.parametrize("mapped", [map_with_parallel_backward, functions_in_modules])
@pytest.mark.parametrize("reached", range(2))
def test_under_compiled_autograd_through_some_results(reached: int, mapped: MapFunction) -> None:
    """Its graph would add what is missing for the other call to what there is."""

    def program(apply: MapFunction) -> Any:
        weight, xs = inputs_of(torch.float64)
        computed = weight * 2
        results = apply(Added, *[(x, (computed, weight)[i // 2]) for i, x in enumerate(xs[:4])])
        with compiled_autograd._enable(lambda graph: graph):
            (results[reached].sum() + results[2].sum()).backward()
        return weight.grad

    said = assert_same_program(program, mapped_apply=mapped, tolerance=1e-9)
    assert not isinstance(said, Raised), said
