"""What split_backward counts, fires and computes, and where it may run."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.graph import get_gradient_edge

from moe_autograd.autograd.split_backward import split_backward
from tests.support.operators import CountOperators
from tests.support.split import Recorded, an_input, mlp


def test_grad_fields_are_left_alone() -> None:
    net, x = mlp(), an_input(3, 4)
    kept = torch.full_like(x, 7.0)
    x.grad = kept
    _, pending = split_backward(net(x).sum(), None, x, net.parameters())
    pending.run()
    assert x.grad is kept
    assert torch.equal(kept, torch.full_like(x, 7.0))
    assert [p.grad for p in net.parameters()] == [None] * 4


def test_single_tensors_stand_for_sequences_of_one() -> None:
    x, w = an_input(3), an_input(3)
    input_grads, pending = split_backward((x * w).sum(), None, x, w)
    assert torch.equal(input_grads[0], w)
    (weight_grad,) = pending.run()
    assert torch.equal(weight_grad, x)


def test_tensors_of_a_class_of_ones_own_have_their_gradients() -> None:
    """There were none, and nobody said so: torch returns the edge of a view of such a leaf."""

    class Named(Tensor):
        pass

    x, w = (torch.randn(3, 3).as_subclass(Named).requires_grad_() for _ in range(2))
    (grad_x,), pending = split_backward((x @ w).sin().sum(), None, x, w)
    (grad_w,) = pending.run()
    torch.testing.assert_close((grad_x, grad_w), torch.autograd.grad((x @ w).sin().sum(), (x, w)))


def test_both_parts_run_in_inference_mode_as_any_backward_does() -> None:
    net, x = mlp(), an_input(3, 4)
    expected = torch.autograd.grad(net(x).sum(), [x, *net.parameters()])
    y = net(x).sum()
    with torch.inference_mode():
        grad = torch.ones(())  # which has no version
        input_grads, pending = split_backward(y, grad, x, net.parameters())
        torch.testing.assert_close((*input_grads, *pending.run()), expected)


class ShowsWhetherItMayLeaveItsThread(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, seen: list[bool]) -> Tensor:
        ctx.seen = seen
        ctx.save_for_backward(x, w)
        return x * w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        ctx.seen.append(torch._C._is_multithreading_enabled())
        x, w = ctx.saved_tensors
        return grad * w, grad * x, None


@pytest.mark.parametrize("inference", [False, True])
@pytest.mark.parametrize("may_leave", [False, True])
def test_a_backward_that_has_to_stay_on_its_thread_does(may_leave: bool, inference: bool) -> None:
    """On an accelerator, that is where a call's random numbers and its lane are, and where nobody waits for it."""
    seen: list[bool] = []
    x, w, v = an_input(3), an_input(3), an_input(3)
    below = ShowsWhetherItMayLeaveItsThread.apply(w, v, seen)  # type: ignore[no-untyped-call]
    y = ShowsWhetherItMayLeaveItsThread.apply(x, below, seen).sum()  # type: ignore[no-untyped-call]
    with torch.inference_mode(inference), torch.autograd.set_multithreading_enabled(may_leave):
        _, pending = split_backward(y, None, x, [w, v])
        pending.run()
        assert torch._C._is_multithreading_enabled() is may_leave
    assert seen == [may_leave, may_leave]


def test_of_many_threads_that_run_it_one_wins() -> None:
    w = an_input(3)
    _, pending = split_backward(w.sum(), None, [], w)
    barrier, outcomes = threading.Barrier(8), []

    def contend() -> None:
        barrier.wait()
        try:
            outcomes.append(pending.run())
        except RuntimeError as error:
            outcomes.append(error)

    threads = [threading.Thread(target=contend) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(isinstance(outcome, tuple) for outcome in outcomes) == 1


def test_each_part_makes_its_own_products_and_no_other() -> None:
    net, x = (
        nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 4)),
        an_input(3, 4),
    )
    y = net(x)
    with CountOperators() as first:
        _, pending = split_backward(y, torch.ones_like(y), x, net.parameters())
    with CountOperators() as second:
        pending.run()
    assert (first.counts["mm"], first.counts["gelu_backward"]) == (3, 2)
    assert (second.counts["mm"], second.counts["gelu_backward"]) == (3, 0)


def test_what_weights_share_below_the_borders_is_computed_once() -> None:
    x, w, v = an_input(3, 4), an_input(4, 4), an_input(4, 4)
    shared = (w @ v).tanh()
    y = x @ shared + x @ shared.T
    with CountOperators() as first:
        _, pending = split_backward(y, torch.ones_like(y), x, [w, v])
    with CountOperators() as second:
        pending.run()
    assert (first.counts["mm"], first.counts["tanh_backward"]) == (2, 0)
    assert (second.counts["mm"], second.counts["tanh_backward"]) == (4, 1)  # two borders, then w and v


def test_a_layer_used_twice_is_not_run_along_its_own_path() -> None:
    layer, x = nn.Linear(4, 4), an_input(3, 4)
    y = layer(layer(layer(x)))
    with CountOperators() as first:
        _, pending = split_backward(y, torch.ones_like(y), x, layer.parameters())
    with CountOperators() as second:
        pending.run()
    assert (first.counts["mm"], second.counts["mm"]) == (3, 3)


def test_functions_in_python_run_once() -> None:
    Recorded.calls.clear()
    x, w = an_input(3), an_input(3)
    y = Recorded.apply(Recorded.apply(x, "input") * Recorded.apply(w, "weight"), "output")
    _, pending = split_backward(y.sum(), None, x, w)
    assert Recorded.calls == ["output", "input"]
    pending.run()
    assert Recorded.calls == ["output", "input", "weight"]


def test_tensor_hooks_fire_once_and_their_changes_count() -> None:
    fired: list[str] = []
    layer, last, x = nn.Linear(4, 4), nn.Linear(4, 4), an_input(3, 4)

    def twice(name: str) -> Any:
        return lambda grad: (fired.append(name), grad * 2)[1]

    h = layer(x)
    y = last(h)
    handles = [t.register_hook(twice(n)) for t, n in ((y, "y"), (h, "h"), (x, "x"), (layer.weight, "w"))]
    want = torch.autograd.grad(y.sum(), [x, layer.weight, last.weight], retain_graph=True)
    assert sorted(fired) == ["h", "w", "x", "y"]
    fired.clear()
    (grad_x,), pending = split_backward(y.sum(), None, x, [layer.weight, last.weight])
    assert fired == ["y", "h", "x"]
    for got, wanted in zip([grad_x, *pending.run()], want, strict=True):
        torch.testing.assert_close(got, wanted)
    assert fired == ["y", "h", "x", "w"]
    assert len(handles) == 4


def test_hooks_of_an_input_given_as_an_edge_fire_once_though_weights_lie_behind_it() -> None:
    fired: list[str] = []
    w = an_input(3)
    x = w * 3
    x.register_hook(lambda grad: (fired.append("x"), grad * 10)[1])
    (grad_x,), pending = split_backward((x * 2).sum(), None, get_gradient_edge(x), w)
    assert (grad_x.tolist(), fired) == ([20.0] * 3, ["x"])
    (grad_w,) = pending.run()
    assert (grad_w.tolist(), fired) == ([60.0] * 3, ["x"])


def test_an_input_retains_its_gradient_once_though_weights_lie_behind_it() -> None:
    w = an_input(4, 3)
    x, other = (w * 3).unbind()[1:3]
    x.retain_grad()
    (grad_x, _), pending = split_backward((x * 2 + other).sum(), None, [x, other], w)
    (grad_w,) = pending.run()
    assert grad_x.tolist() == x.grad.tolist() == [2.0] * 3
    assert grad_w[:, 0].tolist() == [0.0, 6.0, 3.0, 0.0]


def test_module_backward_hooks_fire_once() -> None:
    fired: list[str] = []
    net, x = mlp(), an_input(3, 4)
    net[0].register_full_backward_hook(lambda *_: fired.append("after"))
    net[0].register_full_backward_pre_hook(lambda *_: fired.append("before"))
    y = net(x)
    want = torch.autograd.grad(y.sum(), [x, *net.parameters()], retain_graph=True)
    assert fired == ["before", "after"]
    (grad_x,), pending = split_backward(y.sum(), None, x, net.parameters())
    for got, wanted in zip([grad_x, *pending.run()], want, strict=True):
        torch.testing.assert_close(got, wanted)
    assert fired == ["before", "after"] * 2


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, lambda: torch.device("meta")])
def test_the_callers_modes_do_not_matter(mode: Any) -> None:
    net, x = mlp(), an_input(3, 4)
    want = torch.autograd.grad(net(x).sum(), [x, *net.parameters()])
    y = net(x).sum()
    with mode():
        input_grads, pending = split_backward(y, torch.ones((), device="cpu"), x, net.parameters())
        weight_grads = pending.run()
    for got, wanted in zip([*input_grads, *weight_grads], want, strict=True):
        torch.testing.assert_close(got, wanted)


def test_the_second_part_runs_on_another_thread_while_the_first_thread_goes_on() -> None:
    net, x = mlp(), an_input(3, 4)
    h = x * 2
    want = torch.autograd.grad(net(h).sum(), [x, *net.parameters()], retain_graph=True)
    (grad_h,), pending = split_backward(net(h).sum(), None, h, net.parameters())
    got: list[Any] = []
    worker = threading.Thread(target=lambda: got.extend(pending.run()))
    worker.start()
    (grad_x,) = torch.autograd.grad(h, x, grad_h)
    worker.join()
    for one, wanted in zip([grad_x, *got], want, strict=True):
        torch.testing.assert_close(one, wanted)


def test_inside_another_backward() -> None:
    net = mlp()

    class Nested(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, *weights: Tensor) -> Tensor:
            ctx.x = x.detach().requires_grad_()
            with torch.enable_grad():
                ctx.y = net(ctx.x)
            return ctx.y.detach()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
            input_grads, pending = split_backward(ctx.y, grad, ctx.x, net.parameters())
            return (*input_grads, *pending.run())

    x = an_input(3, 4)
    got = torch.autograd.grad(Nested.apply(x, *net.parameters()).exp().sum(), [x, *net.parameters()])
    want = torch.autograd.grad(net(x).exp().sum(), [x, *net.parameters()])
    for one, wanted in zip(got, want, strict=True):
        torch.testing.assert_close(one, wanted)


def test_a_deep_graph_does_not_recurse() -> None:
    x, w = an_input(2), an_input(2)
    y = x
    for _ in range(5000):
        y = y * 1.0 + w
    (grad_x,), pending = split_backward(y.sum(), None, x, w)
    assert torch.equal(grad_x, torch.ones(2))
    assert torch.equal(pending.run()[0], torch.full((2,), 5000.0))


def test_outputs_that_need_no_gradient_are_passed_over() -> None:
    x, w = torch.ones(3), torch.ones(3)
    outputs = [x * w, an_input(3) * 2]
    input_grads, pending = split_backward(outputs, [torch.ones(3)] * 2, [x, x], [w])
    assert input_grads == (None, None)
    assert pending.run() == (None,)
