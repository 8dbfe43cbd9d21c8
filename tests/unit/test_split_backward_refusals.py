"""What split_backward refuses, and how it says so."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moe_autograd.autograd.split_backward import split_backward
from tests.support.split import Recorded, an_input, mlp


def test_a_second_run_raises() -> None:
    w = an_input(3)
    _, pending = split_backward(w.sum(), None, [], w)
    assert repr(pending) == "PendingWeightGradients(pending)"
    pending.run()
    assert repr(pending) == "PendingWeightGradients(ran)"
    with pytest.raises(RuntimeError, match=r"expected one call, got a second"):
        pending.run()


@pytest.mark.parametrize("between", ["nothing", "first part", "both parts"])
def test_the_graph_cannot_be_used_a_second_time(between: str) -> None:
    net, x = mlp(), an_input(3, 4)
    y = net(x).sum()
    if between == "nothing":
        torch.autograd.grad(y, x)
    else:
        _, pending = split_backward(y, None, x, net.parameters())
        if between == "both parts":
            pending.run()
    with pytest.raises(
        RuntimeError, match=r"second backward through it|backward through the graph a second time"
    ):
        torch.autograd.grad(y, [x, *net.parameters()])


@pytest.mark.parametrize("changed", ["grad_output", "input gradient"])
def test_a_gradient_changed_between_the_parts_raises(changed: str) -> None:
    x, w = an_input(3), an_input(3)
    grad = torch.ones(3)
    (grad_x,), pending = split_backward(x + w, grad, x, w)
    (grad if changed == "grad_output" else grad_x).mul_(2)
    with pytest.raises(RuntimeError, match="changed in place"):
        pending.run()


def test_a_gradient_that_a_function_gives_to_input_and_weight_and_that_is_changed_raises() -> None:
    class Plus(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
            return x + w

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
            grad = 3 * grad
            return grad, grad

    x, w = an_input(3), an_input(3)
    (grad_x,), pending = split_backward(Plus.apply(x, w), torch.ones(3), x, w)  # type: ignore[no-untyped-call]
    grad_x.mul_(2)
    with pytest.raises(RuntimeError, match="changed in place"):
        pending.run()


def test_a_gradient_changed_where_all_happens_in_the_second_part_raises() -> None:
    w, grad = an_input(3), torch.ones(3)
    _, pending = split_backward(w * 2, grad, [], w)
    grad.zero_()
    with pytest.raises(RuntimeError, match="changed in place"):
        pending.run()


def test_second_order_raises_as_without_create_graph() -> None:
    x, w = an_input(3), an_input(3)
    (grad_x,), pending = split_backward((x * w).exp().sum(), None, x, w)
    (grad_w,) = pending.run()
    for grad in (grad_x, grad_w):
        with pytest.raises(RuntimeError, match="does not require grad"):
            torch.autograd.grad(grad.sum(), x)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_outputs_that_require_no_gradient(mode: Any) -> None:
    x, w = an_input(3), an_input(3)
    with mode():
        y = (x * w).sum()
        with pytest.raises(RuntimeError, match=r"an output that requires a gradient, got 1 that do not"):
            split_backward(y, None, x, w)


def test_too_few_grad_outputs() -> None:
    w = an_input(3)
    with pytest.raises(ValueError, match=r"expected 2 grad_outputs, one for each output, got 1\."):
        split_backward([w * 1, w * 2], [torch.ones(3)], [], [w])


@pytest.mark.parametrize("x", [torch.ones(3), torch.ones(3, requires_grad=True)])
def test_a_gradient_of_the_wrong_shape_raises_in_the_first_part(x: Tensor) -> None:
    w = an_input(3)
    with pytest.raises(
        ValueError, match=r"grad_outputs\[0\] of shape \(3,\), that of its output, got one of shape \(2,\)"
    ):
        split_backward(x * w, torch.ones(2), x, w)
    with pytest.raises(ValueError, match=r"got None"):
        split_backward(x * w, None, x, w)


@pytest.mark.parametrize("place", ["outputs", "inputs", "weights"])
def test_something_that_is_no_tensor(place: str) -> None:
    arguments: dict[str, Any] = {"outputs": [an_input()], "inputs": [an_input()], "weights": [an_input()]}
    arguments[place] = [*arguments[place], "ffn.3"]
    if place == "outputs":
        arguments["grad_outputs"] = [None, None]
    with pytest.raises(TypeError, match=rf"expected {place}\[1\] to be a tensor or a GradientEdge, got str"):
        split_backward(**{"grad_outputs": None, **arguments})


def test_a_complex_gradient_of_a_real_weight_raises_as_in_one_backward() -> None:
    x, w = torch.randn(2, dtype=torch.complex64, requires_grad=True), an_input(2)
    for split in (False, True):
        y = torch.where(torch.tensor([True, False]), x, w).abs().sum()
        with pytest.raises(RuntimeError, match="complex"):
            split_backward(y, None, x, w)[1].run() if split else torch.autograd.grad(y, (x, w))


def test_weights_behind_an_input_with_hooks_are_refused() -> None:
    w = an_input(3)
    x = w * 2
    x.register_hook(lambda grad: grad * 10)
    with pytest.raises(ValueError, match=r"no weights behind inputs\[0\], which has hooks"):
        split_backward(x.sum(), None, x, w)


def test_weights_behind_an_input_that_retains_its_gradient_are_refused_if_python_made_it() -> None:
    w = an_input(3)
    x = Recorded.apply(w, "x")
    x.retain_grad()
    with pytest.raises(ValueError, match="got retain_grad on a result of a function in Python"):
        split_backward(x.sum(), None, x, w)
    split_backward(x.sum(), None, x, [])
