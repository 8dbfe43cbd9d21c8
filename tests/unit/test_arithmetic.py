"""What is read of a module's forward: whether it only computes. Whoever waits is never taken for one that does."""

from __future__ import annotations

import functools
import gc
import math
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import silu

from moe_autograd import parallel_apply
from moe_autograd.autograd import in_turn
from moe_autograd.autograd.arithmetic import reading_of
from moe_autograd.autograd.known_arithmetic import FUNCTIONS, METHODS
from tests.support.subprocesses import run_ranks

PATIENCE_S = 60.0


def only_computes(module: object) -> bool:
    """Whether it is read as a module whose forward only computes, if its parts do not either."""
    reading = reading_of(type(module))
    return reading is not None and isinstance(module, nn.Module) and reading.fits(module)


class Expert(nn.Module):
    """Has what the forwards below name."""

    scale_of_all = 2.0

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = nn.Linear(4, 8), nn.Linear(8, 4), nn.Linear(4, 8)
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.bias = None
        self.eps, self.count = 1e-6, 2
        self.register_buffer("shift", torch.randn(4))
        self.activation = F.silu
        self.barrier = threading.Barrier(1)

    @property
    def of_class(self) -> Tensor:
        return self.weight

    def helper(self, x: Tensor) -> Tensor:
        return x


def swiglu(self: Any, x: Tensor) -> Tensor:
    return self.w2(F.silu(self.w1(x)) * self.w3(x))


def residual(self: Any, x: Tensor) -> Tensor:
    return x + self.w2(torch.nn.functional.gelu(self.w1(x)))


def rms_norm(self: Any, x: Tensor) -> Tensor:
    dtype = x.dtype
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
    return self.weight[0] * y.to(dtype)


def gated(self: Any, x: Tensor) -> Tensor:
    gate, up = self.w1(x).chunk(2, dim=-1)
    return self.activation(gate) * up / math.sqrt(x.shape[-1]) - self.shift


def with_a_branch(self: Any, x: Tensor) -> Tensor:
    y = F.linear(x, self.weight)
    if self.bias is not None:
        y = y + self.bias
    return y if self.count > 1 else -y


def imported_by_name(self: Any, x: Tensor) -> Tensor:
    return silu(x @ self.weight.T)


def two_results(self: Any, x: Tensor) -> Any:
    return x.sin(), (x[..., :2], torch.cat([x, x]).reshape(-1))


def with_arguments(self: Any, x: Tensor) -> Tensor:
    y = F.elu(F.leaky_relu(self.w1(x.add(x, alpha=2)), 0.1), alpha=math.sqrt(2.0))
    return F.normalize(self.activation(silu(y)), 2.0, dim=-1, eps=self.eps)


ARITHMETIC = [
    *(swiglu, residual, rms_norm, gated, with_a_branch, imported_by_name, two_results),
    with_arguments,
]


def expert_with(forward: Callable[..., Any]) -> Expert:
    """Return an instance of a class of its own with this forward."""
    return type("Own", (Expert,), {"forward": forward})()


@pytest.mark.parametrize("forward", ARITHMETIC)
def test_a_forward_that_only_computes_is_called_in_turn_and_means_the_loop(forward: Any) -> None:
    kind = type("Own", (Expert,), {"forward": forward})
    modules = [kind() for _ in range(3)]
    xs = [torch.randn(3, 4, requires_grad=True) for _ in modules]
    assert all(map(only_computes, modules))
    assert in_turn.call_in_turn(modules, [(x,) for x in xs], [{}] * 3) is not None
    mapped = parallel_apply(modules, [(x,) for x in xs])
    for one, module, x in zip(mapped, modules, xs, strict=True):
        flat, same = torch.utils._pytree.tree_leaves(one), torch.utils._pytree.tree_leaves(module(x))
        assert all(map(torch.equal, flat, same))
        assert type(flat[0].grad_fn) is type(same[0].grad_fn)  # no node of ours


def wait(x: Tensor) -> Tensor:
    return x


UNKNOWN = [wait]


def waits(self: Any, x: Tensor) -> Tensor:
    self.barrier.wait()
    return x


def calls_what_waits(self: Any, x: Tensor) -> Tensor:
    return wait(x)


def calls_what_is_in_a_list(self: Any, x: Tensor) -> Tensor:
    return UNKNOWN[0](x)


def calls_its_argument(self: Any, x: Any) -> Any:
    return x.wait()


def calls_a_method_of_its_own(self: Any, x: Tensor) -> Tensor:
    return self.helper(x)


def takes_a_property(self: Any, x: Tensor) -> Tensor:
    return x @ self.of_class


def takes_what_the_class_has(self: Any, x: Tensor) -> Tensor:
    return x * self.scale_of_all


def takes_a_part(self: Any, x: Tensor) -> Tensor:
    part = self.w1
    return part.split(x)


def asks_a_part(self: Any, x: Tensor) -> Tensor:
    return self.w1.split(x)


def takes_a_function(self: Any, x: Tensor) -> Tensor:
    activation = self.activation
    return activation(x)


def has_another_name(self: Any, x: Tensor) -> Tensor:
    other = self
    return other.split(x)


def may_be_itself(self: Any, x: Tensor) -> Tensor:
    return (self if self.count else x).split(x) + x * 2  # else 3.12 has the look-up twice, and reads both


def may_be_torch(self: Any, x: Tensor) -> Tensor:
    return (self.weight if self.count else torch).relu(x) + x * 2


def gives_itself(self: Any, x: Tensor) -> Tensor:
    return torch.add(x, self)


def loops(self: Any, x: Tensor) -> Tensor:
    for _ in range(3):
        x = x.sin()
    return x


def loops_until(self: Any, x: Tensor) -> Tensor:
    while x.sum() > 0:
        x = x - 1
    return x


def comprehends(self: Any, x: Tensor) -> Any:
    return [one.sin() for one in x]


def has_a_function(self: Any, x: Tensor) -> Tensor:
    return (lambda y: y)(x)


def changes_in_place(self: Any, x: Tensor) -> Tensor:
    x += 1
    return x


def changes_by_a_method(self: Any, x: Tensor) -> Tensor:
    return x.add_(1)


def changes_by_an_argument(self: Any, x: Tensor) -> Tensor:
    return F.relu(x, inplace=True)


def changes_by_an_argument_without_a_name(self: Any, x: Tensor) -> Tensor:
    return F.silu(x, True)


def changes_what_comes_of_more(self: Any, x: Tensor) -> Tensor:
    return F.elu(self.w1(x.add(x, alpha=2)), 1.0, self.count)  # type: ignore[arg-type]


def changes_by_a_function_it_is_given(self: Any, x: Tensor) -> Any:
    return self.activation(self.activation(x), True)


def changes_by_a_variable(self: Any, x: Tensor) -> Any:
    activation = F.relu
    return activation(x, True)


def changes_by_one_of_two(self: Any, x: Tensor) -> Any:
    return (F.relu if self.count else F.silu)(x, True)


def changes_itself(self: Any, x: Tensor) -> Tensor:
    return F.normalize(x, 2.0, 1, 1e-12, self.shift)


def changes_an_element(self: Any, x: Tensor) -> Tensor:
    x[0] = 1
    return x


def sets_an_attribute(self: Any, x: Tensor) -> Tensor:
    self.seen = x
    return x


def draws(self: Any, x: Tensor) -> Tensor:
    return F.dropout(x)


def draws_too(self: Any, x: Tensor) -> Tensor:
    return x + torch.randn(4)


def imports(self: Any, x: Tensor) -> Tensor:
    import time

    time.sleep(0)
    return x


def catches(self: Any, x: Tensor) -> Tensor:
    try:
        return x.sin()
    except RuntimeError:
        return x


def enters(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        return x.sin()


def takes_more(self: Any, x: Tensor, y: Any = None) -> Tensor:
    return x


def takes_any(self: Any, *xs: Tensor) -> Tensor:
    return xs[0]


def generates(self: Any, x: Tensor) -> Any:
    yield x


async def is_awaited(self: Any, x: Tensor) -> Tensor:
    return x


@functools.wraps(swiglu)
def is_wrapped(self: Any, x: Tensor) -> Any:
    return swiglu(self, x)


MORE = [
    *(waits, calls_what_waits, calls_what_is_in_a_list, calls_its_argument, calls_a_method_of_its_own),
    *(
        takes_a_property,
        takes_what_the_class_has,
        takes_a_part,
        asks_a_part,
        takes_a_function,
        has_another_name,
    ),
    *(may_be_itself, may_be_torch, gives_itself, loops, loops_until, comprehends, has_a_function),
    *(changes_in_place, changes_by_a_method, changes_by_an_argument, changes_an_element, sets_an_attribute),
    *(changes_by_an_argument_without_a_name, changes_what_comes_of_more, changes_by_a_function_it_is_given),
    *(changes_by_a_variable, changes_by_one_of_two, changes_itself),
    *(draws, draws_too, imports, catches, enters, takes_more, takes_any, generates, is_awaited, is_wrapped),
    *(torch.no_grad()(swiglu), functools.partialmethod(swiglu)),
]


@pytest.mark.parametrize("forward", MORE, ids=lambda one: getattr(one, "__name__", type(one).__name__))
def test_a_forward_that_may_do_more_is_not_taken_for_arithmetic(forward: Any) -> None:
    assert not only_computes(expert_with(forward))


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


@pytest.mark.parametrize(
    "change",
    [
        lambda module: setattr(module, "activation", wait),
        lambda module: setattr(module, "activation", [1]),
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
    ],
)
def test_what_is_changed_later_is_seen(change: Callable[[Any], object]) -> None:
    module = expert_with(types.FunctionType(gated.__code__, globals()))
    assert only_computes(module)
    change(module)
    assert not only_computes(module)


class Special(Tensor):
    """A tensor whose operators may do anything."""


def test_a_global_that_is_changed_later_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    module, other = expert_with(swiglu), expert_with(imported_by_name)
    assert only_computes(module)
    assert only_computes(other)
    monkeypatch.setitem(globals(), "F", Expert())
    monkeypatch.setitem(globals(), "silu", wait)
    assert not only_computes(module)
    assert not only_computes(other)


def test_what_is_put_in_the_place_of_torchs_functions_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    module, other = expert_with(swiglu), expert_with(rms_norm)
    assert only_computes(module)
    assert only_computes(other)
    monkeypatch.setattr(F, "silu", wait)
    monkeypatch.setattr(Tensor, "mean", wait)
    assert not only_computes(module)
    assert not only_computes(other)
    assert not only_computes(expert_with(rms_norm))  # read only now


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


def test_a_class_may_say_by_itself_that_it_does_more() -> None:
    module: Any = type("Own", (Expert,), {"forward": swiglu, "only_computes": lambda self: False})()
    assert in_turn.call_in_turn([module], [(torch.randn(3, 4),)], [{}]) is None


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


def test_nothing_that_is_known_draws_random_numbers() -> None:
    names = METHODS | {function.__name__ for function in FUNCTIONS}
    packets = [getattr(torch.ops.aten, name) for name in names if hasattr(torch.ops.aten, name)]
    overloads = [getattr(packet, name) for packet in packets for name in packet.overloads()]
    assert len(packets) > 50
    assert not [one for one in overloads if torch.Tag.nondeterministic_seeded in one.tags]


def test_a_module_that_was_never_made_raises_as_by_itself() -> None:
    class Unmade(nn.Module):
        def __init__(self) -> None:
            pass

        def forward(self, x: Tensor) -> Tensor:
            return x.sin()

    x = torch.randn(3, 4)
    for call in (lambda: Unmade()(x), lambda: parallel_apply([Unmade(), Unmade()], [x, x])):
        with pytest.raises(AttributeError, match="'Unmade' object has no attribute"):
            call()


def test_a_class_that_was_read_can_go_with_its_file() -> None:
    source = """
class Own(nn.Module):
    def forward(self, x):
        return torch.sin(x)
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
