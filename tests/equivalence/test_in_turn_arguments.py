"""Which arguments calls in turn may have, and what they draw: tensors, numbers and tuples of them; modes and hooks."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from moe_autograd import parallel_apply
from moe_autograd.autograd import in_turn
from tests.support.comparison import one_after_another
from tests.support.made_in_turn import expert, is_made_in_turn
from tests.support.readable import wait

NUM_CALLS = 4

pytestmark = pytest.mark.usefixtures("some_are_small")


class TakesMore(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = expert()

    def forward(self, x: Tensor, weight: Tensor | None = None, *, scale: float = 1.0) -> Tensor:
        y = self.inner(x) * scale
        return y if weight is None else y * weight


def test_calls_with_several_tensors_and_numbers_are_made_in_turn_too() -> None:
    modules = [TakesMore() for _ in range(NUM_CALLS)]
    xs = [torch.randn(3, 4, requires_grad=True) for _ in modules]
    weight = torch.rand(3, 1, requires_grad=True)
    args: list[Any] = [(xs[0],), (xs[1], weight), (xs[2], None), (xs[3],)]
    kwargs: list[Any] = [{}, {"scale": 0.5}, {}, {"weight": weight, "scale": 2}]
    assert in_turn.call_in_turn(modules, args, kwargs) is not None

    wanted = [weight, *xs, *nn.ModuleList(modules).parameters()]
    natively = [module(*a, **k) for module, a, k in zip(modules, args, kwargs, strict=True)]
    mapped = parallel_apply(modules, args, kwargs)
    assert all(map(torch.equal, mapped, natively))
    assert type(mapped[1].grad_fn) is type(natively[1].grad_fn)  # no node of ours
    both = [torch.autograd.grad(sum(y.pow(2).sum() for y in ys), wanted) for ys in (mapped, natively)]
    assert all(map(torch.equal, *both))


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_recurrent_cells_with_and_without_a_state_are_called_in_turn(kind: Callable[..., nn.Module]) -> None:
    cells = [kind(4, 4) for _ in range(NUM_CALLS)]
    args: list[Any] = [(torch.randn(3, 4, requires_grad=True),) for _ in cells]
    mapped, natively = [parallel_apply(cells, args)], [one_after_another(cells, args)]
    for outs, apply in ((mapped, parallel_apply), (natively, one_after_another)):
        states = [(own[0].detach(), state) for own, state in zip(args, outs[0], strict=True)]
        outs.append(apply(cells, states))
    assert in_turn.call_in_turn(cells, states, [{}] * NUM_CALLS) is not None
    flat, same = tree_leaves(mapped), tree_leaves(natively)
    assert all(map(torch.equal, flat, same))
    wanted = [*[own[0] for own in args], *nn.ModuleList(cells).parameters()]
    both = [torch.autograd.grad(sum(y.pow(2).sum() for y in ys), wanted) for ys in (flat, same)]
    assert all(map(torch.equal, *both))


class AddsNoise(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        y = func(*args, **(kwargs or {}))
        return y + torch.rand_like(y) if func is F.linear else y


def adds_noise(x: Tensor) -> Tensor:
    return x + torch.rand_like(x)


def rounds_randomly() -> AbstractContextManager[Any]:
    return torch.autograd.graph.saved_tensors_hooks(adds_noise, lambda x: x)


@pytest.mark.parametrize("make", [AddsNoise, rounds_randomly])
def test_modes_and_hooks_draw_what_they_draw_on_threads(
    make: Callable[[], AbstractContextManager[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    modules = [expert() for _ in range(NUM_CALLS)]
    xs = [torch.randn(3, 4, requires_grad=True) for _ in modules]

    def draw() -> list[Tensor]:
        torch.manual_seed(1)
        with make():
            ys = parallel_apply(modules, xs)
        return [*ys, *torch.autograd.grad([y.sum() for y in ys], xs), torch.rand(2)]

    assert in_turn.call_in_turn(modules, [(x,) for x in xs], [{}] * NUM_CALLS) is not None
    without_threads = draw()
    monkeypatch.setattr(in_turn, "MOST_SMALL", -1)
    assert all(map(torch.equal, without_threads, draw()))


class WaitsForAnother(TorchFunctionMode):
    """As limits.md says, in vain."""

    def __init__(self) -> None:
        super().__init__()
        self.barrier = threading.Barrier(2)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.linear:
            self.barrier.wait(0.05)
        return func(*args, **(kwargs or {}))


def test_a_mode_that_waits_in_one_call_for_another_waits_in_vain() -> None:
    with pytest.raises(threading.BrokenBarrierError), WaitsForAnother():
        parallel_apply([nn.Linear(4, 4), nn.Linear(4, 4)], [torch.randn(3, 4)] * 2)


class Special(Tensor):
    pass


def test_tensors_of_other_classes_and_other_arguments_get_a_thread() -> None:
    x, special = torch.randn(3, 4), torch.randn(3, 4).as_subclass(Special)
    assert not is_made_in_turn(expert(), special)
    assert not is_made_in_turn(expert(), "no tensor")
    for other in (special, b"no tensor", (x, wait), [x], wait, torch.ones(3, 1, device="meta")):
        assert in_turn.call_in_turn([TakesMore()], [(x, other)], [{}]) is None
        assert in_turn.call_in_turn([TakesMore()], [(x,)], [{"scale": other}]) is None
    assert in_turn.call_in_turn([expert()], [()], [{}]) is None


class AppliesWhatItIsTold(TakesMore):
    def forward(self, x: Tensor, activation: str = "relu") -> Any:  # type: ignore[override]
        if activation == "relu":
            return F.relu(self.inner(x))
        if activation == "tanh":
            return torch.tanh(self.inner(x))
        raise ValueError(f"expected relu or tanh, got {activation!r}")


def test_texts_may_tell_what_to_compute_and_raise() -> None:
    modules, x = [AppliesWhatItIsTold() for _ in range(2)], torch.randn(3, 4)
    made = in_turn.call_in_turn(modules, [(x,), (x, "tanh")], [{}, {}])
    assert made is not None
    assert all(map(torch.equal, made, [modules[0](x), modules[1](x, "tanh")]))
    with pytest.raises(ValueError, match="got 'gelu'") as caught:
        parallel_apply(modules, [(x,), (x, "gelu")])
    assert any("call 1" in note for note in caught.value.__notes__)


@pytest.mark.parametrize(("args", "kwargs"), [((2,), {}), ((), {"more": 1})])
def test_what_a_module_does_not_take_is_not_passed_over(args: Any, kwargs: Any) -> None:
    for module in (expert(), nn.Linear(4, 4)):
        with pytest.raises(TypeError) as native:
            module(torch.randn(3, 4), *args, **kwargs)
        with pytest.raises(TypeError) as mapped:
            parallel_apply([module], [(torch.randn(3, 4), *args)], [kwargs])
        assert str(mapped.value) == str(native.value)
