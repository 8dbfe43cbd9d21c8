"""What split_backward keeps, frees, fires, counts and refuses."""

from __future__ import annotations

import gc
import threading
import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from moe_autograd.autograd.split_backward import split_backward


@pytest.fixture
def no_gc() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class CountOperators(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func._opname] += 1
        return func(*args, **kwargs or {})


class Recorded(torch.autograd.Function):
    """The identity; writes down each of its backwards."""

    calls: list[str] = []

    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str) -> Tensor:
        ctx.name = name
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        Recorded.calls.append(ctx.name)
        return grad, None


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))


def an_input(*shape: int) -> Tensor:
    return torch.randn(shape, requires_grad=True)


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


def test_a_second_run_raises() -> None:
    w = an_input(3)
    _, pending = split_backward(w.sum(), None, [], w)
    assert repr(pending) == "PendingWeightGradients(pending)"
    pending.run()
    assert repr(pending) == "PendingWeightGradients(ran)"
    with pytest.raises(RuntimeError, match=r"expected one call, got a second"):
        pending.run()


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


def test_outputs_that_need_no_gradient_give_none() -> None:
    x, w = torch.ones(3), torch.ones(3)
    input_grads, pending = split_backward(x * w, torch.ones(3), [x, x], [w])
    assert input_grads == (None, None)
    assert pending.run() == (None,)


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


def test_weights_behind_an_input_with_hooks_are_refused() -> None:
    w = an_input(3)
    x = w * 2
    x.register_hook(lambda grad: grad * 10)
    with pytest.raises(ValueError, match=r"no weights behind inputs\[0\], which has hooks"):
        split_backward(x.sum(), None, x, w)
