"""What is read of a module's forward: whether it only computes. Whoever waits is never taken for one that does."""

from __future__ import annotations

import builtins
import gc
import itertools
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_autograd import parallel_apply
from moe_autograd.autograd import in_turn
from moe_autograd.autograd.known_arithmetic import FUNCTIONS, METHODS
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


def test_what_super_does_is_not_known() -> None:
    class Inherits(Expert):
        def forward(self, x: Tensor) -> Any:
            return super().forward(x)

    assert not only_computes(Inherits())


@pytest.mark.parametrize("name", ["__call__", "__getattr__", "__getattribute__", "_call_impl"])
def test_a_class_that_is_called_or_asked_in_another_way_is_not_known(name: str) -> None:
    same = getattr(nn.Module, name)
    kind: Any = type("Own", (Expert,), {"forward": swiglu, name: lambda self, *args: same(self, *args)})
    assert not only_computes(kind())


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
        from moe_autograd.autograd.arithmetic import reading_of
        from moe_autograd.autograd.known_arithmetic import FUNCTIONS

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


def test_a_class_may_say_by_itself_that_it_does_more() -> None:
    module: Any = type("Own", (Expert,), {"forward": swiglu, "only_computes": lambda self: False})()
    assert in_turn.call_in_turn([module], [(torch.randn(3, 4),)], [{}]) is None


def test_methods_that_call_each_other_again_and_again_are_more_than_anybody_counts() -> None:
    source = "".join(
        [f"def m{i}(self, x):\n  return self.m{i + 1}(self.m{i + 1}(x))\n" for i in range(30)]
        + ["def m30(self, x):\n  return x.sin()\n"]
    )
    methods: dict[str, Any] = {}
    exec(source, methods)
    few = {"forward": methods["m27"], **methods}
    assert only_computes(type("Few", (nn.Module,), few)())
    assert not only_computes(type("Many", (nn.Module,), {"forward": methods["m0"], **methods})())


def test_a_part_that_may_wait_counts() -> None:
    module = expert_with(swiglu)
    module.w3 = expert_with(waits)  # type: ignore[assignment]
    assert in_turn.call_in_turn([module], [(torch.randn(3, 4),)], [{}]) is None


@pytest.mark.parametrize("module", [expert_with(swiglu), nn.Linear(4, 4)], ids=["own", "torch's"])
def test_what_stands_for_the_call_of_one_module_may_do_more(module: Any) -> None:
    assert in_turn.call_in_turn([module], [(torch.randn(3, 4),)], [{}]) is not None
    module._call_impl = wait
    assert in_turn.call_in_turn([module], [(torch.randn(3, 4),)], [{}]) is None


def test_calls_meet_that_were_changed_to_wait_for_each_other() -> None:
    """As the one before was called in turn, so would these be, and wait for ever."""
    kind: Any = type("Own", (Expert,), {"forward": swiglu})
    modules = [kind() for _ in range(3)]
    xs = [torch.randn(3, 4) for _ in modules]
    parallel_apply(modules, xs)
    barrier = threading.Barrier(3)

    def meets(self: Any, x: Tensor) -> Any:
        barrier.wait(PATIENCE_S)
        return swiglu(self, x)

    kind.forward = meets
    expected = [swiglu(module, x) for module, x in zip(modules, xs, strict=True)]
    assert all(map(torch.equal, parallel_apply(modules, xs), expected))


def test_no_known_function_but_dropout_and_attention_draws_random_numbers() -> None:
    names = METHODS | {function.__name__ for function in FUNCTIONS}
    packets = [getattr(torch.ops.aten, name) for name in names if hasattr(torch.ops.aten, name)]
    overloads = [getattr(packet, name) for packet in packets for name in packet.overloads()]
    assert len(packets) > 50
    assert not [one for one in overloads if torch.Tag.nondeterministic_seeded in one.tags]


def drops_by_a_part(self: Any, x: Tensor) -> Tensor:
    return self.w2(self.dropout(F.relu(self.w1(x))))


def drops_by_a_function(self: Any, x: Tensor) -> Tensor:
    return self.w2(F.dropout(F.relu(self.w1(x)), 0.5, self.training))


def activated(x: Tensor, p: float, training: bool) -> Tensor:
    return F.dropout(F.relu(x), p, training)


def drops_by_a_function_of_its_file(self: Any, x: Tensor) -> Tensor:
    return self.w2(activated(self.w1(x), 0.5, self.training))


def attends_and_drops(self: Any, x: Tensor) -> Tensor:
    causal = torch.ones_like(x @ x.mT, dtype=torch.bool).tril()
    p = 0.5 if self.training else 0.0
    return self.w2(self.w1(F.scaled_dot_product_attention(x, x, x, causal, dropout_p=p)))


def without_a_part_that_drops(forward: Any) -> nn.Module:
    module = expert_with(forward)
    del module.dropout
    return module


@pytest.mark.parametrize(
    "make",
    [
        lambda: expert_with(drops_by_a_part),
        lambda: without_a_part_that_drops(drops_by_a_function),
        lambda: without_a_part_that_drops(drops_by_a_function_of_its_file),
        lambda: without_a_part_that_drops(attends_and_drops),
        lambda: nn.Sequential(*map(without_a_part_that_drops, [drops_by_a_function, swiglu])),
    ],
)
def test_dropout_in_turn_is_that_on_threads(make: Callable[[], nn.Module]) -> None:
    """And the caller's stream goes on as if the map had drawn once; in evaluation as if it had not."""
    modules = [*[make() for _ in range(3)], nn.Linear(4, 4)]  # of which the last draws nothing
    xs = [torch.randn(3, 4, requires_grad=True) for _ in modules]

    def draw(called: Any) -> list[Tensor]:
        torch.manual_seed(1)
        ys = parallel_apply(called, xs)
        assert (type(ys[0].grad_fn).__name__ == "AddmmBackward0") == (
            called is modules
        )  # in the caller's graph
        return [*ys, *torch.autograd.grad([y.sum() for y in ys], xs), torch.rand(2)]

    in_turn, on_threads = draw(modules), draw([module.__call__ for module in modules])
    assert all(map(torch.equal, in_turn, on_threads))
    for module in modules:
        module.eval()
    silent = draw(modules)
    assert not torch.equal(silent[0], in_turn[0])
    torch.manual_seed(1)
    assert torch.equal(silent[-1], torch.rand(2))


def test_a_servers_loop_draws_for_nobody() -> None:
    module, x = expert_with(drops_by_a_part), torch.randn(3, 4)
    assert not in_turn.is_small(module, [x])
    assert in_turn.is_small(module.eval(), [x])


def test_a_module_that_was_never_made_raises_as_by_itself() -> None:
    class Unmade(nn.Module):
        def __init__(self) -> None:
            pass

        def forward(self, x: Tensor) -> Tensor:
            return x.sin()

    x = torch.randn(3, 4)
    for module in Unmade(), nn.Tanh.__new__(nn.Tanh):
        for call in (lambda m=module: m(x), lambda m=module: parallel_apply([m, m], [x, x])):
            with pytest.raises(AttributeError, match=r"'\w+' object has no attribute"):
                call()


def test_a_class_that_was_read_can_go_with_its_file() -> None:
    source = """
def doubled(x):
    return x * 2

class Own(nn.Module):
    def forward(self, x):
        return torch.sin(doubled(x))
"""
    file: dict[str, Any] = {"__name__": "generated", "nn": nn, "torch": torch}
    exec(source, file)
    assert only_computes(file["Own"]())
    left = weakref.ref(file["Own"])
    del file
    gc.collect()
    assert left() is None


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_scripted_modules_are_called_as_ever() -> None:
    modules = [torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.Tanh())) for _ in range(2)]
    xs = [torch.randn(3, 4) for _ in modules]
    expected = [module(x) for module, x in zip(modules, xs, strict=True)]
    assert all(map(torch.equal, parallel_apply(modules, xs), expected))
