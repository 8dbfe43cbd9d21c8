"""before_backward fires once and in time; at_end_of_backward fires at the very end."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from moe_autograd import parallel_apply
from moe_autograd.autograd.hooks import at_end_of_backward, before_backward, nested_backwards


class Traced(torch.autograd.Function):
    """The identity; writes down when its backward runs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, name: str, events: list[str]) -> Tensor:
        ctx.name, ctx.events = name, events
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        ctx.events.append(ctx.name)
        return grad, None, None


class Layer(nn.Module):
    """Two outputs; announces its backward."""

    def __init__(self, name: str, events: list[str]) -> None:
        super().__init__()
        self.name, self.events = name, events
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = Traced.apply(self.linear(x), self.name, self.events)
        outputs = {"a": h.sin(), "b": [h.cos(), 7]}
        before_backward(outputs, lambda: self.events.append(f"before {self.name}"))
        return outputs["a"] * outputs["b"][0]


@pytest.fixture
def events() -> list[str]:
    return []


def test_it_fires_once_before_the_layers_backward_begins(events: list[str]) -> None:
    layers = nn.Sequential(Layer("1", events), Layer("2", events), Layer("3", events))
    layers(torch.randn(2, 3)).sum().backward()
    assert events == ["before 3", "3", "before 2", "2", "before 1", "1"]


def test_it_fires_in_every_backward_anew(events: list[str]) -> None:
    y = Layer("1", events)(torch.randn(2, 3))
    for _ in range(2):
        y.sum().backward(retain_graph=True)
    assert events == ["before 1", "1"] * 2


def test_it_fires_when_only_some_outputs_are_used(events: list[str]) -> None:
    x = torch.randn(3, requires_grad=True)
    outputs = (x * 1, x * 2, x * 3)
    before_backward(outputs, lambda: events.append("before"))
    outputs[1].sum().backward()
    assert events == ["before"]


def test_it_fires_for_autograd_grad(events: list[str]) -> None:
    x = torch.randn(3, requires_grad=True)
    y = x * 2
    before_backward(y, lambda: events.append("before"))
    torch.autograd.grad(y.sum(), x)
    assert events == ["before"]


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_it_fires_once_under_recompute(use_reentrant: bool, events: list[str]) -> None:
    layer, x = Layer("1", events), torch.randn(2, 3, requires_grad=True)
    checkpoint(layer, x, use_reentrant=use_reentrant).sum().backward()
    assert events == ["before 1", "1"]


def test_it_fires_once_for_each_of_nested_layers(events: list[str]) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Sequential(Layer("inner 1", events), Layer("inner 2", events))

        def forward(self, x: Tensor) -> Tensor:
            y = self.inner(x)
            before_backward(y, lambda: events.append("before outer"))
            return y

    checkpoint(Outer(), torch.randn(2, 3, requires_grad=True), use_reentrant=False).sum().backward()
    assert events == ["before outer", "before inner 2", "inner 2", "before inner 1", "inner 1"]


def test_a_removed_one_stays_silent(events: list[str]) -> None:
    x = torch.randn(3, requires_grad=True)
    y = x * 2
    before_backward(y, lambda: events.append("before")).remove()
    y.sum().backward()
    assert events == []


def test_outputs_without_gradient_are_passed_over(events: list[str]) -> None:
    before_backward((torch.ones(2), "text", None), lambda: events.append("before"))
    assert events == []


def test_what_the_function_returns_does_not_replace_the_gradient() -> None:
    x = torch.ones(3, requires_grad=True)
    y = x * 2
    before_backward(y, lambda: torch.zeros(3))
    y.sum().backward()
    assert torch.equal(x.grad, torch.full((3,), 2.0))


def test_what_it_raises_the_backward_raises() -> None:
    x = torch.ones(3, requires_grad=True)
    y = x * 2
    before_backward(y, lambda: {}["ffn.3"])
    with pytest.raises(KeyError, match=r"ffn\.3"):
        y.sum().backward()


def test_the_end_comes_after_every_gradient_and_once(events: list[str]) -> None:
    x = torch.ones(3, requires_grad=True)
    h = x * 2
    y = h * 3

    def at_end() -> None:
        assert x.grad is not None
        events.append("end")

    for t in (y, h):
        before_backward(t, lambda: (events.append("hook"), at_end_of_backward(at_end)))
    y.sum().backward(retain_graph=True)
    assert events == ["hook", "hook", "end"]
    y.sum().backward()
    assert events == ["hook", "hook", "end"] * 2


def test_ends_are_called_in_the_order_of_asking_also_those_asked_for_at_the_end(events: list[str]) -> None:
    x = torch.ones(3, requires_grad=True)
    y = x * 2
    y.register_hook(lambda _: at_end_of_backward(lambda: (events.append("1"), at_end_of_backward(third))))
    y.register_hook(lambda _: at_end_of_backward(lambda: events.append("2")))

    def third() -> None:
        events.append("3")

    y.sum().backward()
    assert events == ["1", "2", "3"]


def test_asking_again_for_an_end_that_has_been_called_changes_nothing(events: list[str]) -> None:
    x = torch.ones(3, requires_grad=True)
    y = x * 2

    def first() -> None:
        events.append("1")

    def second() -> None:
        events.append("2")
        at_end_of_backward(first)

    y.register_hook(lambda _: (at_end_of_backward(first), at_end_of_backward(second), None)[-1])
    y.sum().backward()
    assert events == ["1", "2"]


def test_an_end_may_be_an_object_that_cannot_be_hashed(events: list[str]) -> None:
    @dataclasses.dataclass  # equal ones need not be the same, so it has no hash
    class Append:
        what: str

        def __call__(self) -> None:
            events.append(self.what)

    x = torch.ones(3, requires_grad=True)
    y = x * 2
    end = Append("end")
    y.register_hook(lambda _: (at_end_of_backward(end), at_end_of_backward(end), None)[-1])
    y.sum().backward()
    assert events == ["end"]


def test_what_the_end_raises_the_backward_raises() -> None:
    x = torch.ones(3, requires_grad=True)
    y = x * 2
    y.register_hook(lambda _: at_end_of_backward(lambda: {}["ffn.3"]))
    with pytest.raises(KeyError, match=r"ffn\.3"):
        y.sum().backward()


def test_an_end_that_raises_lets_go_of_those_behind_it_though_the_error_is_kept(events: list[str]) -> None:
    x = torch.ones(3, requires_grad=True)
    y = x * 2
    behind: list[Callable[[], None]] = [lambda: events.append("end")]
    alive = weakref.ref(behind[0])

    def ask(_: Tensor) -> None:
        at_end_of_backward(lambda: {}["ffn.3"])
        at_end_of_backward(behind.pop())

    y.register_hook(ask)
    with pytest.raises(KeyError) as kept:
        y.sum().backward()
    assert alive() is None
    assert kept.value.__traceback__ is not None
    assert events == []


def test_outside_of_a_backward_it_raises() -> None:
    with pytest.raises(RuntimeError, match="expected a call from inside a backward, got one from outside"):
        at_end_of_backward(lambda: None)


def test_a_backward_that_fails_calls_none_and_holds_none(events: list[str]) -> None:
    x = torch.ones(3, requires_grad=True)
    y = x * 2
    function: Callable[[], None] | None = lambda: events.append("end")  # noqa: E731  # to be weakly referenced
    alive = weakref.ref(function)
    handles = [y.register_hook(lambda _: at_end_of_backward(function)), x.register_hook(lambda _: 1 / 0)]
    with pytest.raises(ZeroDivisionError):
        y.sum().backward()
    assert events == []
    for handle in handles:
        handle.remove()
    function = None
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("in_thread", [False, True])
def test_nested_backwards_end_with_the_outermost(in_thread: bool, events: list[str]) -> None:
    class Nested(torch.autograd.Function):
        """Its backward runs a backward of its own, as the map's join does on its workers."""

        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            with torch.enable_grad():
                ctx.x = x.detach().requires_grad_()
                ctx.y = ctx.x * 2
            ctx.y.register_hook(lambda _: at_end_of_backward(lambda: events.append("end")))
            return ctx.y.detach()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            grads = []
            with nested_backwards(), nested_backwards():
                run = copy_context().run
                job = lambda: grads.append(run(torch.autograd.grad, ctx.y, ctx.x, grad)[0])  # noqa: E731
                if in_thread:
                    worker = threading.Thread(target=job)
                    worker.start()
                    worker.join()
                else:
                    job()
            events.append("nested backward done")
            return grads[0]

    x = torch.ones(3, requires_grad=True)
    h = Traced.apply(x, "layer below", events)
    Nested.apply(h).sum().backward()
    assert events == ["nested backward done", "layer below", "end"]


@pytest.mark.parametrize("in_thread", [False, True])
def test_what_a_nested_backward_asked_for_is_not_called_if_it_fails(
    in_thread: bool, events: list[str]
) -> None:
    def nested(name: str, x: Tensor) -> None:
        inner = x.detach().requires_grad_()
        y = inner * 2
        y.register_hook(lambda _: at_end_of_backward(lambda: events.append(name)))
        if name == "fails":
            inner.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError) if name == "fails" else contextlib.nullcontext():
            y.sum().backward()

    def hook(grad: Tensor) -> None:
        for name in ("before", "fails", "after"):
            with nested_backwards(), torch.enable_grad():
                run = copy_context().run
                if in_thread:
                    with ThreadPoolExecutor(1) as pool:
                        pool.submit(run, nested, name, grad).result()
                else:
                    nested(name, grad)

    x = torch.ones(3, requires_grad=True)
    y = x * 2
    y.register_hook(hook)
    y.sum().backward()
    assert events == ["before", "after"]


def test_nested_backwards_outside_of_a_backward_do_nothing(events: list[str]) -> None:
    x = torch.ones(3, requires_grad=True)
    y = x * 2
    y.register_hook(lambda _: at_end_of_backward(lambda: events.append("end")))
    with nested_backwards():
        y.sum().backward()
    assert events == ["end"]


@pytest.mark.parametrize("options", [{}, {"recompute": True}, {"defer_weight_grads": True}], ids=str)
def test_what_a_mapped_module_asks_for_waits_for_the_end_of_the_whole_backward(
    options: dict[str, Any], events: list[str]
) -> None:
    """Of each call once, from worker threads, after the layer below; also from the gradient of a weight."""
    both_ask = threading.Barrier(2, timeout=60)

    def ask() -> None:
        both_ask.wait()  # so that one of them is on another thread
        at_end_of_backward(lambda: events.append("end"))

    class Asks(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            weight = self.weight * 1
            weight.register_hook(lambda _: ask())
            return x * weight

    x = torch.ones(3, requires_grad=True)
    h = Traced.apply(x, "layer below", events)
    sum(parallel_apply([Asks(), Asks()], [(h,), (h,)], **options)).sum().backward()
    assert events == ["layer below", "end", "end"]
