"""A call that changes its input in place and returns views of it: they are views of the input that is tied."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function

from moe_autograd import parallel_apply
from tests.support.comparing_modules import assert_same_modules_program
from tests.support.comparison import MapFunction, Raised, assert_same, attempt, loss_of, one_after_another
from tests.support.module_programs import leaves

CHANGES: dict[str, Callable[[Tensor], Tensor]] = {
    "mul": lambda t: t.mul_(0.5),
    "tanh": lambda t: t.tanh_(),
    "part": lambda t: t[0].mul_(3),
}
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "part": lambda t: t[1:],
    "transposed": lambda t: t.t()[:, :2],
    "flat": lambda t: t.view(-1),
    "wide": lambda t: t.unsqueeze(0).expand(2, 3, 4),
    "one": lambda t: t.select(0, 1)[2],
}
LATER: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "nothing": lambda x, view: None,
    "changes the input": lambda x, view: x.mul_(2),
    "changes the view": lambda x, view: view.mul_(3),
}


@pytest.mark.parametrize("twice", ["", "here", "on another thread"])
@pytest.mark.parametrize("later", LATER)
@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("change", CHANGES)
def test_a_view_of_a_changed_input_follows_it(change: str, view: str, later: str, twice: str) -> None:
    """Another thread numbers its nodes from one, and the engine goes by their numbers; so does a GPU's."""

    def call(x: Tensor) -> Any:
        CHANGES[change](x)
        result = VIEWS[view](x)
        return x * 1.5, {"view": result, "again": result}

    def run(apply: MapFunction) -> Any:
        leaf, other = leaves(2)
        x = leaf * 2
        (product, views), _ = apply([call, torch.sin], [(x,), (other,)])
        assert views["view"] is views["again"]
        LATER[later](x, views["view"])
        loss = loss_of([product, views["view"], x])
        if twice:
            differentiate = functools.partial(torch.autograd.grad, loss, [leaf], create_graph=True)
            with ThreadPoolExecutor(1) as pool:
                found = differentiate() if twice == "here" else pool.submit(differentiate).result()
            (grad,) = found
            loss = loss + grad.pow(2).sum()
        loss.backward()
        values = [t.detach().clone() for t in (x, product, views["view"])]
        return values, leaf.grad, [views["view"]._is_view(), views["view"]._base is x]

    native, mapped = attempt(run, one_after_another), attempt(run, parallel_apply)
    if isinstance(native, Raised):  # what was saved has been changed
        assert isinstance(mapped, Raised)
        assert mapped.type is native.type
    else:
        assert_same(native, mapped, tolerance=1e-12)


class TurnsBack(Function):
    """Returns its input, with another gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return -grad


@pytest.mark.parametrize("show", [TurnsBack.apply, lambda t: TurnsBack.apply(t)[1:], torch.view_as_real])
def test_what_shows_the_memory_otherwise_is_refused(show: Callable[[Tensor], Tensor]) -> None:
    dtype = torch.complex128 if show is torch.view_as_real else torch.float64
    x = torch.ones(3, 4, dtype=dtype, requires_grad=True) * 2
    with pytest.raises(RuntimeError, match=r"expected results with memory of their own .* Return a clone\."):
        parallel_apply([lambda t: show(t.mul_(2)), torch.sin], [(x,), (x.detach(),)])


def test_second_order_through_a_view_that_a_call_takes_and_holds() -> None:
    """Nobody has changed it; in the second order it was taken for changed, and cut twice."""

    def program(apply: MapFunction) -> Any:
        weight, x = leaves(1, 4, 4)[0], leaves(1, 3, 4)[0]
        view = x.sin().view(3, 4)
        (y,) = apply([lambda given: torch.tanh(given @ weight) * view * given], [(view,)])
        loss = y.square().sum()
        (grad,) = torch.autograd.grad(loss, x, create_graph=True)
        (grad.square().sum() + loss).backward()
        return x.grad, weight.grad

    assert_same_modules_program(program)


@pytest.mark.parametrize("kind", ["view of a leaf", "result of another map"])
def test_views_that_may_not_be_changed_are_refused_in_the_words_of_pytorch(kind: str) -> None:
    if kind == "view of a leaf":
        view = torch.ones(2, 3, dtype=torch.float64)[0].requires_grad_()
        words = "a view of a leaf Variable that requires grad is being used in an in-place operation"
    else:
        (x,) = leaves(1)
        view = parallel_apply([lambda t: (y := t * 2, y.flatten())], [(x,)])[0][1]
        words = "view.* modified inplace.*cloning the output of the custom Function"
    with pytest.raises(RuntimeError, match=words):
        parallel_apply([lambda t: t.mul_(2) * 1], [(view,)])[0].sum().backward()


def test_who_takes_what_another_call_changes_is_named_also_if_he_returns_a_view_of_it() -> None:
    """Of what a function returns as a view PyTorch refuses even the history, once its memory has changed."""
    (x,) = leaves(1)
    y = x * 2
    with pytest.raises(RuntimeError, match=r"expected nobody to take what a call changes .* by call 1"):
        parallel_apply([TurnsBack.apply, lambda t: t.mul_(2)], [(y,), (y,)], max_concurrency=1)


@pytest.mark.parametrize("is_known", [True, False])
def test_a_hook_on_a_view_that_its_call_changes(is_known: bool) -> None:
    """PyTorch crashes when a first hook is put on a changed view before anybody has looked at its history."""

    def call(t: Tensor) -> Tensor:
        t.register_hook(torch.Tensor.clone)
        (t if is_known else t.detach()).mul_(3)
        return t.sin()

    def run(apply: MapFunction) -> Any:
        leaf, other = leaves(2)
        x = (leaf * 2)[0]
        loss = loss_of([*apply([call, torch.cos], [(x,), (other,)]), x])
        return torch.autograd.grad(loss, leaf)

    assert_same(run(one_after_another), run(parallel_apply))


@pytest.mark.parametrize("apply", [parallel_apply, functools.partial(parallel_apply, recompute=True)])
def test_an_input_that_a_call_detaches_in_place_is_refused(apply: MapFunction) -> None:
    """The caller's tensor would keep its history, without an error."""
    (x,) = leaves(1)
    y = x * 2
    with pytest.raises(
        RuntimeError, match=r"expected calls to leave the history of their inputs .* of shape \(3, 4\)"
    ):
        apply([lambda t: t.detach_() * 2, torch.sin], [(y,), (x * 1,)])
    (result, _) = apply([lambda t: t.detach() * 2, torch.sin], [(y,), (x * 1,)])
    assert y.requires_grad
    assert not result.requires_grad
