"""Calls that share a module with running statistics leave it as a plain loop does, or the map says so."""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from moe_autograd import parallel_apply
from moe_autograd.autograd import turns
from tests.support.comparison import (
    MapFunction,
    Raised,
    assert_same,
    assert_same_program,
    attempt,
    loss_of,
    one_after_another,
)
from tests.support.functions_waiting import PATIENCE_S
from tests.support.module_programs import leaves, seeded

ORDER = 1e-12
SPECTRAL = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4).double())


class Gate:
    """Where the first call waits until a later call of the map, or in a backward a later hook, has come."""

    def __init__(self, apply: MapFunction) -> None:
        self._is_open = threading.Event()
        if apply is one_after_another:
            self._is_open.set()

    def pass_first(self, x: Tensor) -> Tensor:
        assert self._is_open.wait(PATIENCE_S)
        return x * 1

    def open(self, x: Tensor) -> Tensor:
        self._is_open.set()
        return x * 2


class First(nn.Module):
    """Calls a module once it is let in."""

    def __init__(self, module: nn.Module, gate: Gate) -> None:
        super().__init__()
        self.module, self.gate = module, gate

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.module(self.gate.pass_first(x)))


def calls_of_one_module(norm: nn.Module, gate: Gate) -> list[Any]:
    """The module that comes first is another one, which has it as a part."""
    return [First(norm, gate), norm, nn.Sequential(nn.Tanh(), norm), norm]


def closures_over_it(norm: nn.Module, gate: Gate) -> list[Any]:
    held = {"norms": [norm]}
    return [lambda x: norm(gate.pass_first(x)), *[lambda x: held["norms"][0](x)] * 2, functools.partial(norm)]


def closures_of_forwards(norm: nn.Module, gate: Gate) -> list[Any]:
    class Uses(nn.Module):
        def forward(self, x: Tensor) -> Any:
            return norm(x)

    return [First(Uses(), gate), Uses(), norm, nn.Sequential(Uses())]


class NamesGlobal(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return global_norm(x)


global_norm: nn.Module


def globals_of_forwards(norm: nn.Module, gate: Gate) -> list[Any]:
    global global_norm
    global_norm = norm
    return [First(NamesGlobal(), gate), NamesGlobal(), norm, nn.Sequential(NamesGlobal())]


def one_lambda_in_all_places(norm: nn.Module, gate: Gate) -> list[Any]:
    is_first = iter([True])
    return [lambda x: norm(gate.pass_first(x) if next(is_first, False) else x)] * 4


def a_chain_of_two(norm: nn.Module, gate: Gate) -> list[Any]:
    """The third shares nothing with the first, but has to wait for the second, which does."""
    (other,) = seeded(lambda: nn.BatchNorm1d(4), 1)
    return [First(norm, gate), nn.Sequential(norm, other), other, nn.Sequential(other, norm)]


def a_spectral_norm(norm: nn.Module, gate: Gate) -> list[Any]:
    """Its weight depends on how often it was used before."""
    return calls_of_one_module(copy.deepcopy(SPECTRAL), gate)


def a_spectral_norm_of_the_older_kind(norm: nn.Module, gate: Gate) -> list[Any]:
    (module,) = seeded(lambda: nn.utils.spectral_norm(nn.Linear(4, 4)), 1)
    return calls_of_one_module(module, gate)


class Averages(nn.Module):
    """Statistics of one's own."""

    keeps_statistics = True

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - self.mean


class AveragesInSecret(Averages):
    keeps_statistics = None  # says nothing


def statistics_of_ones_own(norm: nn.Module, gate: Gate) -> list[Any]:
    return calls_of_one_module(Averages(), gate)


SHARED = [calls_of_one_module, closures_over_it, one_lambda_in_all_places, a_chain_of_two, a_spectral_norm]
SHARED += [a_spectral_norm_of_the_older_kind, statistics_of_ones_own]
SHARED += [closures_of_forwards, globals_of_forwards]


def buffers_of(calls: list[Any]) -> list[Tensor]:
    return [b.clone() for call in calls if isinstance(call, nn.Module) for b in call.buffers()]


@pytest.mark.parametrize("share", SHARED, ids=lambda share: share.__name__)
def test_statistics_that_calls_share_are_those_of_a_loop(
    share: Callable[[nn.Module, Gate], list[Any]],
) -> None:
    def program(apply: MapFunction) -> Any:
        (norm,), xs, gate = seeded(lambda: nn.BatchNorm1d(4), 1), leaves(5), Gate(apply)
        calls = share(norm, gate)
        outputs = apply([*calls, gate.open], [(x,) for x in xs])
        loss_of(outputs).backward()
        return outputs, buffers_of([norm, *calls]), [x.grad for x in [*xs, *norm.parameters()]]

    said = assert_same_program(
        program, native_apply=one_after_another, mapped_apply=parallel_apply, tolerance=ORDER
    )
    assert not isinstance(said, Raised)


def test_a_lazy_module_that_calls_share_is_made_by_the_first_of_them() -> None:
    def program(apply: MapFunction, gate: Gate) -> Any:
        torch.manual_seed(3)
        module, xs = nn.LazyLinear(4).double(), leaves()
        outputs = apply([First(module, gate), module, lambda x: module(x), gate.open], [(x,) for x in xs])
        loss_of(outputs).backward()
        return outputs, [*module.parameters()], [x.grad for x in [*xs, *module.parameters()]]

    in_order = functools.partial(parallel_apply, max_concurrency=1)
    assert_same(program(in_order, Gate(one_after_another)), program(parallel_apply, Gate(parallel_apply)))


def recomputed(calls: list[Any], inputs: list[Any]) -> list[Any]:
    return parallel_apply(calls, inputs, recompute=True)


def with_a_checkpoint_within(calls: list[Any], inputs: list[Any]) -> list[Any]:
    return parallel_apply(
        [functools.partial(checkpoint, call, use_reentrant=False) for call in calls], inputs
    )


def with_a_deferred_checkpoint_within(calls: list[Any], inputs: list[Any]) -> list[Any]:
    again = [functools.partial(checkpoint, call, use_reentrant=False) for call in calls]
    return parallel_apply(again, inputs, defer_weight_grads=True)


def with_a_recomputed_map_within(calls: list[Any], inputs: list[Any]) -> list[Any]:
    def within(call: Any) -> Any:
        return lambda *args: recomputed([call], [args])[0]

    return parallel_apply([within(call) for call in calls], inputs)


AGAIN = [
    recomputed,
    with_a_checkpoint_within,
    with_a_deferred_checkpoint_within,
    with_a_recomputed_map_within,
]


@pytest.mark.parametrize("apply", AGAIN, ids=lambda apply: apply.__name__)
def test_statistics_of_forwards_that_are_run_again_are_those_of_a_loop_that_runs_them_twice(
    apply: Callable[[list[Any], list[Any]], list[Any]],
) -> None:
    """In the backward the fourth call, whose turn is the first, comes last, unless the others wait for it."""
    (norm, plain), xs = seeded(lambda: nn.BatchNorm1d(4), 2), leaves(5)
    has_come, is_again = threading.Event(), threading.Event()

    def call(x: Tensor, is_fourth: bool) -> Tensor:
        if is_fourth and is_again.is_set():
            assert has_come.wait(PATIENCE_S)
        return cast(Tensor, norm(x * 1).sin())

    def last(x: Tensor) -> Tensor:
        y = x * 1
        y.register_hook(lambda grad: has_come.set())
        return y

    calls = [call] * 4 + [last]
    inputs = [*[(x, i == 3) for i, x in enumerate(xs[:4])], (xs[4],)]
    outputs = apply(calls, inputs)
    is_again.set()
    loss_of(outputs).backward()
    for x in [*xs[:4], *reversed(xs[:4])]:
        plain(x)
    assert_same(list(plain.buffers()), list(norm.buffers()), tolerance=ORDER)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
@pytest.mark.parametrize("makes_graph", [False, True])
@pytest.mark.parametrize("max_concurrency", [1, 2, None])
def test_forwards_that_are_run_again_take_turns_under_any_bound(
    max_concurrency: int | None, makes_graph: bool
) -> None:
    def program(apply: MapFunction) -> Any:
        (norm,), xs = seeded(lambda: nn.BatchNorm1d(4), 1), leaves(5)
        modules = [norm] * 5
        if apply is one_after_another:
            again = functools.partial(checkpoint, use_reentrant=False)
            outputs = apply([functools.partial(again, one) for one in modules], xs)
        else:
            outputs = apply(modules, xs, recompute=True, max_concurrency=max_concurrency)
        loss_of(outputs).backward(create_graph=makes_graph)
        return list(norm.buffers()), [x.grad for x in xs], norm.weight.grad

    assert_same_program(program, native_apply=one_after_another, mapped_apply=parallel_apply, tolerance=ORDER)


def test_a_backward_through_some_of_the_calls_that_run_again_waits_for_no_other() -> None:
    (norm,), xs = seeded(lambda: nn.BatchNorm1d(4), 1), leaves()
    outputs = parallel_apply([norm] * 4, [(x,) for x in xs], recompute=True)
    loss_of([outputs[1], outputs[3]]).backward(retain_graph=True)
    loss_of(outputs).backward(inputs=[xs[2]])
    assert [x.grad is not None for x in xs] == [False, True, True, True]


def test_a_buffer_that_calls_have_changed_side_by_side_is_reported() -> None:
    def changes_in_place(x: Tensor) -> Tensor:
        cast(Tensor, module.mean).add_(1)
        return x * 2

    for make in (lambda module: [module] * 2, lambda module: [changes_in_place, nn.Sequential(module)]):
        module = AveragesInSecret()
        calls = make(module)
        with pytest.raises(RuntimeError, match=r"share a AveragesInSecret .* 'mean' changed .*call 0"):
            parallel_apply(calls, [(x,) for x in leaves(2)])


def test_a_call_that_fails_beside_such_a_change_is_told_of_it() -> None:
    """What failed may have failed because of it: a hook, for one, whose input another call changed meanwhile."""
    module, is_changed = AveragesInSecret(), threading.Event()

    def changes(x: Tensor) -> Tensor:
        try:
            return cast(Tensor, module(x))
        finally:
            is_changed.set()

    def fails(x: Tensor) -> Tensor:
        assert is_changed.wait(PATIENCE_S)
        raise ValueError(f"expected a mean of 0, got {module.mean}")

    with pytest.raises(
        ValueError, match=r"(?s)expected a mean of 0.*share a AveragesInSecret .* 'mean' changed"
    ):
        parallel_apply([changes, fails], [(x,) for x in leaves(2)])


def test_calls_of_one_at_a_time_may_change_any_buffer() -> None:
    def program(apply: MapFunction) -> Any:
        module = AveragesInSecret()
        return apply([module] * 4, [(x,) for x in leaves()]), module.mean

    one_at_a_time = functools.partial(parallel_apply, max_concurrency=1)
    assert_same(attempt(program, one_after_another), attempt(program, one_at_a_time))


def test_calls_that_share_a_module_whose_buffers_stay_as_they_are_can_wait_for_each_other() -> None:
    class Adds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("constant", torch.ones(4))
            self.norm = nn.BatchNorm1d(4).eval()
            self.barrier = threading.Barrier(8)

        def forward(self, x: Tensor) -> Any:
            self.barrier.wait(PATIENCE_S)
            return self.norm(x) + self.constant

    module = Adds()
    assert len(parallel_apply([module] * 8, [(torch.ones(2, 4),)] * 8)) == 8


def test_who_waits_long_for_a_turn_says_for_whom(monkeypatch: pytest.MonkeyPatch) -> None:
    norm, heard, said = nn.BatchNorm1d(4), threading.Event(), []

    def hear(text: str, **_: Any) -> None:
        said.append(text)
        heard.set()

    def wait_to_be_warned_of(x: Tensor) -> Any:
        assert heard.wait(PATIENCE_S)
        return norm(x)

    monkeypatch.setattr(turns, "WARN_AFTER_S", 0.001)
    monkeypatch.setattr(turns.warnings, "warn", hear)
    parallel_apply([wait_to_be_warned_of, norm], [(torch.randn(3, 4),)] * 2)
    assert "expected call 0 (" in said[0]
    assert "call 1 (BatchNorm1d) waits for it" in said[0]


def test_a_call_that_fails_keeps_nobody_waiting() -> None:
    module = nn.BatchNorm1d(4)
    with pytest.raises(ValueError, match="expected 2D or 3D input") as caught:
        parallel_apply([module] * 8, [(torch.ones(4),), *[(torch.randn(5, 4),)] * 7])
    assert any("call 0" in note for note in caught.value.__notes__)
