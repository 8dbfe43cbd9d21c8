"""Derivatives of gradients with respect to what calls have returned, and have used for these gradients themselves."""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo import compiled_autograd

from moe_autograd import parallel_apply
from tests.support.comparison import MapFunction, Raised, assert_same_program, one_after_another
from tests.support.functions_context import SavesOutput
from tests.support.readable import wait

PARTS = 1e-10  # sums of parts in another order
WAYS = [{}, {"max_concurrency": 1}, {"defer_weight_grads": True}]


def saved_by_its_own(apply: MapFunction, x: Tensor, weight: Tensor) -> list[Tensor]:
    return [wait(x).mul(weight).tanh()]


def saved_by_others(apply: MapFunction, x: Tensor, weight: Tensor) -> list[Tensor]:
    hidden = wait(x) * weight
    return [hidden, hidden * weight * hidden]


def three_from_each_other(apply: MapFunction, x: Tensor, weight: Tensor) -> list[Tensor]:
    first = wait(x).mul(weight).tanh()
    second = (first * first).sigmoid()
    return [first, second, (first * second).exp()]


def of_a_map_within(apply: MapFunction, x: Tensor, weight: Tensor) -> list[Tensor]:
    call = functools.partial(three_from_each_other, apply)
    return apply([call], [(wait(x), weight)])[0]  # type: ignore[no-any-return]


KINDS = [saved_by_its_own, saved_by_others, three_from_each_other, of_a_map_within]


def called(apply: MapFunction, kind: Callable[..., Any]) -> tuple[list[Tensor], list[Tensor]]:
    """Return what two calls have returned, all in one list, and their leaves."""
    generator = torch.Generator().manual_seed(0)
    leaves = [torch.randn(3, dtype=torch.float64, generator=generator).requires_grad_() for _ in range(3)]
    *xs, weight = leaves
    returned = apply([functools.partial(kind, apply)] * 2, [(x, weight) for x in xs])
    return [result for own in returned for result in own], leaves


def loss_of(tensors: Sequence[Tensor | None]) -> Tensor:
    return torch.stack([t.sin().sum() for t in tensors if t is not None and t.requires_grad]).sum()


def detached(grads: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [None if grad is None else grad.detach() for grad in grads]


def asked_for(apply: MapFunction, kind: Callable[..., Any]) -> Any:
    """Every pair of what there is, and each by itself."""
    results, leaves = called(apply, kind)
    grads = torch.autograd.grad(loss_of(results), leaves, create_graph=True)
    loss = loss_of(grads) + loss_of(results)
    every = [*results, *leaves]
    by_name = [*itertools.combinations(every, 1), *itertools.combinations(every, 2)]
    return [torch.autograd.grad(loss, some, retain_graph=True, allow_unused=True) for some in by_name]


def asked_for_without_inputs(apply: MapFunction, kind: Callable[..., Any]) -> Any:
    results, leaves = called(apply, kind)
    grads = torch.autograd.grad(loss_of(results), leaves, create_graph=True)
    loss_of(grads).backward(inputs=results)
    return [result.grad for result in results]


def asked_for_by_edge(apply: MapFunction, kind: Callable[..., Any]) -> Any:
    results, leaves = called(apply, kind)
    grads = torch.autograd.grad(loss_of(results), leaves, create_graph=True)
    edges = [torch.autograd.graph.get_gradient_edge(result) for result in results]
    return torch.autograd.grad(loss_of(grads), edges, allow_unused=True)


def three_orders(apply: MapFunction, kind: Callable[..., Any]) -> Any:
    results, leaves = called(apply, kind)
    first = torch.autograd.grad(loss_of(results), leaves, create_graph=True)
    second = torch.autograd.grad(loss_of(first), [*results, *leaves], create_graph=True, allow_unused=True)
    wanted = [*results, *leaves, *first]
    third = torch.autograd.grad(loss_of(second), wanted, allow_unused=True)
    return [detached(grads) for grads in (first, second, third)]


def retained_after_the_first(apply: MapFunction, kind: Callable[..., Any]) -> Any:
    results, leaves = called(apply, kind)
    grads = torch.autograd.grad(loss_of(results), leaves, create_graph=True)
    for result in results:
        result.retain_grad()
    (loss_of(grads) + loss_of(results)).backward()
    return [one.grad for one in (*results, *leaves)]


def gone_before_the_second(apply: MapFunction, kind: Callable[..., Any]) -> Any:
    results, leaves = called(apply, kind)
    grads = torch.autograd.grad(loss_of(results), leaves, create_graph=True)
    del results[::2]
    found = torch.autograd.grad(loss_of(grads), [*results, *leaves], allow_unused=True)
    return detached(found)


def graph_gone_before_the_second(apply: MapFunction, kind: Callable[..., Any]) -> Any:
    """Behind `hidden + hidden` nothing is saved, so torch goes backward through it twice."""
    results, leaves = called(apply, lambda _, x, w: [wait(hidden := x * w) + hidden])
    grads = torch.autograd.grad(loss_of(results), leaves, create_graph=True)
    loss_of(results).backward(inputs=results)
    second = torch.autograd.grad(loss_of(grads), leaves, create_graph=True)
    return detached([*grads, *second])


def compiled(apply: MapFunction, kind: Callable[..., Any]) -> Any:
    """The loop's own backward is not compiled."""
    torch._dynamo.reset()
    results, leaves = called(apply, kind)
    grads = torch.autograd.grad(loss_of(results), leaves, create_graph=True)
    with nullcontext() if apply is one_after_another else compiled_autograd._enable(lambda graph: graph):
        (loss_of(grads) + loss_of(results)).backward()
    return [leaf.grad for leaf in leaves]


PROGRAMS = [
    asked_for,
    asked_for_without_inputs,
    asked_for_by_edge,
    three_orders,
    retained_after_the_first,
    gone_before_the_second,
    graph_gone_before_the_second,
    pytest.param(compiled, marks=pytest.mark.filterwarnings("ignore")),  # torch's compiler warns of itself
]


@pytest.mark.parametrize("options", WAYS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_they_are_as_in_a_loop(
    program: Callable[..., Any], kind: Callable[..., Any], options: dict[str, Any]
) -> None:
    said = assert_same_program(
        functools.partial(program, kind=kind),
        native_apply=one_after_another,
        mapped_apply=functools.partial(parallel_apply, **options),
        tolerance=PARTS,
    )
    assert not isinstance(said, Raised), said


def a_function_between(x: Tensor) -> tuple[Tensor, Tensor]:
    hidden = wait(x) * 2
    return hidden, SavesOutput.apply(hidden)


def a_function_between_within(x: Tensor) -> Any:
    return parallel_apply([a_function_between], [(wait(x),)])[0]


@pytest.mark.parametrize("call", [a_function_between, a_function_between_within])
def test_one_that_leads_to_others_by_a_function_is_refused_by_name(call: Callable[[Tensor], Any]) -> None:
    x = torch.randn(3, dtype=torch.float64, requires_grad=True)
    ((hidden, result),) = parallel_apply([call], [(x,)])
    with pytest.raises(
        RuntimeError, match="got one from which the call computed others by an autograd function"
    ):
        torch.autograd.grad(result.sum(), hidden, retain_graph=True)
    (grad,) = torch.autograd.grad(hidden.sin().sum(), hidden, retain_graph=True)  # nothing comes from others
    assert torch.equal(grad, hidden.cos())
    hidden.retain_grad()
    result.sum().backward()
    assert hidden.grad is not None
    torch.testing.assert_close(hidden.grad, hidden.exp())


@pytest.mark.usefixtures("no_gc")
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_of_them_is_left(kind: Callable[..., Any]) -> None:
    results, leaves = called(parallel_apply, kind)
    grads = torch.autograd.grad(loss_of(results), leaves, create_graph=True)
    second = torch.autograd.grad(loss_of(grads), [*results, *leaves], create_graph=True, allow_unused=True)
    nodes = [weakref.ref(result.grad_fn) for result in results]
    del grads, second, results
    assert all(node() is None for node in nodes)


@pytest.mark.usefixtures("no_gc")
def test_a_graph_of_gradients_holds_no_result_that_its_call_has_not_saved() -> None:
    def call(x: Tensor, weight: Tensor) -> list[Tensor]:
        hidden = wait(x) * weight
        return [hidden, (hidden + hidden).tanh()]

    x, weight = [torch.randn(3, requires_grad=True) for _ in range(2)]
    ((hidden, result),) = parallel_apply([call], [(x, weight)])
    (grad,) = torch.autograd.grad(result.sum(), x, create_graph=True)
    gone = weakref.ref(hidden)
    del hidden
    assert gone() is None
    (second,) = torch.autograd.grad(grad.sum(), weight)
    assert second.shape == weight.shape


class Watched(torch.autograd.Function):
    """Saves a tensor that nobody else has."""

    saved: list[weakref.ref[Tensor]]

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x, own := x.cos())
        Watched.saved.append(weakref.ref(own))
        return x.sin()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.saved_tensors[0].cos()


def watched(x: Tensor, weight: Tensor) -> Tensor:
    return Watched.apply(wait(x) * weight).tanh()  # type: ignore[no-any-return]


def watched_within(x: Tensor, weight: Tensor) -> Tensor:
    return parallel_apply([watched], [(Watched.apply(wait(x)), weight)])[0]  # type: ignore[no-any-return]


@pytest.mark.usefixtures("no_gc")
@pytest.mark.parametrize("call", [watched, watched_within])
def test_what_users_keep_after_a_second_backward_keeps_nothing_that_calls_have_saved(call: Any) -> None:
    Watched.saved = []
    x, weight = [torch.randn(3, requires_grad=True) for _ in range(2)]
    (result,) = parallel_apply([call], [(x, weight)])
    (grad,) = torch.autograd.grad(result.sum(), x, create_graph=True)
    penalty = grad.square().sum()
    loss = result.sum() + penalty
    del grad
    loss.backward()
    assert Watched.saved
    assert [one() for one in Watched.saved] == [None] * len(Watched.saved)
    assert all(kept.grad_fn is not None for kept in (result, penalty, loss))
