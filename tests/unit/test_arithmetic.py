"""What is read of a module's forward: whether it only computes. Whoever waits is never taken for one that does."""

from __future__ import annotations

import collections
import functools
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_autograd import parallel_apply
from moe_autograd.autograd import in_turn
from moe_autograd.autograd.reading.known_arithmetic import FUNCTIONS, METHODS
from tests.support.readable import (
    Expert,
    expert_with,
    only_computes,
    swiglu,
    wait,
    waits,
)

PATIENCE_S = 60.0


@pytest.mark.parametrize("name", ["__call__", "__getattr__", "__getattribute__", "_call_impl"])
def test_a_class_that_is_called_or_asked_in_another_way_is_not_known(name: str) -> None:
    same = getattr(nn.Module, name)
    kind: Any = type("Own", (Expert,), {"forward": swiglu, name: lambda self, *args: same(self, *args)})
    assert not only_computes(kind())


def test_a_class_may_say_by_itself_that_it_does_more() -> None:
    module: Any = type("Own", (Expert,), {"forward": swiglu, "only_computes": lambda self: False})()
    assert in_turn.call_in_turn([module], [(torch.randn(3, 4),)], [{}]) is None


class Name(str):
    """A name that is another one's in no set of names."""

    __hash__ = object.__hash__


def activates(self: Any, x: Tensor) -> Any:
    return self.activation(self.w1(x))


@pytest.mark.parametrize(
    ("activation", "is_known"),
    [
        (functools.partial(F.gelu, approximate="tanh"), True),  # as in `transformers`
        (functools.partial(F.elu, alpha=2.0), True),
        (functools.partial(F.elu, inplace=True), False),
        (functools.partial(F.celu, alpha=2.0, inplace=True), False),
        (functools.partial(F.linear, weight=torch.zeros(8, 8)), False),
        (functools.partial(wait), False),
        (functools.partial(functools.partial(wait)), False),
        (functools.partial(torch.add, torch.ones(8)), False),
        (functools.partial(F.elu, **{Name("inplace"): True}), False),
        (functools.partial(torch.transpose, dim0=0, dim1=1), False),  # how much work follows, nobody knows
    ],
)
def test_a_function_may_be_given_numbers_beforehand(activation: Any, is_known: bool) -> None:
    module = expert_with(activates)
    module.activation = activation
    assert only_computes(module) is is_known
    x = torch.randn(3, 4)
    assert torch.equal(parallel_apply([module], [x])[0], activates(module, x))


GELU = functools.partial(F.gelu, approximate="tanh")


def activates_by_a_global(self: Any, x: Tensor) -> Any:
    return GELU(x)


def test_a_global_that_holds_a_function_may_hold_another_later() -> None:
    assert not only_computes(expert_with(activates_by_a_global))


@pytest.mark.parametrize("says_so", [True, 1, property(lambda self: True), classmethod(lambda cls: True)])
def test_only_what_is_a_method_is_asked_whether_it_only_computes(says_so: Any) -> None:
    module: Any = type("Own", (Expert,), {"forward": swiglu, "only_computes": says_so})()
    x = torch.randn(3, 4)
    assert in_turn.call_in_turn([module], [(x,)], [{}]) is None
    assert torch.equal(parallel_apply([module], [x])[0], module(x))


def test_buffers_that_are_not_made_yet_or_of_other_classes_get_a_thread() -> None:
    for buffer in (torch.nn.parameter.UninitializedBuffer(), torch.ones(4).as_subclass(Special)):
        module, x = expert_with(swiglu), torch.randn(3, 4)
        module.register_buffer("of_nobody", buffer)
        assert in_turn.call_in_turn([module], [(x,)], [{}]) is None
        assert torch.equal(parallel_apply([module], [x])[0], module(x))


class Special(Tensor):
    """A tensor whose operators may do anything."""


class Fetching(dict[str, Any]):
    """May fetch what it is asked for."""


@pytest.mark.parametrize("name", ["_parameters", "_modules"])
def test_parts_that_may_be_fetched_get_a_thread(name: str) -> None:
    module = nn.Sequential(nn.Linear(4, 4))
    holder: nn.Module = module if name == "_modules" else module[0]
    holder.__dict__[name] = collections.OrderedDict(holder.__dict__[name])
    assert in_turn.call_in_turn([module], [(torch.randn(3, 4),)], [{}]) is not None
    holder.__dict__[name] = Fetching(holder.__dict__[name])
    assert in_turn.call_in_turn([module], [(torch.randn(3, 4),)], [{}]) is None


@pytest.mark.parametrize("name", ["_call_impl", "_compiled_call_impl", "__call__"])
@pytest.mark.parametrize("kind", [nn.Linear, nn.Sequential, nn.Module])
def test_a_class_of_torchs_may_be_called_in_another_way(
    kind: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    same = kind.__call__
    modules, x = [nn.Sequential(nn.Linear(4, 4))], torch.randn(3, 4)
    called: list[Any] = []

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        called.append(self)
        return same(self, *args, **kwargs) if name == "__call__" else self.forward(*args, **kwargs)

    expected = modules[0](x)
    monkeypatch.setattr(kind, name, call)
    assert torch.equal(parallel_apply(modules, [x])[0], expected)
    assert called


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


def drops_columns_by_a_function(self: Any, x: Tensor) -> Tensor:
    x = F.dropout1d(self.w1(x).unsqueeze(-1), 0.5, self.training).squeeze(-1)
    return self.w2(F.alpha_dropout(x, 0.5, self.training))


def linear() -> nn.Module:
    return nn.Linear(4, 4)


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
        lambda: without_a_part_that_drops(drops_columns_by_a_function),
        lambda: nn.Sequential(nn.Linear(4, 4), nn.AlphaDropout(), nn.FeatureAlphaDropout(), nn.Linear(4, 4)),
        lambda: nn.Sequential(
            nn.Linear(4, 4), nn.Unflatten(1, (4, 1)), nn.Dropout1d(), nn.Flatten(), linear()
        ),
        lambda: nn.Sequential(
            nn.Linear(4, 4), nn.Unflatten(1, (4, 1, 1)), nn.Dropout2d(), nn.Flatten(), linear()
        ),
        lambda: nn.Sequential(
            nn.Linear(4, 4), nn.Unflatten(1, (4, 1, 1, 1)), nn.Dropout3d(), nn.Flatten(), linear()
        ),
    ],
)
def test_dropout_in_turn_is_that_on_threads(make: Callable[[], nn.Module]) -> None:
    """And the caller's stream goes on as if the map had drawn once; in evaluation as if it had not."""
    modules = [*[make() for _ in range(3)], nn.Linear(4, 4)]  # of which the last draws nothing
    xs = [torch.randn(3, 4, requires_grad=True) for _ in modules]

    def draw(called: Any) -> list[Tensor]:
        torch.manual_seed(1)
        ys = parallel_apply(called, xs)
        # That is in the caller's graph.
        assert (type(ys[0].grad_fn).__name__ == "AddmmBackward0") == (called is modules)
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


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is")  # deprecated; from Python 3.14 on not supported
def test_scripted_modules_are_called_as_ever() -> None:
    modules = [torch.jit.script(nn.Sequential(nn.Linear(4, 4), nn.Tanh())) for _ in range(2)]
    xs = [torch.randn(3, 4) for _ in modules]
    expected = [module(x) for module, x in zip(modules, xs, strict=True)]
    assert all(map(torch.equal, parallel_apply(modules, xs), expected))
