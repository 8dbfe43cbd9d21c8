"""Nothing is left of calls that fail, and of graphs that go without a backward, beside all that watches what is saved.

Saved-tensor hooks are told of a node's own result. Whoever keeps that keeps the node, which keeps it: two that no
collector finds. All with `gc` disabled, watching tensors through weak references.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from moe_autograd import (
    MixtureOfExperts,
    TopKRouter,
    map_with_parallel_backward,
    parallel_apply,
    split_backward,
)
from moe_autograd.autograd.offload import OffloadedExperts
from tests.support.functions_context import ChangesInPlace, SavesInput, SavesOutput
from tests.support.functions_results import ReturnsItsInputAndMore
from tests.support.offloading import OPTIMIZERS

NUM_CALLS = 3
pytestmark = pytest.mark.usefixtures("no_gc")


class Faulty(Exception):
    pass


class Watched(nn.Module):
    """Saves its own result, as many operators do; fails in some of its runs.

    Args:
        refs: to all results.
        fails_in: the first run, a second one or none (0).
    """

    def __init__(self, refs: list[weakref.ref[Tensor]], fails_in: int = 0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.refs, self.fails_in = refs, fails_in
        self._runs = itertools.count(1)  # of several threads

    def forward(self, x: Tensor) -> Tensor:
        run = next(self._runs)
        y = torch.tanh(x @ self.weight)
        self.refs.append(weakref.ref(y))
        if run == self.fails_in:
            raise Faulty
        return y


def num_alive(refs: Sequence[weakref.ref[Tensor]]) -> int:
    assert refs, "nothing was watched"
    return sum(ref() is not None for ref in refs)


def applied(calls: Sequence[Callable[..., Any]]) -> list[Tensor]:
    return list(parallel_apply(calls, [(torch.randn(2, 4, requires_grad=True),)] * len(calls)))


def applied_with_hooks(calls: Sequence[Callable[..., Any]]) -> list[Tensor]:
    with saved_tensors_hooks(lambda tensor: tensor.detach().clone(), lambda tensor: tensor):
        return applied(calls)


def applied_in_a_checkpoint(calls: Sequence[Callable[..., Any]]) -> list[Tensor]:
    x = torch.randn(2, 4, requires_grad=True)
    results = checkpoint(lambda x: tuple(parallel_apply(calls, [(x,)] * len(calls))), x, use_reentrant=False)
    assert isinstance(results, tuple)
    return list(results)


WAYS = pytest.mark.parametrize("applied", [applied, applied_with_hooks, applied_in_a_checkpoint])


@WAYS
@pytest.mark.parametrize("failing", range(NUM_CALLS))
def test_nothing_is_left_of_calls_beside_one_that_fails(applied: Any, failing: int) -> None:
    refs: list[weakref.ref[Tensor]] = []
    with contextlib.suppress(Faulty):
        applied([Watched(refs, fails_in=int(i == failing)) for i in range(NUM_CALLS)])
    assert num_alive(refs) == 0


@pytest.mark.parametrize("failing", range(NUM_CALLS))
def test_nothing_is_left_of_a_recomputation_in_which_a_call_fails(failing: int) -> None:
    refs: list[weakref.ref[Tensor]] = []
    results = applied_in_a_checkpoint([Watched(refs, fails_in=2 * (i == failing)) for i in range(NUM_CALLS)])
    with pytest.raises(Faulty):
        torch.stack(results).sum().backward()
    del results
    assert num_alive(refs) == 0


@pytest.mark.parametrize("num_used", [1, NUM_CALLS])
def test_nothing_is_left_of_a_recomputation_that_stops_early(num_used: int) -> None:
    """The last tensor that it needs is one of the map's."""
    refs: list[weakref.ref[Tensor]] = []
    results = applied_in_a_checkpoint([Watched(refs) for _ in range(NUM_CALLS)])
    torch.stack(results[:num_used]).sum().backward()
    del results
    assert num_alive(refs) == 0


@WAYS
def test_nothing_is_left_of_graphs_without_a_backward(applied: Any) -> None:
    refs: list[weakref.ref[Tensor]] = []
    applied([Watched(refs) for _ in range(NUM_CALLS)])
    assert num_alive(refs) == 0


def test_nothing_is_left_of_graphs_in_functions_beside_one_that_fails() -> None:
    refs: list[weakref.ref[Tensor]] = []

    class KeepsAGraph(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, fails: bool) -> Tensor:
            with torch.enable_grad():
                ctx.result = Watched(refs, fails_in=int(fails))(x)
            result: Tensor = ctx.result
            return result.detach()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
            raise NotImplementedError

    x = torch.randn(2, 4, requires_grad=True)
    with (
        contextlib.suppress(Faulty),
        saved_tensors_hooks(lambda tensor: tensor.detach(), lambda tensor: tensor),
    ):
        map_with_parallel_backward(KeepsAGraph, (x, False), (x, True), (x, False))
    assert num_alive(refs) == 0


def test_nothing_is_left_of_functions_whose_recomputation_stops_at_what_they_save() -> None:
    refs: list[weakref.ref[Tensor]] = []

    def run(x: Tensor) -> Tensor:
        watched = Watched(refs)(x)
        one, other = map_with_parallel_backward(SavesOutput, (watched,), (watched,))
        return one + other  # type: ignore[no-any-return]

    y = checkpoint(run, torch.randn(2, 4, requires_grad=True), use_reentrant=False)
    y.sum().backward()  # type: ignore[union-attr]
    del y
    assert num_alive(refs) == 0


@pytest.mark.parametrize("func", [SavesInput, SavesOutput, ChangesInPlace, ReturnsItsInputAndMore])
@pytest.mark.parametrize("is_view", [False, True])
def test_the_inputs_of_functions_go_whose_recomputation_stops_at_what_they_save(
    func: Any, is_view: bool
) -> None:
    def run(x: Tensor) -> Tensor:
        inputs = [x * (i + 1) for i in range(NUM_CALLS)]
        own = [each.view(-1) if is_view else each for each in inputs]
        num_arguments = 2 if func is ReturnsItsInputAndMore else 1
        results = map_with_parallel_backward(func, *[(each,) * num_arguments for each in own])
        return sum((y[1] if isinstance(y, tuple) else y).sum() for y in results)  # type: ignore[return-value]

    x = torch.randn(2, 4, requires_grad=True)
    refs = [weakref.ref(x)]  # the graph of the second run leads to it
    y = checkpoint(run, x, use_reentrant=False)
    y.backward()  # type: ignore[union-attr]
    del x, y
    assert num_alive(refs) == 0


def test_nothing_is_left_of_an_offloaded_expert_whose_recomputation_stops_at_its_end() -> None:
    """What a map in it saved was all that was needed, or what its node saves itself."""
    refs: list[weakref.ref[Tensor]] = []

    class Maps(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before, self.within = Watched(refs), Watched(refs)

        def forward(self, x: Tensor) -> Any:
            return parallel_apply([self.within, torch.sin], [(self.before(x),)] * 2)[1] * 2

    with OffloadedExperts([Maps()], OPTIMIZERS["sgd"], max_resident_bytes=1 << 16) as experts:
        results = applied_in_a_checkpoint(list(experts))
        results[0].sum().backward()
        del results
        assert num_alive(refs) == 0


@pytest.mark.parametrize("num_microbatches", [None, 2])
@pytest.mark.parametrize("end", ["none", "of one", "fails"])
def test_nothing_is_left_of_offloaded_experts(end: str, num_microbatches: int | None) -> None:
    """Without a backward, with one through one of two results, and where one of them fails."""
    refs: list[weakref.ref[Tensor]] = []
    modules = [Watched(refs), Watched(refs, fails_in=int(end == "fails"))]
    with OffloadedExperts(
        modules, OPTIMIZERS["sgd"], max_resident_bytes=1 << 16, num_microbatches=num_microbatches
    ) as experts:
        with contextlib.suppress(Faulty):
            results = applied(list(experts))
            if end == "of one":
                results[0].sum().backward()
            del results
        assert num_alive(refs) == 0


@pytest.mark.parametrize("is_view", [False, True], ids=["whole", "view"])
def test_inputs_that_a_call_changed_go_with_a_graph_that_nobody_walked(is_view: bool) -> None:
    """A changed input leads to the map, which may not hold it: of a view no collector would find the cycle."""

    def one_pass() -> list[weakref.ref[Tensor]]:
        computed = torch.ones(2, 3, requires_grad=True) * 2
        changed = computed[0] if is_view else computed
        results = parallel_apply([lambda t: t.mul_(2) * 1, torch.sin], [(changed,), (computed * 1,)])
        return [weakref.ref(tensor) for tensor in (computed, changed, *results)]

    assert [ref() for ref in one_pass()] == [None] * 4


def apply_in_two_parts(call: Callable[..., Any], x: Tensor) -> None:
    split_backward(call(x).sum(), None, x, ())[1].run()


def apply_twice(call: Callable[..., Any], x: Tensor, **how: Any) -> None:
    torch.stack(parallel_apply([call] * 2, [(x,)] * 2, **how)).sum().backward()


def apply_with_used_results(call: Callable[..., Any], x: Tensor) -> None:
    calls = [lambda x: (y := call(x), y.sin())] * 2
    ((used, result), _) = parallel_apply(calls, [(x,)] * 2)
    torch.autograd.grad(result.sum(), used)


def map_where_it_is_made(call: Callable[..., Any], x: Tensor) -> None:
    torch.stack(call(x, apply=lambda func: map_with_parallel_backward(func, (x,), (x,)))).sum().backward()


@pytest.mark.parametrize("has_setup", [False, True])
@pytest.mark.parametrize(
    "apply",
    [
        apply_twice,
        functools.partial(apply_twice, defer_weight_grads=True),
        functools.partial(apply_twice, recompute=True),
        apply_in_two_parts,
        apply_with_used_results,
        map_where_it_is_made,
    ],
)
def test_autograd_functions_that_are_made_in_a_call_can_go(
    apply: Callable[..., None], has_setup: bool
) -> None:
    refs: list[weakref.ref[Tensor]] = []
    weight = torch.ones((), requires_grad=True)

    def call(x: Tensor, apply: Callable[[Any], Any] | None = None) -> Any:
        table = torch.ones(4)
        refs.append(weakref.ref(table))

        class Scale(torch.autograd.Function):
            @staticmethod
            def forward(*args: Any) -> Tensor:
                x: Tensor = args[-1]
                return x * table

            @staticmethod
            def backward(ctx: Any, grad: Tensor) -> Tensor:
                return grad * 2

        if has_setup:
            Scale.setup_context = staticmethod(lambda ctx, inputs, output: None)  # type: ignore[method-assign]
        return apply(Scale) if apply else Scale.apply(x * weight)

    apply(call, torch.randn(2, 4, requires_grad=True))
    gc.collect()  # classes are held by themselves
    assert num_alive(refs) == 0


class FailsInBackward(torch.autograd.Function):
    """Saves a tensor of its own; there are references to it, and to what the backward makes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, refs: list[weakref.ref[Tensor]], fails: bool) -> Tensor:
        kept = x * 2
        ctx.save_for_backward(kept)
        ctx.refs, ctx.fails = refs, fails
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        made = grad * ctx.saved_tensors[0]
        ctx.refs += map(weakref.ref, (made, *ctx.saved_tensors))
        if ctx.fails:
            raise Faulty
        return made, None, None


class FailsInForward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, refs: list[weakref.ref[Tensor]], fails: bool) -> Tensor:
        return Watched(refs, fails_in=int(fails))(x)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        raise NotImplementedError


def layer_of(calls: Sequence[Callable[..., Any]], **how: Any) -> Tensor:
    layer = MixtureOfExperts(TopKRouter(4, NUM_CALLS, NUM_CALLS), calls, **how)  # type: ignore[arg-type]
    return layer(torch.randn(2, 4, requires_grad=True))  # type: ignore[return-value]


def applied_by(calls: Sequence[Callable[..., Any]], **how: Any) -> list[Tensor]:
    return parallel_apply(calls, [(torch.randn(2, 4, requires_grad=True),)] * len(calls), **how)


class WatchedInTurn(Watched):
    def only_computes(self) -> bool:
        return True


@pytest.mark.parametrize(
    "apply",
    [
        *[applied, applied_with_hooks, applied_in_a_checkpoint, layer_of],
        *[functools.partial(way, max_concurrency=1) for way in (applied_by, layer_of)],
        *[functools.partial(way, recompute=True) for way in (applied_by, layer_of)],
        *[functools.partial(way, defer_weight_grads=True) for way in (applied_by, layer_of)],
        lambda calls: parallel_apply([lambda: applied(calls), lambda: applied(calls)], [(), ()]),
    ],
)
@pytest.mark.parametrize("kind", [Watched, WatchedInTurn])
def test_an_exception_that_is_kept_holds_of_a_maps_results_those_of_the_failing_call(
    apply: Any, kind: type[Watched]
) -> None:
    refs: list[weakref.ref[Tensor]] = []
    calls = [kind(refs, fails_in=int(i == NUM_CALLS - 1)) for i in range(NUM_CALLS)]
    with pytest.raises(Faulty) as kept:
        apply(calls)
    del calls
    assert kept.tb
    assert num_alive(refs) <= 1


@pytest.mark.parametrize("max_concurrency", [None, 1])
@pytest.mark.parametrize("func", [FailsInForward, FailsInBackward])
def test_an_exception_that_is_kept_holds_nothing_of_a_functions_other_calls(
    func: Any, max_concurrency: int | None
) -> None:
    refs: list[weakref.ref[Tensor]] = []
    x = torch.randn(2, 4, requires_grad=True)

    def run() -> None:
        args = [(x * 1, refs, i == 0) for i in range(NUM_CALLS)]
        torch.stack(map_with_parallel_backward(func, *args, max_concurrency=max_concurrency)).sum().backward()

    with pytest.raises(Faulty) as kept:
        run()
    assert kept.tb
    assert len(refs) >= NUM_CALLS
    assert num_alive(refs) == 1
