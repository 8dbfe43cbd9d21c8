"""Under one seed a map gives one result, whatever the scheduling and the number of workers.

Every call draws from a stream of its own; the caller's stream advances as if the map had drawn once, or not at
all if no call drew.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from moe_autograd import map_with_parallel_backward, parallel_apply
from moe_autograd.autograd.recompute import Recompute
from tests.support.functions_waiting import PATIENCE_S
from tests.support.module_programs import parameters, seeded

BOUNDS = [1, 2, 16, None]
NUM_EXPERTS = 8


class Dropout(Function):
    """Drops out in forward, and draws noise again in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        mask = torch.rand_like(x) < 0.5
        ctx.save_for_backward(mask)
        return x * mask

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (mask,) = ctx.saved_tensors
        return grad * mask + torch.randn(grad.shape)


def experts() -> list[nn.Module]:
    def make() -> nn.Module:
        return nn.Sequential(
            nn.Linear(16, 32), nn.Dropout(0.5), nn.GELU(), nn.Linear(32, 16), nn.Dropout(0.2)
        )

    return seeded(make, NUM_EXPERTS)


def step(bound: int | None, *, recompute: bool = False, seed: int = 7) -> list[Tensor]:
    """Outputs, gradients, and what the caller draws next."""
    torch.manual_seed(seed)
    modules = experts()
    xs = [torch.ones(4, 16, dtype=torch.float64, requires_grad=True) for _ in modules]
    outputs = parallel_apply(modules, [(x,) for x in xs], max_concurrency=bound, recompute=recompute)
    torch.stack(outputs).pow(2).sum().backward()
    grads = [x.grad for x in [*xs, *parameters(modules)] if x.grad is not None]
    return [*[output.detach() for output in outputs], *grads, torch.rand(3)]


def assert_equal(one: list[Tensor], other: list[Tensor]) -> None:
    assert len(one) == len(other)
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.stress
@pytest.mark.parametrize("recompute", [False, True])
def test_dropout_in_eight_experts_is_the_same_in_a_hundred_runs_with_any_number_of_workers(
    recompute: bool,
) -> None:
    expected = step(1)
    for run in range(100):
        assert_equal(step(BOUNDS[run % len(BOUNDS)], recompute=recompute), expected)


@pytest.mark.parametrize("bound", BOUNDS)
def test_dropout_in_forward_and_noise_in_backward_of_a_function_are_the_same(bound: int | None) -> None:
    def run(bound: int | None) -> list[Tensor]:
        torch.manual_seed(3)
        xs = [torch.ones(50, requires_grad=True) for _ in range(NUM_EXPERTS)]
        results = map_with_parallel_backward(Dropout, *[(x,) for x in xs], max_concurrency=bound)
        torch.stack(results).sum().backward()
        return [*results, *[x.grad for x in xs if x.grad is not None], torch.rand(3)]

    assert_equal(run(bound), run(1))


def test_other_seeds_and_other_calls_and_later_maps_draw_other_numbers() -> None:
    def draw() -> tuple[Tensor, ...]:
        return map_with_parallel_backward(Draws, *[(torch.rand, 8)] * 4)

    torch.manual_seed(0)
    drawn = [*draw(), *draw()]
    torch.manual_seed(1)
    drawn += draw()
    assert len({tuple(numbers.tolist()) for numbers in drawn}) == len(drawn)


def test_forward_and_backward_of_a_call_draw_other_numbers() -> None:
    torch.manual_seed(0)
    x = torch.zeros(8, requires_grad=True)
    seen: list[Tensor] = []

    class Both(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            seen.append(torch.rand(8))
            return x * 1

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            seen.append(torch.rand(8))
            return grad

    map_with_parallel_backward(Both, (x,))[0].sum().backward()
    assert not torch.equal(*seen)


class Draws(Function):
    @staticmethod
    def forward(ctx: Any, draw: Callable[[int], Tensor], size: int) -> Tensor:
        return draw(size)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        raise AssertionError("nothing requires a gradient")


def next_numbers(map_something: Callable[[], Any]) -> Tensor:
    torch.manual_seed(5)
    map_something()
    return torch.rand(4)


def test_a_map_that_draws_nothing_leaves_the_callers_stream_untouched() -> None:
    def quiet() -> None:
        map_with_parallel_backward(Draws, *[(torch.zeros, 4)] * 4)
        modules = [nn.Linear(4, 4).eval() for _ in range(0)] or [torch.sin, torch.cos]
        parallel_apply(modules, [torch.ones(2)] * 2)

    assert torch.equal(next_numbers(quiet), next_numbers(lambda: None))


@pytest.mark.parametrize("num_calls", [1, 2, 5])
@pytest.mark.parametrize("size", [1, 1000])
def test_a_map_that_draws_advances_the_callers_stream_by_one_draw(num_calls: int, size: int) -> None:
    """The same for one call or five, for one number or a thousand; and not by nothing."""
    after = next_numbers(lambda: map_with_parallel_backward(Draws, *[(torch.rand, size)] * num_calls))
    assert torch.equal(after, next_numbers(lambda: map_with_parallel_backward(Draws, (torch.rand, 1))))
    assert not torch.equal(after, next_numbers(lambda: None))


def test_a_call_draws_the_same_numbers_whoever_runs_beside_it() -> None:
    def first(num_calls: int) -> Tensor:
        torch.manual_seed(5)
        return map_with_parallel_backward(Draws, *[(torch.rand, 8)] * num_calls)[0]  # type: ignore[no-any-return]

    assert torch.equal(first(1), first(6))


KINDS: dict[str, Callable[[int], Tensor]] = {
    "rand": torch.rand,
    "randn": torch.randn,
    "randint": lambda n: torch.randint(1 << 40, (n,)),
    "randperm": torch.randperm,
    "rand_like": lambda n: torch.rand_like(torch.ones(n)),
    "randn_like": lambda n: torch.randn_like(torch.ones(n)),
    "normal": lambda n: torch.normal(0.0, torch.ones(n)),
    "bernoulli": lambda n: torch.bernoulli(torch.full((n,), 0.5)),
    "multinomial": lambda n: torch.multinomial(torch.ones(n), n),
    "poisson": lambda n: torch.poisson(torch.full((n,), 9.0)),
    "uniform_": lambda n: torch.empty(n).uniform_(),
    "exponential_": lambda n: torch.empty(n).exponential_(),
    "cauchy_": lambda n: torch.empty(n).cauchy_(),
    "random_": lambda n: torch.empty(n, dtype=torch.int64).random_(),
    "dropout": lambda n: F.dropout(torch.ones(n)),
    "alpha_dropout": lambda n: F.alpha_dropout(torch.ones(n), training=True),
    "dropout2d": lambda n: F.dropout2d(torch.ones(n, 2, 2, 2)),
    "rrelu": lambda n: F.rrelu(-torch.ones(n), training=True),
    "gumbel_softmax": lambda n: F.gumbel_softmax(torch.ones(n)),
    "attention": lambda n: F.scaled_dot_product_attention(
        torch.ones(1, n, 4), torch.ones(1, n, 4), torch.arange(4.0 * n).view(1, n, 4), dropout_p=0.5
    ),
    "LSTM": lambda n: nn.LSTM(2, 2, num_layers=2, dropout=0.5)(torch.ones(n, 2))[0].detach(),
    "Linear": lambda n: nn.Linear(n, n).weight.detach(),
    "gamma": lambda n: torch.distributions.Gamma(torch.ones(n), torch.ones(n)).sample(),
    "dirichlet": lambda n: torch.distributions.Dirichlet(torch.ones(n)).sample(),
    "binomial": lambda n: torch.binomial(torch.full((n,), 99.0), torch.full((n,), 0.5)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_whatever_is_random_draws_from_the_calls_own_stream(kind: str) -> None:
    """The calls meet before they draw, so that all draw at once; with one worker nobody does."""
    draw = KINDS[kind]

    def run(bound: int | None) -> list[Tensor]:
        torch.manual_seed(11)
        barrier = threading.Barrier(1 if bound else 6)

        def meet_and_draw(size: int) -> Tensor:
            barrier.wait(PATIENCE_S)
            return draw(size)

        results = map_with_parallel_backward(Draws, *[(meet_and_draw, 33)] * 6, max_concurrency=bound)
        return [*results, torch.rand(2)]

    expected = run(1)
    assert_equal(run(None), expected)
    assert len({tuple(result.flatten().tolist()) for result in expected}) == 7


def test_a_generator_that_the_user_gives_is_the_one_that_draws() -> None:
    generators = [torch.Generator().manual_seed(i) for i in range(3)]
    calls = [(lambda n, g=g: torch.rand(n, generator=g), 5) for g in generators]
    results = map_with_parallel_backward(Draws, *calls)
    for i, result in enumerate(results):
        assert torch.equal(result, torch.rand(5, generator=torch.Generator().manual_seed(i)))


def test_a_seed_set_inside_a_call_counts_for_that_call_alone() -> None:
    def seed_and_draw(n: int) -> Tensor:
        torch.manual_seed(123)
        return torch.rand(n)

    torch.manual_seed(9)
    before = torch.get_rng_state()
    seeded_result, other = map_with_parallel_backward(Draws, (seed_and_draw, 4), (torch.rand, 4))
    after = torch.rand(4)
    torch.set_rng_state(before)
    _, alone = map_with_parallel_backward(Draws, (torch.rand, 4), (torch.rand, 4))
    assert torch.equal(after, torch.rand(4))
    assert torch.equal(other, alone)
    torch.manual_seed(123)
    assert torch.equal(seeded_result, torch.rand(4))


def test_nested_maps_are_reproducible() -> None:
    def run(bound: int | None) -> list[Tensor]:
        torch.manual_seed(4)

        def inner(n: int) -> Tensor:
            own = torch.rand(n)
            results = map_with_parallel_backward(Draws, *[(torch.rand, n)] * 3, max_concurrency=bound)
            return torch.stack([own, *results, torch.rand(n)])

        return [*map_with_parallel_backward(Draws, *[(inner, 5)] * 4, max_concurrency=bound), torch.rand(2)]

    expected = run(1)
    numbers = torch.cat([result.flatten() for result in expected]).tolist()
    assert len(set(numbers)) == len(numbers)
    for bound in (2, None, None, None):
        assert_equal(run(bound), expected)


def test_maps_in_other_threads_do_not_change_a_maps_numbers() -> None:
    """Their bases come from the process's one stream, so only maps that drew their base may differ: seed each."""

    def run(_: int) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(3)
        return map_with_parallel_backward(Draws, *[(lambda n: torch.rand(n, generator=generator), 4)])

    with ThreadPoolExecutor(4) as threads:
        results = list(threads.map(run, range(40)))
    assert all(torch.equal(result[0], results[0][0]) for result in results)


@pytest.mark.stress
@pytest.mark.parametrize("early_stop", [True, False])
def test_checkpoint_used_inside_concurrent_experts_recomputes_with_the_same_masks(early_stop: bool) -> None:
    def run(checkpointed: bool, bound: int | None) -> list[Tensor]:
        torch.manual_seed(7)
        modules = experts()
        with torch.utils.checkpoint.set_checkpoint_early_stop(early_stop):
            calls = (
                [lambda x, m=m: checkpoint(m, x, use_reentrant=False) for m in modules]
                if checkpointed
                else modules
            )
            xs = [torch.ones(4, 16, dtype=torch.float64, requires_grad=True) for _ in modules]
            outputs = parallel_apply(calls, [(x,) for x in xs], max_concurrency=bound)
            torch.stack(outputs).pow(2).sum().backward()
        return [p.grad for p in [*xs, *parameters(modules)] if p.grad is not None] + [torch.rand(2)]

    expected = run(False, 1)
    for _ in range(30):
        assert_equal(run(True, None), expected)


def test_recompute_keeps_the_callers_stream_as_it_is_without() -> None:
    assert torch.equal(step(None, recompute=True)[-1], step(None)[-1])


def test_torchs_own_generator_objects_stay_what_they_are() -> None:
    step(None)
    assert isinstance(torch.default_generator, torch.Generator)
    assert isinstance(torch.random.default_generator, torch.Generator)
    assert torch.rand(2, generator=torch.random.default_generator).shape == (2,)


DRAWS: dict[str, Callable[[Tensor], Tensor]] = {
    "rand": lambda x: torch.rand(x.shape),
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "randint": lambda x: torch.randint(3, 50, x.shape),
    "randint_like": lambda x: torch.randint_like(x, 50),
    "randperm": lambda x: torch.randperm(x.numel()),
    "bernoulli": lambda x: torch.bernoulli(x * 0.5),
    "dropout": lambda x: F.dropout(x, 0.5),
    "native_dropout": lambda x: torch.ops.aten.native_dropout.default(x, 0.5, True)[0],
    "normal": lambda x: torch.normal(x, 1.0),
}


@pytest.mark.parametrize("draw", DRAWS.values(), ids=DRAWS)
def test_a_dispatch_mode_changes_no_number(draw: Callable[[Tensor], Tensor]) -> None:
    """Selective checkpoints and counters of operators are such modes; so is the first run of compiled code."""

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    def watched(x: Tensor) -> Tensor:
        with Watch():
            return draw(x)

    def drawn_by(call: Callable[[Tensor], Tensor]) -> list[Tensor]:
        torch.manual_seed(1)
        return [*parallel_apply([call] * 4, [(torch.ones(40),)] * 4), torch.rand(1)]

    plain = drawn_by(draw)
    assert not torch.equal(plain[0], plain[1])
    for one, other in zip(plain, drawn_by(watched), strict=True):
        assert torch.equal(one, other)


def test_a_selective_checkpoint_draws_the_same_again() -> None:
    class Masks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return (x * (torch.rand_like(x) < 0.5)).square()

    contexts = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
    xs = [torch.full((40,), 3.0, requires_grad=True) for _ in range(4)]
    outputs = parallel_apply([Masks()] * 4, [(x,) for x in xs], recompute=Recompute(context_fn=contexts))
    torch.stack(outputs).sum().backward()
    for x, output in zip(xs, outputs, strict=True):
        assert torch.equal(x.grad, 6.0 * (output != 0))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype")
@pytest.mark.parametrize("draw", [torch.rand_like, torch.randn_like], ids=lambda draw: str(draw.__name__))
@pytest.mark.parametrize("dtype", [None, torch.float64], ids=str)
def test_random_numbers_like_a_nested_tensor(draw: Any, dtype: torch.dtype | None) -> None:
    x = torch.nested.nested_tensor([torch.ones(3, 64), torch.ones(5, 64)], layout=torch.jagged)
    draws = []
    for _ in range(2):
        torch.manual_seed(0)
        draws.append(parallel_apply([functools.partial(draw, dtype=dtype)] * 2, [(x,)] * 2))
    (first, second), again = draws
    assert first.shape == x.shape
    assert first.dtype == (dtype or x.dtype)
    assert first.values().unique().numel() > 500
    assert not first.values().equal(second.values())
    assert first.values().equal(again[0].values())


@pytest.mark.parametrize("first_to_end", [0, 1])
def test_a_saved_tensor_hook_draws_for_each_call_from_that_calls_stream(first_to_end: int) -> None:
    """Though the thread of the call that ends last packs what the others have saved."""
    has_ended = threading.Event()

    def call(x: Tensor, index: int) -> Tensor:
        y = x.sin() * torch.rand(2)
        if index != first_to_end:
            assert has_ended.wait(PATIENCE_S)
        return y

    class Calls(nn.Module):
        def forward(self, x: Tensor, index: int) -> Tensor:
            return call(x, index)

    def end(module: nn.Module, args: Any, y: Any) -> None:
        if args[1] == first_to_end:
            has_ended.set()

    def rounded(x: Tensor) -> Tensor:
        return x + torch.rand_like(x)

    modules, x = [Calls(), Calls()], torch.ones(2, requires_grad=True)
    modules[first_to_end].register_forward_hook(end)

    def draw(args: Any) -> list[Tensor]:
        torch.manual_seed(1)
        with torch.autograd.graph.saved_tensors_hooks(rounded, lambda packed: packed):
            ys = parallel_apply(modules, args)
        return [*ys, *[torch.autograd.grad(y.sum(), x, retain_graph=True)[0] for y in ys], torch.rand(2)]

    in_order = draw([(x, first_to_end), (x, first_to_end)])  # neither waits
    has_ended.clear()
    assert all(map(torch.equal, draw([(x, 0), (x, 1)]), in_order))
