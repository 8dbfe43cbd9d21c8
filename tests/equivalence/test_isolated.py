"""An isolated forward and backward give the numbers of `func.apply`, without a graph, on any thread."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import FunctionCtx
from torch.autograd.graph import get_gradient_edge

from moe_autograd import EmulatedAutogradContext, run_isolated_backward, run_isolated_forward
from tests.support.comparison import Raised, attempt, tensors_in
from tests.support.functions import CATALOGUE, Case, Leaves
from tests.support.functions_context import LeavesGradsUnmaterialized, SavesInput, SavesOutput
from tests.support.functions_faulty import BREAKS_BACKWARD, GivesAWrongShape

# `apply` takes one result returned twice for one; and it sends a changed view's gradient to the view's base.
APPLY_DIFFERS = ("ReturnsOneTensorTwice", "ChangesInPlace-of_a_view")

every_case = pytest.mark.parametrize("case", CATALOGUE, ids=str)


def plain(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach()
    return type(value)(map(plain, value)) if type(value) in (tuple, list) else value


@every_case
def test_the_outputs_are_those_of_apply_and_carry_no_graph(case: Case) -> None:
    expected = case.func.apply(*case.args(Leaves()))
    leaves = Leaves()
    ctx, outputs = run_isolated_forward(case.func, *case.args(leaves))
    assert isinstance(ctx, EmulatedAutogradContext)
    assert isinstance(ctx, FunctionCtx)
    assert type(outputs) is type(expected)
    for native, isolated in zip(tensors_in(expected), tensors_in(outputs), strict=True):
        assert not isolated.requires_grad
        assert isolated.grad_fn is None
        torch.testing.assert_close(isolated, native.detach(), rtol=0, atol=0)
    assert all(leaf.grad is None for leaf in leaves.made)


@every_case
@pytest.mark.parametrize("elsewhere", [False, True])
def test_the_gradients_are_those_of_apply_on_whatever_thread(case: Case, elsewhere: bool) -> None:
    leaves = Leaves()
    args = case.args(leaves)
    inputs = [get_gradient_edge(arg) for arg in args if isinstance(arg, Tensor) and arg.requires_grad]
    result = case.func.apply(*args)
    results = result if isinstance(result, tuple) else (result,)
    differentiable = [r for r in results if isinstance(r, Tensor) and r.requires_grad]
    if not differentiable or str(case) in APPLY_DIFFERS:
        pytest.skip("nothing to differentiate, or no fair comparison")
    grads_of = {id(r): torch.full_like(r, 0.5 + i) for i, r in enumerate(differentiable)}
    expected = torch.autograd.grad(differentiable, inputs, list(grads_of.values()), allow_unused=True)

    ctx, _ = run_isolated_forward(case.func, *case.args(Leaves()))
    grad_outputs = [grads_of.get(id(r)) if isinstance(r, Tensor) else None for r in results]

    def backward() -> tuple[Tensor | None, ...]:
        return run_isolated_backward(case.func, ctx, *grad_outputs)

    with ThreadPoolExecutor(1) as threads:
        grads = threads.submit(backward).result() if elsewhere else backward()
    assert len(grads) >= len(args)
    got = [
        grad for arg, grad in zip(args, grads, strict=False) if isinstance(arg, Tensor) and arg.requires_grad
    ]
    for native, isolated in zip(expected, got, strict=True):
        if native is None or isolated is None:
            assert native is None or not native.any()
            assert isolated is None or not isolated.to_dense().any()
            continue
        assert not isolated.requires_grad
        torch.testing.assert_close(isolated.to_dense().to(native.dtype), native.to_dense(), rtol=0, atol=0)


@pytest.mark.parametrize("func", BREAKS_BACKWARD, ids=lambda func: func.__name__)
def test_a_broken_backward_raises_as_pytorch(func: type[Function]) -> None:
    def native() -> None:
        x = torch.ones(3, dtype=torch.float64, requires_grad=True)
        func.apply(x, True).sum().backward()

    def isolated() -> None:
        x = torch.ones(3, dtype=torch.float64, requires_grad=True)
        ctx, output = run_isolated_forward(func, x, True)
        run_isolated_backward(func, ctx, torch.ones_like(output))

    said, expected = attempt(isolated), attempt(native)
    assert isinstance(said, Raised)
    assert (said.type, said.text) == (expected.type, expected.text)


@pytest.mark.parametrize("func", [SavesInput, SavesOutput])
def test_a_saved_tensor_changed_in_place_raises_as_pytorch(func: type[Function]) -> None:
    x = torch.ones(3, requires_grad=True) * 1
    ctx, output = run_isolated_forward(func, x)
    (x if func is SavesInput else output).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        run_isolated_backward(func, ctx, torch.ones(3))


def test_the_callers_tensors_are_untouched() -> None:
    x = torch.ones(3, requires_grad=True)
    ctx, _ = run_isolated_forward(SavesInput, x)
    run_isolated_backward(SavesInput, ctx, torch.ones(3))
    assert x.grad is None
    assert x.requires_grad
    assert x.is_leaf


def test_a_missing_gradient_is_filled_in_unless_the_function_wants_none() -> None:
    ctx, _ = run_isolated_forward(LeavesGradsUnmaterialized, torch.zeros(3, requires_grad=True))
    assert run_isolated_backward(LeavesGradsUnmaterialized, ctx, None, None) == (None,)
    ctx, _ = run_isolated_forward(SavesInput, torch.ones(3, requires_grad=True))
    (grad,) = run_isolated_backward(SavesInput, ctx, None)
    assert grad is not None
    assert grad.tolist() == [0.0] * 3


def test_a_backward_may_run_twice_and_gives_the_same() -> None:
    ctx, _ = run_isolated_forward(SavesInput, torch.ones(3, requires_grad=True))
    first, second = (run_isolated_backward(SavesInput, ctx, torch.ones(3)) for _ in range(2))
    assert torch.equal(first[0], second[0])  # type: ignore[arg-type]  # neither is None here


class GivesWhatItIsTold(Function):
    """Its gradients are what was put into `gradients`."""

    gradients: tuple[Tensor, ...] = ()

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        return GivesWhatItIsTold.gradients


@pytest.mark.parametrize("given", [torch.float64, torch.bfloat16, torch.int64], ids=str)
@pytest.mark.parametrize("own", [torch.float32, torch.complex64], ids=str)
@pytest.mark.parametrize("asked", ["its own", torch.float64, None], ids=str)
def test_a_gradient_has_the_dtype_that_apply_gives_it(given: Any, own: Any, asked: Any) -> None:
    x, y = torch.ones(3, dtype=own, requires_grad=True), torch.ones(3)
    if asked != "its own":
        x.grad_dtype = asked
    GivesWhatItIsTold.gradients = (torch.full((2, 3), 2, dtype=given), torch.ones(3))

    def native() -> Any:
        output = GivesWhatItIsTold.apply(x, y)
        return torch.autograd.grad(output, x, torch.ones_like(output))[0]

    def isolated() -> Any:
        ctx, output = run_isolated_forward(GivesWhatItIsTold, x, y)
        return run_isolated_backward(GivesWhatItIsTold, ctx, torch.ones_like(output))[0]

    said, expected = attempt(isolated), attempt(native)
    if isinstance(expected, Raised):
        assert "INTERNAL ASSERT" in expected.text or said == expected
        return
    assert said.dtype is expected.dtype
    assert torch.equal(said, expected)


LAYOUTS = (torch.strided, torch.sparse_coo, torch.sparse_csr)


def laid_out(layout: torch.layout) -> Tensor:
    return torch.eye(3) if layout is torch.strided else torch.eye(3).to_sparse(layout=layout)


GRADIENTS: dict[str, Callable[[], Tensor]] = {
    **{str(layout): functools.partial(laid_out, layout) for layout in LAYOUTS},
    "complex": lambda: torch.eye(3, dtype=torch.complex64),
    "on meta": lambda: torch.eye(3, device="meta"),
    "of another shape": lambda: torch.ones(3, 4),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("own", LAYOUTS, ids=str)
@pytest.mark.parametrize("given", GRADIENTS)
def test_a_gradient_is_refused_where_apply_refuses_it_and_in_its_words(given: str, own: torch.layout) -> None:
    x, y = laid_out(own).requires_grad_(), torch.ones(3)
    GivesWhatItIsTold.gradients = (GRADIENTS[given](), torch.ones(3))
    grad_output = laid_out(own)

    def native() -> Any:
        GivesWhatItIsTold.apply(x, y).backward(grad_output)
        assert x.grad is not None
        return x.grad.layout

    def isolated() -> Any:
        ctx, _ = run_isolated_forward(GivesWhatItIsTold, x, y)
        (grad, _) = run_isolated_backward(GivesWhatItIsTold, ctx, grad_output)
        assert grad is not None
        return grad.layout

    assert attempt(isolated) == attempt(native)


class Scales(Function):
    @staticmethod
    def forward(ctx: Any, factor: float, x: Tensor) -> Tensor:
        return x * factor

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        return None, grad.to("meta")


def test_what_is_no_tensor_is_not_counted_where_a_gradient_is_refused() -> None:
    x = torch.ones(3, requires_grad=True)

    def native() -> Any:
        return torch.autograd.grad(Scales.apply(2.0, x), x, torch.ones(3))

    def isolated() -> Any:
        ctx, _ = run_isolated_forward(Scales, 2.0, x)
        return run_isolated_backward(Scales, ctx, torch.ones(3))

    said = attempt(isolated)
    assert isinstance(said, Raised)
    assert said == attempt(native)


def test_a_gradient_that_is_a_number_goes_to_the_device_of_its_argument() -> None:
    x, y = torch.ones((), device="meta", requires_grad=True), torch.ones(3)
    GivesWhatItIsTold.gradients = (torch.ones(()), torch.ones(3))
    natively = torch.autograd.grad(GivesWhatItIsTold.apply(x, y), x)[0]
    ctx, output = run_isolated_forward(GivesWhatItIsTold, x, y)
    grad, _ = run_isolated_backward(GivesWhatItIsTold, ctx, torch.ones_like(output))
    assert grad is not None
    assert grad.device == natively.device == x.device


@pytest.mark.parametrize("given", [torch.ones(7, 7), torch.ones(3, device="meta")], ids=["shape", "device"])
def test_a_gradient_that_nobody_asks_for_may_have_any_shape_and_device(given: Tensor) -> None:
    GivesWhatItIsTold.gradients = (torch.ones(3), given)
    ctx, _ = run_isolated_forward(GivesWhatItIsTold, torch.ones(3, requires_grad=True), torch.ones(3))
    grads = run_isolated_backward(GivesWhatItIsTold, ctx, torch.ones(3))
    assert torch.equal(grads[0], torch.ones(3))  # type: ignore[arg-type]  # it is there
    assert grads[1] is (given if given.shape == (3,) else None)


def test_the_gradients_of_a_backward_that_records_carry_no_graph() -> None:
    class Records(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        @torch.enable_grad()
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            (x,) = ctx.saved_tensors
            return 2 * x.detach().requires_grad_() * grad

    ctx, _ = run_isolated_forward(Records, torch.ones(3, requires_grad=True))
    (grad,) = run_isolated_backward(Records, ctx, torch.ones(3))
    assert grad is not None
    assert (grad.tolist(), grad.requires_grad) == ([2.0] * 3, False)


def test_a_missing_gradient_of_a_jagged_result_is_filled_in() -> None:
    class Scales(Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
            return x * 2, x * 3

        @staticmethod
        def backward(ctx: Any, one: Tensor, other: Tensor) -> Tensor:
            return one * 2 + other * 3

    x = torch.nested.nested_tensor([torch.ones(2, 3), torch.ones(4, 3)], layout=torch.jagged)
    ctx, (one, _) = run_isolated_forward(Scales, x)
    (grad,) = run_isolated_backward(Scales, ctx, torch.ones_like(one), None)
    assert grad is not None
    assert torch.equal(grad.values(), torch.full((6, 3), 2.0))


@pytest.mark.parametrize("count", [0, 2])
def test_a_wrong_number_of_output_gradients_is_refused(count: int) -> None:
    ctx, _ = run_isolated_forward(GivesAWrongShape, torch.ones(3), False)
    with pytest.raises((ValueError, TypeError), match=f"expected 1 .*got {count}"):
        run_isolated_backward(GivesAWrongShape, ctx, *[torch.ones(3)] * count)


@pytest.mark.parametrize(
    ("grad", "error", "text"),
    [
        (torch.ones(5), ValueError, r"shape \(1,\) for output 0 of SavesInput, got one of shape \(5,\)"),
        (torch.ones(()), ValueError, r"shape \(1,\) for output 0 of SavesInput, got one of shape \(\)"),
        ([1.0], TypeError, "a tensor or None for output 0 of SavesInput, got list"),
    ],
)
def test_what_is_no_gradient_of_an_output_is_refused(grad: Any, error: type[Exception], text: str) -> None:
    """PyTorch refuses it; with it the function would compute a gradient that is summed to the argument's shape."""
    ctx, _ = run_isolated_forward(SavesInput, torch.ones(1))
    with pytest.raises(error, match=text):
        run_isolated_backward(SavesInput, ctx, grad)


@pytest.mark.parametrize("grads", [(), (torch.ones(1),)], ids=["no gradient", "a gradient"])
def test_a_context_that_was_made_elsewhere_is_refused(grads: tuple[Tensor, ...]) -> None:
    made_by_hand = EmulatedAutogradContext((True,))
    with pytest.raises(TypeError, match="returned, got EmulatedAutogradContext made elsewhere"):
        run_isolated_backward(SavesInput, made_by_hand, *grads)


def test_a_context_of_another_kind_is_refused() -> None:
    with pytest.raises(
        TypeError, match="expected the context that run_isolated_forward returned, got Tensor"
    ):
        run_isolated_backward(SavesInput, torch.ones(1), torch.ones(1))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "func", [SavesInput.apply, SavesInput.backward, torch.sin], ids=["apply", "backward", "sin"]
)
def test_what_is_no_autograd_function_is_refused(func: Any) -> None:
    _, ctx = run_isolated_forward(SavesInput, torch.ones(1, requires_grad=True))
    for caller, call in (
        ("run_isolated_forward", lambda: run_isolated_forward(func, torch.ones(1))),
        ("run_isolated_backward", lambda: run_isolated_backward(func, ctx, torch.ones(1))),
    ):
        with pytest.raises(
            TypeError, match=rf"^{caller}: expected a subclass of torch\.autograd\.Function, got"
        ):
            call()
