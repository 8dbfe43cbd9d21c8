"""What split_backward keeps and frees, and what it leaves behind when it fails."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from moe_autograd.autograd.split_backward import split_backward
from tests.support.split import an_input, mlp


@pytest.mark.usefixtures("no_gc")
def test_a_failure_leaves_no_hook_behind_and_the_graph_usable() -> None:
    layer, x = nn.Linear(4, 4), an_input(3, 4)
    y = layer(layer(x))
    handle = x.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        split_backward(y, torch.ones_like(y), x, layer.parameters())
    handle.remove()
    grad = torch.ones_like(y)
    alive = weakref.ref(grad)
    _, pending = split_backward(y, grad, x, layer.parameters())
    assert all(one is not None for one in pending.run())
    del grad
    assert alive() is None, "a hook left on a node of the graph would hold what flowed into it"
    assert y.grad_fn is not None


@pytest.mark.usefixtures("no_gc")
def test_what_only_the_first_part_needs_is_freed_when_it_returns() -> None:
    net, x = mlp(), an_input(3, 4)
    before_gelu = net[0](x)
    after_gelu = net[1](before_gelu)
    y = net[2](after_gelu)
    only_first, both = weakref.ref(before_gelu), weakref.ref(after_gelu)
    del before_gelu, after_gelu
    assert only_first() is not None
    _, pending = split_backward(y, torch.ones_like(y), x, net.parameters())
    assert only_first() is None, "gelu saved it, and gelu has no weight"
    assert both() is not None, "the last layer's weight gradient needs it"
    del y
    assert both() is not None
    pending.run()
    assert both() is None


@pytest.mark.usefixtures("no_gc")
def test_what_the_second_part_used_is_freed_though_the_outputs_live() -> None:
    net, x = mlp(), an_input(3, 4)
    after_gelu = net[1](net[0](x))
    y = net[2](after_gelu)
    alive = weakref.ref(after_gelu)
    del after_gelu
    _, pending = split_backward(y, torch.ones_like(y), x, net.parameters())
    pending.run()
    assert alive() is None
    assert y.grad_fn is not None


@pytest.mark.usefixtures("no_gc")
def test_what_functions_in_python_saved_is_freed() -> None:
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            return 2 * grad * ctx.saved_tensors[0]

    x, w = an_input(3), an_input(3)
    h = x * 1
    y = Square.apply(h) * w
    alive = weakref.ref(h)
    del h
    _, pending = split_backward(y.sum(), None, x, w)
    assert alive() is None
    pending.run()


@pytest.mark.usefixtures("no_gc")
def test_a_dropped_pending_holds_nothing() -> None:
    net, x = mlp(), an_input(3, 4)
    after_gelu = net[1](net[0](x))
    alive = weakref.ref(after_gelu)
    y = net[2](after_gelu)
    grad = torch.ones_like(y)
    alive_grad = weakref.ref(grad)
    _, pending = split_backward(y, grad, x, net.parameters())
    del after_gelu, y, grad
    assert alive() is not None
    assert alive_grad() is not None
    del pending
    assert alive() is None
    assert alive_grad() is None


def test_the_graph_upstream_of_an_input_stays_usable() -> None:
    w, v = an_input(3), an_input(3)
    x = w.exp()
    (grad_x,), pending = split_backward((x * v).sum(), None, x, v)
    pending.run()
    x.backward(grad_x)
    torch.testing.assert_close(w.grad, v * w.exp())


class Keeps(torch.autograd.Function):
    """Keeps something in its context."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, kept: nn.Module) -> Tensor:
        ctx.save_for_backward(x, w)
        ctx.kept = kept
        return x * w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, w = ctx.saved_tensors
        return grad * w, grad * x, None


@pytest.mark.usefixtures("no_gc")
def test_the_graph_of_a_function_goes_with_the_outputs_and_the_second_part() -> None:
    x, w, kept = an_input(3), an_input(3), nn.Identity()
    alive = weakref.ref(kept)
    y = Keeps.apply(x, w, kept)
    del kept
    _, pending = split_backward(y, torch.ones_like(y), x, w)
    pending.run()
    assert alive() is not None
    del y
    assert alive() is None


def test_a_checkpoint_runs_its_forward_again_once_for_both_parts() -> None:
    net, x, num_calls = mlp(), an_input(3, 4), []
    handle = net.register_forward_pre_hook(lambda *_: num_calls.append(1))
    y = checkpoint(net, x, use_reentrant=False)
    _, pending = split_backward(y, torch.ones_like(y), x, net.parameters())
    pending.run()
    handle.remove()
    assert len(num_calls) == 2
