"""What is changed after a forward was read, or was replaced before, is seen: the class is read anew."""

from __future__ import annotations

import builtins
import itertools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_autograd.autograd import in_turn
from tests.support.readable import (
    Expert,
    expert_with,
    imported_by_name,
    only_computes,
    rms_norm,
    swiglu,
    wait,
    waits,
)
from tests.support.subprocesses import run_ranks

PATIENCE_S = 60.0


def names_much(self: Any, x: Tensor) -> Tensor:
    for layer in self.layers:
        x = layer(x)
    return self.w2(self.activation(self.activate(self.w1(x)))) + self.shift


@pytest.mark.parametrize(
    "change",
    [
        lambda module: setattr(module, "activation", wait),
        lambda module: setattr(module, "activation", [1]),
        lambda module: setattr(module, "activation", F.dropout),  # is only known to draw where it is named
        lambda module: module.__dict__.update(w1=wait),
        lambda module: delattr(module, "w1"),
        lambda module: module.__dict__.update(shift=module.barrier),
        lambda module: setattr(
            module, "shift", torch.nn.parameter.Buffer(torch.ones(4).as_subclass(Special))
        ),
        lambda module: setattr(type(module), "forward", waits),
        lambda module: setattr(type(module).forward, "__code__", waits.__code__),  # as IPython's autoreload
        lambda module: setattr(type(module), "w1", property(lambda self: wait)),
        lambda module: setattr(type(module), "__call__", waits),
        lambda module: setattr(type(module), "__getattr__", lambda self, name: wait),
        lambda module: setattr(type(module), "activate", wait),
        lambda module: setattr(type(module).activate, "__code__", waits.__code__),
        lambda module: setattr(type(module).activate, "__defaults__", (wait,)),
        lambda module: setattr(module, "activate", wait),
        lambda module: setattr(module, "layers", nn.ModuleDict()),
        lambda module: module.__dict__.update(layers=[module.wait]),
        lambda module: setattr(type(module), "layers", [module.wait]),
    ],
)
def test_what_is_changed_later_is_seen(change: Callable[[Any], object]) -> None:
    module: Any = expert_with(types.FunctionType(names_much.__code__, globals()))
    type(module).activate = types.FunctionType(Expert.activate.__code__, Expert.activate.__globals__)
    assert only_computes(module)
    change(module)
    assert not only_computes(module)
    assert in_turn.call_in_turn([module], [(torch.randn(3, 4),)], [{}]) is None


def looks_at_parts(self: Any, x: Tensor) -> Tensor:
    for i in range(len(self.layers)):
        x = self.layers[i](x) * self.scale_of_all
    for _ in range(self.count):
        x = self.turned(x)
    return F.linear(x, self.w1.weight) * len(self.norms) * self.w1.in_features


@pytest.mark.parametrize(
    "change",
    [
        lambda patch, module: patch.setattr(builtins, "len", lambda x: x.__len__()),
        lambda patch, module: patch.setattr(builtins, "range", lambda *numbers, same=range: same(*numbers)),
        lambda patch, module: patch.setattr(nn.ModuleList, "__len__", lambda self: 0),
        lambda patch, module: patch.setattr(nn.Sequential, "__getitem__", lambda self, i: module.wait),
        lambda patch, module: patch.setattr(type(module), "turned", wait),  # which takes the module now
        lambda patch, module: patch.setattr(type(module), "turned", staticmethod(wait)),
        lambda patch, module: patch.setattr(type(module), "scale_of_all", property(lambda self: wait)),
        lambda patch, module: patch.delattr(Expert, "scale_of_all"),
        lambda patch, module: patch.setattr(module, "scale_of_all", [2.0]),
        lambda patch, module: patch.setattr(module, "count", torch.tensor(2)),
        lambda patch, module: patch.setattr(
            type(module), "count", property(lambda self: wait), raising=False
        ),
        lambda patch, module: patch.setattr(module, "norms", nn.ModuleDict()),
        lambda patch, module: patch.setattr(type(module), "norms", [wait], raising=False),
        lambda patch, module: patch.setattr(module.w1, "in_features", [4]),
        lambda patch, module: patch.setattr(nn.Linear, "weight", wait, raising=False),
        lambda patch, module: patch.delattr(module.w1, "weight"),
        lambda patch, module: patch.setattr(type(module), "w1", nn.Identity(), raising=False),
    ],
)
def test_what_is_changed_later_of_numbers_lists_and_parts_is_seen(
    change: Callable[[pytest.MonkeyPatch, Any], None],
) -> None:
    module = expert_with(looks_at_parts)
    assert only_computes(module)
    with pytest.MonkeyPatch.context() as patch:
        change(patch, module)
        are_known = only_computes(module)
    assert not are_known


def test_a_static_method_may_become_one_that_takes_the_module() -> None:
    module = expert_with(looks_at_parts)
    assert only_computes(module)
    type(module).turned = vars(Expert)["turned"].__func__
    assert not only_computes(module)


class Special(Tensor):
    """A tensor whose operators may do anything."""


def test_a_global_that_is_changed_later_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    module, other = expert_with(swiglu), expert_with(imported_by_name)
    assert only_computes(module)
    assert only_computes(other)
    monkeypatch.setitem(swiglu.__globals__, "F", Expert())
    monkeypatch.setitem(swiglu.__globals__, "silu", wait)
    assert not only_computes(module)
    assert not only_computes(other)


def doubled(x: Tensor, factor: float = 2.0) -> Tensor:
    return x * factor


def doubles(self: Any, x: Tensor) -> Tensor:
    return doubled(self.w2(self.w1(x)))


@pytest.mark.parametrize(
    "change",
    [
        lambda patch: patch.setitem(globals(), "doubled", wait),
        lambda patch: patch.setitem(globals(), "doubled", None),
        lambda patch: patch.delitem(globals(), "doubled"),
        lambda patch: patch.setattr(doubled, "__code__", wait.__code__),
        lambda patch: patch.setattr(doubled, "__defaults__", (wait,)),
    ],
)
def test_a_function_that_is_changed_later_is_seen(
    change: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = expert_with(doubles)
    assert only_computes(module)
    change(monkeypatch)
    assert not only_computes(module)


def test_what_is_put_in_the_place_of_torchs_functions_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    module, other = expert_with(swiglu), expert_with(rms_norm)
    assert only_computes(module)
    assert only_computes(other)
    monkeypatch.setattr(F, "silu", wait)
    monkeypatch.setattr(Tensor, "mean", wait)
    assert not only_computes(module)
    assert not only_computes(other)
    assert not only_computes(expert_with(rms_norm))  # read only now


class Anything:
    """May be called, and may do anything then."""

    def __call__(self, *_: Any) -> Any:
        return None


def unpacks(self: Any, x: Tensor) -> Tensor:
    first, second = x
    return first * second


@pytest.mark.parametrize("replacement", [wait, Anything()], ids=["function", "object"])
@pytest.mark.parametrize(
    ("name", "forward"),
    [
        ("__add__", lambda self, x: x + x),
        ("__rsub__", lambda self, x: 1 - x),
        ("__matmul__", lambda self, x: x @ x.mT),
        ("__getitem__", lambda self, x: x[..., None]),
        ("__neg__", lambda self, x: -x),
        ("__gt__", lambda self, x: (x > 0).sum()),
        ("__le__", lambda self, x: (x >= 0).sum()),
        ("__eq__", lambda self, x: (x == 0).sum()),
        ("__bool__", lambda self, x: x if x.sum() else x.sin()),
        ("__bool__", lambda self, x: not x.sum()),
        ("__iter__", unpacks),
        ("mean", lambda self, x: x.mean()),
    ],
)
def test_what_is_put_in_the_place_of_torchs_operators_is_seen(
    name: str, forward: Any, replacement: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = expert_with(forward)
    assert only_computes(module)
    monkeypatch.setattr(Tensor, name, replacement)
    assert not only_computes(module)
    assert not only_computes(expert_with(forward))


def test_so_is_what_stood_there_before_our_import() -> None:
    run_ranks(
        """
        import torch
        import torch.nn.functional as F

        def wait(x):
            return x

        F.silu = wait
        from moe_autograd.autograd.reading.arithmetic import reading_of
        from moe_autograd.autograd.reading.known_arithmetic import FUNCTIONS

        class Expert(torch.nn.Module):
            def forward(self, x):
                return F.silu(x)

        assert F.silu not in FUNCTIONS
        assert F.mish in FUNCTIONS
        assert reading_of(Expert) is None
        """,
        num_ranks=1,
    )


def test_how_modules_look_up_their_parts_may_have_been_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    module, same = expert_with(swiglu), nn.Module.__getattr__
    assert only_computes(module)
    monkeypatch.setattr(nn.Module, "__getattr__", lambda self, name: same(self, name))
    assert not only_computes(module)


def test_a_file_may_have_builtins_of_its_own() -> None:
    source = """
def forward(self, x):
    for i, layer in enumerate(self.layers):
        x = layer(x)
    return x
"""
    ordinary: dict[str, Any] = {}
    special: dict[str, Any] = {"__builtins__": {**vars(builtins), "enumerate": wait}}
    exec(source, ordinary)
    exec(source, special)
    assert only_computes(expert_with(ordinary["forward"]))
    assert not only_computes(expert_with(special["forward"]))


def counts(self: Any, x: Tensor) -> Tensor:
    for i, layer in enumerate(self.layers):
        x = layer(x) + i
    return x


def test_what_is_put_in_the_place_of_pythons_functions_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    module = expert_with(counts)
    assert only_computes(module)
    with monkeypatch.context() as patch:
        patch.setattr(builtins, "enumerate", lambda *args: zip(itertools.count(), *args, strict=False))
        are_known = only_computes(module), only_computes(expert_with(counts))
    assert are_known == (False, False)
