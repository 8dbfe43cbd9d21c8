"""What PyTorch refuses, the map refuses: the same type, PyTorch's own words, and a note that names the call.

The note is on the error (`__notes__`), so it reads under the traceback; the text stays PyTorch's.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function

from moe_autograd import MixtureOfExperts, TopKRouter, map_with_parallel_backward
from tests.support.comparison import MapFunction, Raised, assert_same_program, loss_of
from tests.support.functions_context import IsOnceDifferentiable, SavesInput, SavesOutput
from tests.support.functions_faulty import BREAKS_BACKWARD, BREAKS_FORWARD
from tests.support.functions_results import ReturnsAView, ReturnsItsInput, ReturnsViewsOfOneResult

NUM_CALLS = 4
BROKEN = 2


def make_calls(func: type[Function], broken: set[int]) -> tuple[list[Tensor], list[tuple[Any, ...]]]:
    leaves = [torch.linspace(1, 2 + i, 3, dtype=torch.float64, requires_grad=True) for i in range(NUM_CALLS)]
    takes_a_view = func.__name__ == "ChangesAViewAmongSeveralResults"
    args = [(leaf * 1)[1:] if takes_a_view else leaf for leaf in leaves]
    return leaves, [(arg, i in broken) for i, arg in enumerate(args)]


def title_of(func: type[Function]) -> str:
    return f"map_with_parallel_backward({func.__name__})"


def names_call(notes: tuple[str, ...], index: int) -> bool:
    return any(f"call {index}" in note for note in notes)


@pytest.mark.parametrize("func", BREAKS_FORWARD, ids=lambda func: func.__name__)
def test_a_broken_forward_raises_as_pytorch_and_names_its_call(func: type[Function]) -> None:
    is_always_broken = func.__name__ == "LacksForward"

    def program(apply: MapFunction) -> Any:
        _, calls = make_calls(func, {BROKEN})
        return apply(func, *calls)

    said = assert_same_program(program)
    assert isinstance(said, Raised)
    assert names_call(said.notes, 0 if is_always_broken else BROKEN), said.notes


@pytest.mark.parametrize("func", BREAKS_BACKWARD, ids=lambda func: func.__name__)
def test_a_broken_backward_raises_as_pytorch_and_names_its_call(func: type[Function]) -> None:
    def program(apply: MapFunction) -> Any:
        _, calls = make_calls(func, {BROKEN})
        loss_of(apply(func, *calls)[BROKEN]).backward()

    said = assert_same_program(program)
    assert isinstance(said, Raised)
    assert names_call(said.notes, BROKEN), said.notes


@pytest.mark.parametrize("func", BREAKS_BACKWARD, ids=lambda func: func.__name__)
def test_a_broken_backward_among_sound_ones_raises_as_pytorch(func: type[Function]) -> None:
    def program(apply: MapFunction) -> Any:
        _, calls = make_calls(func, {BROKEN})
        loss_of(apply(func, *calls)).backward()

    assert isinstance(assert_same_program(program), Raised)


@pytest.mark.parametrize("func", BREAKS_BACKWARD, ids=lambda func: func.__name__)
def test_the_broken_backward_of_the_only_call_raises_as_pytorch_and_names_it(func: type[Function]) -> None:
    def program(apply: MapFunction) -> Any:
        _, calls = make_calls(func, {0})
        loss_of(apply(func, calls[0])).backward()

    said = assert_same_program(program)
    assert isinstance(said, Raised)
    if func.__name__.startswith("Gives"):  # a complaint about what it returned names the function
        assert not said.notes
    else:
        assert said.notes == (f"{title_of(func)}, backward: raised by call 0 ({func.__name__}) of 1.",)


def test_the_only_call_that_returns_an_earlier_result_leaves_that_ones_node_alone() -> None:
    class Passes(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, *more: Any) -> Tensor:
            return x

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Any:
            return (grad, *[None] * (len(ctx.needs_input_grad) - 1))

    def program(apply: MapFunction) -> Any:
        x = torch.ones(3, requires_grad=True)
        y = Passes.apply(x, 1, 2)
        with torch.no_grad():
            (z,) = apply(Passes, (y,))
        (z * y).sum().backward()
        return x.grad

    assert not isinstance(assert_same_program(program), Raised)


def test_an_invalid_gradient_is_reported_with_its_argument_and_both_shapes() -> None:
    class WrongSecond(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, scale: float, y: Tensor) -> Tensor:
            return x * scale * y

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, Tensor]:
            return grad, None, grad[:2]

    calls = [(torch.ones(3), 2.0, torch.ones(3, requires_grad=True)) for _ in range(3)]
    results = map_with_parallel_backward(WrongSecond, *calls)
    with pytest.raises(RuntimeError, match=r"at index 1 - got \[2\] but expected .* \[3\]") as caught:
        results[1].sum().backward()
    assert names_call(tuple(caught.value.__notes__), 1)


def test_a_second_backward_without_retain_graph_raises_as_pytorch() -> None:
    def program(apply: MapFunction) -> Any:
        x = torch.ones(3, requires_grad=True)
        loss = loss_of(apply(SavesInput, (x,), (x,)))
        loss.backward()
        loss.backward()

    assert isinstance(assert_same_program(program), Raised)


def test_a_second_backward_through_one_result_only_raises_as_pytorch() -> None:
    def program(apply: MapFunction) -> Any:
        x = torch.ones(3, requires_grad=True)
        first, _ = apply(SavesInput, (x,), (x,))
        loss = loss_of(first)
        loss.backward()
        loss.backward()

    assert isinstance(assert_same_program(program), Raised)


def test_a_later_backward_through_another_result_takes_retain_graph() -> None:
    """Said in the docstring of the map: natively the results have graphs of their own."""

    def program(apply: MapFunction) -> Any:
        x = torch.ones(3, requires_grad=True)
        first, second = apply(SavesInput, (x,), (x * 2,))
        return torch.autograd.grad(loss_of(first), x, retain_graph=True), torch.autograd.grad(
            loss_of(second), x
        )

    assert not isinstance(assert_same_program(program), Raised)
    x = torch.ones(3, requires_grad=True)
    first, second = map_with_parallel_backward(SavesInput, (x,), (x * 2,))
    first.sum().backward()
    with pytest.raises(RuntimeError, match="a second time"):
        second.sum().backward()


@pytest.mark.parametrize("changed", [0, 2])
def test_changing_a_saved_input_before_the_backward_raises_as_pytorch(changed: int) -> None:
    def program(apply: MapFunction) -> Any:
        inputs = [torch.ones(3, requires_grad=True).clone() for _ in range(3)]
        loss = loss_of(apply(SavesInput, *[(x,) for x in inputs]))
        inputs[changed].add_(1)
        loss.backward()

    assert isinstance(assert_same_program(program), Raised)


def test_changing_a_saved_result_before_the_backward_raises_as_pytorch() -> None:
    def program(apply: MapFunction) -> Any:
        inputs = [torch.ones(3, requires_grad=True) for _ in range(3)]
        results = apply(SavesOutput, *[(x,) for x in inputs])
        results[1].mul_(2)
        loss_of(results).backward()

    assert isinstance(assert_same_program(program), Raised)


def test_changing_a_result_that_nobody_saved_gives_the_same_gradients() -> None:
    def program(apply: MapFunction) -> Any:
        inputs = [torch.ones(3, requires_grad=True) for _ in range(3)]
        results = apply(SavesInput, *[(x,) for x in inputs])
        results[1].mul_(results[0].detach() + 1)
        results[2].add_(results[1])
        loss_of(results).backward()
        return results, [x.grad for x in inputs]

    assert not isinstance(assert_same_program(program), Raised)


@pytest.mark.parametrize("func", [ReturnsItsInput, ReturnsAView, ReturnsViewsOfOneResult])
def test_changing_a_returned_view_is_refused_as_in_pytorch(func: type[Function]) -> None:
    def program(apply: MapFunction) -> Any:
        inputs = [torch.ones(3, requires_grad=True) * 1 for _ in range(3)]
        calls = [(x, "rest") if func is ReturnsAView else (x,) for x in inputs]
        results = apply(func, *calls)
        view = results[1][1] if isinstance(results[1], tuple) else results[1]
        with pytest.raises(RuntimeError, match="is a view and is being modified inplace"):
            view.mul_(2)
        loss_of(results).backward()
        return results

    assert not isinstance(assert_same_program(program), Raised)


def test_a_once_differentiable_function_refuses_the_second_order() -> None:
    def program(apply: MapFunction) -> Any:
        x = torch.ones(3, requires_grad=True)
        first, second = apply(IsOnceDifferentiable, (x,), (x,))
        (grad,) = torch.autograd.grad(loss_of(first * second), x, create_graph=True)
        grad.sum().backward()

    said = assert_same_program(program)
    assert isinstance(said, Raised)
    assert "once_differentiable" in said.text


@pytest.mark.parametrize("args", [(), (1, 2, 3)])
def test_a_wrong_number_of_arguments_raises_as_pytorch(args: tuple[Any, ...]) -> None:
    said = assert_same_program(lambda apply: apply(SavesInput, args))
    assert isinstance(said, Raised)


def test_the_arguments_of_a_call_may_be_a_list() -> None:
    (result,) = map_with_parallel_backward(SavesInput, [torch.ones(3)])
    assert torch.equal(result, torch.ones(3))


def test_a_call_without_its_tuple_is_refused_and_named() -> None:
    """`*tensor` would silently give the forward its rows."""
    with pytest.raises(TypeError, match="call 1"):
        map_with_parallel_backward(SavesInput, (torch.ones(1, 3),), torch.ones(1, 3))


@pytest.mark.parametrize("bound", [0, -1, 2.5, "2"])
def test_a_bound_that_is_no_positive_whole_number_is_refused(bound: Any) -> None:
    expected = f"expected max_concurrency to be None or a whole number of at least 1, got {bound!r}"
    with pytest.raises(ValueError, match=expected):
        map_with_parallel_backward(SavesInput, (torch.ones(3),), max_concurrency=bound)
    with pytest.raises(ValueError, match=expected):
        MixtureOfExperts(TopKRouter(4, 1, top_k=1), [torch.nn.Identity()], max_concurrency=bound)


@pytest.mark.parametrize("func", [torch.sin, object(), SavesInput.forward])
def test_what_is_no_autograd_function_is_refused(func: Any) -> None:
    with pytest.raises(TypeError):
        map_with_parallel_backward(func, (torch.ones(3),))


def test_who_passes_apply_is_told_to_pass_the_class() -> None:
    with pytest.raises(TypeError, match=r"Pass the class: SavesInput\."):
        map_with_parallel_backward(SavesInput.apply, (torch.ones(3),))  # type: ignore[arg-type]


def test_who_forgets_the_star_before_a_list_of_calls_is_told_so() -> None:
    calls = [(torch.ones(3),), (torch.ones(3),)]
    with pytest.raises(TypeError) as refused:
        map_with_parallel_backward(SavesInput, calls)
    assert (
        refused.value.__notes__[-1] == "If these are several calls: map_with_parallel_backward(func, *calls)."
    )


def test_no_calls_give_an_empty_tuple() -> None:
    assert map_with_parallel_backward(SavesInput) == ()
