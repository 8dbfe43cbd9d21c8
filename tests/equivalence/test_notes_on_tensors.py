"""Attributes that users put on tensors: calls find those of their inputs, and callers those of results."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from moe_autograd import parallel_apply
from tests.support.comparing_modules import assert_same_without_error
from tests.support.comparison import MapFunction, loss_of
from tests.support.module_programs import NUM_CALLS, leaves, parameters, seeded
from tests.support.module_programs_results import Output
from tests.support.offloading import both

OPTIONS: list[dict[str, Any]] = [
    {},
    {"recompute": True},
    {"defer_weight_grads": True},
    {"max_concurrency": 1},
]


class Scaled(Tensor):
    """A tensor of numbers that are to be multiplied by something, which is not computed with."""

    scale = 1.0


def scaled(x: Tensor, scale: float) -> Scaled:
    result = x.as_subclass(Scaled)
    result.scale = scale
    return result


def noted(x: Tensor, note: Any) -> Any:
    x.note = note  # type: ignore[attr-defined]
    return x


@pytest.mark.parametrize("options", OPTIONS)
def test_results_have_what_their_calls_put_on_them(options: dict[str, Any]) -> None:
    def program(apply: MapFunction) -> Any:
        modules, xs = seeded(lambda: nn.Linear(4, 4)), leaves()

        def call(module: nn.Module, x: Tensor, scale: float) -> Any:
            y = module(x)
            return scaled(y, scale), [noted(y.sin(), scale), y.view(-1)[:3], Output(scaled(y.exp(), -scale))]

        calls = [functools.partial(call, module) for module in modules]
        outputs = apply(calls, [(x, float(i)) for i, x in enumerate(xs)])
        all_scaled = [one for first, (*_, third) in outputs for one in (first, third.hidden)]
        loss_of([one.as_subclass(Tensor) * one.scale for one in all_scaled]).backward()
        said = [(type(one), one.scale) for one in all_scaled], [second.note for _, (second, *_) in outputs]
        return said, [x.grad for x in [*xs, *parameters(modules)]]

    assert_same_without_error(program, **options)


class Guarded(Tensor):
    """One whose author lets users put but known attributes on it."""

    def __setattr__(self, name: str, value: object) -> None:
        if name != "scale":
            raise AttributeError(f"a Guarded has no {name}")
        super().__setattr__(name, value)


def test_what_classes_define_is_not_asked() -> None:
    def program(apply: MapFunction) -> Any:
        def call(x: Tensor, scale: float) -> Any:
            y: Any = x.sin().as_subclass(Guarded)
            y.scale = scale
            return y

        return [(type(y), y.scale) for y in apply([call] * 2, [(x, 2.0) for x in leaves(2)])]

    assert_same_without_error(program)


@pytest.mark.parametrize("options", OPTIONS)
def test_tensors_in_what_calls_put_on_their_results_are_results_too(options: dict[str, Any]) -> None:
    def program(apply: MapFunction) -> Any:
        modules, xs = seeded(lambda: nn.Linear(4, 4)), leaves()

        def call(module: nn.Module, x: Tensor) -> Any:
            y = noted(module(x), {"loss": module(x).square().mean(), "again": [x.sin()]})
            y.itself = y
            return noted(y.detach(), y) if module is modules[0] else y

        outputs = apply([functools.partial(call, module) for module in modules], [(x,) for x in xs])
        outputs[0] = outputs[0].note
        loss_of([y.note["loss"] + y.note["again"][0] * y.itself for y in outputs]).backward()
        return [x.grad for x in [*xs, *parameters(modules)]]

    assert_same_without_error(program, **options)


def test_views_of_a_changed_input_and_inputs_themselves_have_theirs() -> None:
    def program(apply: MapFunction) -> Any:
        xs = leaves()
        calls = [lambda x: (noted(x.mul_(2)[1:], "a view"), noted(x, "itself"))] * NUM_CALLS
        outputs = apply(calls, [(x * 1,) for x in xs])
        loss_of([one for output in outputs for one in output]).backward()
        return [one.note for output in outputs for one in output], [x.grad for x in xs]

    assert_same_without_error(program)


def test_results_that_lead_to_each_other_have_theirs() -> None:
    def program(apply: MapFunction) -> Any:
        def call(x: Tensor) -> Any:
            y = noted(x.sin(), "below")
            return y, noted(y.exp(), "above")

        xs = leaves()
        outputs = apply([call] * NUM_CALLS, [(x,) for x in xs])
        grads = torch.autograd.grad(loss_of([above for _, above in outputs]), [below for below, _ in outputs])
        return [one.note for output in outputs for one in output], grads

    assert_same_without_error(program)


@pytest.mark.usefixtures("no_gc")
def test_what_is_put_on_a_result_goes_with_it() -> None:
    results = parallel_apply(
        [lambda x: noted(x.sin(), Output(x.exp()))] * NUM_CALLS, [(x,) for x in leaves()]
    )
    alive = [weakref.ref(one) for y in results for one in (y, y.note, y.note.hidden)]
    loss_of([y.note.hidden for y in results]).backward()
    del results
    assert all(one() is None for one in alive)


class Notes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Any) -> Tensor:
        return scaled(self.linear(x) * x.note, 2 * x.note)


@pytest.mark.parametrize("num_microbatches", [None, 2])
@pytest.mark.parametrize("recompute", [False, True])
def test_offloaded_experts_find_and_leave_notes(num_microbatches: int | None, recompute: bool) -> None:
    experts, plain = both(Notes, num_microbatches=num_microbatches)
    with experts:
        for modules in (list(experts), plain):
            xs = [noted(torch.ones(3, 4, requires_grad=True), i) for i in range(len(plain))]
            outputs = parallel_apply(modules, [(x,) for x in xs], recompute=recompute)
            assert [(type(y), y.scale) for y in outputs] == [(Scaled, 2 * i) for i in range(len(plain))]
            torch.stack([y.as_subclass(Tensor).sum() for y in outputs]).sum().backward()
            assert [x.grad.any().item() for x in xs] == [i > 0 for i in range(len(plain))]


def test_an_offloaded_expert_refuses_tensors_in_what_it_puts_on_a_result() -> None:
    class NotesLoss(nn.Linear):
        def forward(self, x: Tensor) -> Any:
            y = super().forward(x)
            return noted(y, [y.square().mean()])

    experts, _ = both(lambda: NotesLoss(4, 4), num=2)
    with (
        experts,
        pytest.raises(TypeError, match=r"from a call, got Tensor, which holds some\. Return them as a dict"),
    ):
        experts[0](torch.ones(3, 4))


class Wraps(Tensor):
    """Is made of another tensor, which it holds as an attribute."""

    elem: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, elem: Tensor) -> Wraps:
        made = torch.Tensor._make_wrapper_subclass(cls, elem.shape, dtype=elem.dtype)  # type: ignore[attr-defined]
        made.elem = elem.detach()
        return made  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(Wraps, lambda wrap: wrap.elem, (args, kwargs or {}))
        return tree_map_only(Tensor, Wraps, func(*args, **kwargs))


class WrapsAll(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return Wraps.__torch_dispatch__(func, types, args, kwargs)


@pytest.mark.parametrize("mode", [WrapsAll, functools.partial(FakeTensorMode, allow_non_fake_inputs=True)])
@pytest.mark.parametrize("max_concurrency", [None, 1])
def test_a_mode_may_make_tensors_of_another_class(
    mode: Callable[[], Any], max_concurrency: int | None
) -> None:
    """The alias of an input lost the attributes that made it what it is."""
    xs = leaves()
    with mode():
        calls = [lambda x: (x.sin(), type(x))] * NUM_CALLS
        outputs = parallel_apply(calls, [(x,) for x in xs], max_concurrency=max_concurrency)
        kind = type(torch.ones(1).sin())
        assert all(type(y) is kind and seen is kind for y, seen in outputs)
