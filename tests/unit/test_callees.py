"""Which functions and methods are called in turn, as they only compute. Whoever may wait gets a thread."""

from __future__ import annotations

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
from moe_autograd.autograd import callees, in_turn
from moe_autograd.autograd.function_reading import read_callee
from tests.support.comparison import one_after_another
from tests.support.readable import wait

NUM_CALLS = 4

EXPERT = nn.Linear(4, 4)
WEIGHT = torch.randn(4, 4, requires_grad=True)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.act, self.norms = nn.Linear(4, 4), nn.GELU(), nn.ModuleList([nn.LayerNorm(4)] * 2)
        self.scale, self.weight = 0.5, nn.Parameter(torch.randn(4, 4))
        self.barrier = threading.Barrier(1)

    def gate(self, x: Tensor) -> Any:
        return self.act(x) @ self.weight * self.scale

    def mlp(self, x: Tensor) -> Any:
        for norm in self.norms:
            x = norm(x)
        return self.inner(self.gate(x))

    def wait(self, x: Tensor) -> Tensor:
        self.barrier.wait()
        return x

    def forward(self, x: Tensor) -> Any:
        return self.mlp(x)


def of_slices(x: Tensor, up: Tensor = WEIGHT, *, down: Tensor = WEIGHT) -> Tensor:
    return F.linear(F.silu(F.linear(x, up)), down)


def names_globals(x: Tensor) -> Any:
    return EXPERT(x) @ WEIGHT


def returned_by(make: Callable[[Block], Any]) -> Any:
    return make(Block())


def goes_round(block: Block) -> Any:
    norms, depth = block.norms, 3

    def call(x: Tensor) -> Tensor:
        for norm in norms:
            x = norm(x)
        for _ in range(depth):
            x = x.sin()
        return x + len(norms)

    return call


def takes_all(block: Block) -> Any:
    x = torch.randn(3, 4, requires_grad=True) * 2  # with history
    return lambda _: block(x)


def has_a_default(block: Block) -> Any:
    def call(x: Tensor, *, block: Block = block, act: Any = F.silu) -> Any:
        return act(block(x))

    return call


def takes_two(block: Block) -> Any:
    scale, activation = 2.0, F.gelu
    return lambda x, y=None: activation(block.inner(x)) * scale if y is None else F.linear(x, block.weight, y)


COMPUTING: list[Callable[[Block], Any]] = [
    goes_round,
    takes_all,
    has_a_default,
    takes_two,
    lambda block: block.forward,
    lambda block: block.mlp,
    lambda block: nn.Sequential(block, nn.Tanh()).forward,
    lambda block: lambda x: block.mlp(x) + block.weight.sum() + block.scale,
    lambda block: lambda x, block=block: block(x),
    lambda block: functools.partial(block),
    lambda block: functools.partial(functools.partial(of_slices, up=block.weight), down=block.inner.weight),
    lambda block: names_globals,
    lambda block: of_slices,
    lambda block: torch.sin,
    lambda block: F.gelu,
    lambda block: functools.partial(torch.matmul, other=block.weight),
]


@pytest.mark.parametrize("make", COMPUTING, ids=range(len(COMPUTING)))
def test_what_only_computes_is_called_in_turn_and_means_the_loop(make: Callable[[Block], Any]) -> None:
    calls = [make(Block()) for _ in range(NUM_CALLS)]
    args = [(torch.randn(3, 4, requires_grad=True),) for _ in calls]
    assert in_turn.call_in_turn(calls, args, [{}] * NUM_CALLS) is not None
    mapped, natively = parallel_apply(calls, args), one_after_another(calls, args)
    assert all(map(torch.equal, mapped, natively))
    assert type(mapped[0].grad_fn) is type(natively[0].grad_fn)  # no node of ours
    wanted = [WEIGHT, *EXPERT.parameters(), *[x for (x,) in args]]
    both = [
        torch.autograd.grad([y.pow(2).sum() for y in ys], wanted, allow_unused=True, materialize_grads=True)
        for ys in (mapped, natively)
    ]
    assert all(map(torch.equal, *both))


def test_arguments_by_place_and_by_name_go_where_they_went() -> None:
    block = Block()
    calls = [takes_two(block), takes_two(block), of_slices, of_slices]
    x = torch.randn(3, 4)
    args: list[Any] = [(x,), (x, torch.randn(4)), (x,), (x, block.weight)]
    kwargs: list[Any] = [{}, {}, {}, {"down": block.inner.weight}]
    assert all(map(torch.equal, parallel_apply(calls, args, kwargs), one_after_another(calls, args, kwargs)))


class Other(Block):
    def mlp(self, x: Tensor) -> Any:
        return wait(x)


def is_made_in_turn(call: Any, *args: Any, **kwargs: Any) -> bool:
    return in_turn.call_in_turn([call], [args or (torch.randn(3, 4),)], [kwargs]) is not None


def test_what_need_not_be_given_may_be_something_else_where_it_is_given() -> None:
    x, call = torch.randn(3, 4), has_a_default(Block())
    assert is_made_in_turn(call, x)
    assert not is_made_in_turn(call, x, block=Other())
    assert not is_made_in_turn(call, x, act=wait)
    assert not is_made_in_turn(functools.partial(call, act=wait), x)
    assert not is_made_in_turn(lambda x, block=EXPERT: block(x), x, Other())


def counts(block: Block) -> Any:
    count = 0

    def call(x: Tensor) -> Tensor:
        nonlocal count
        count += 1
        return x

    return call


def is_not_there_yet(block: Block) -> Any:
    def call(x: Tensor) -> Any:
        return later(x)

    if block.scale > 1:
        later = block
    return call


def has_functions_of_its_own(block: Block) -> Any:
    return lambda x: (lambda y: block(y))(x)


def calls_what_it_closes_over(block: Block) -> Any:
    call = block.wait
    return lambda x: call(x)


def takes_from_a_list(block: Block) -> Any:
    blocks = [block]
    return lambda x: blocks[0](x)


def loops_over_a_list(block: Block) -> Any:
    blocks = [block]

    def call(x: Tensor) -> Any:
        for one in blocks:
            x = one(x)
        return x

    return call


def changes_a_module(block: Block) -> Any:
    def call(x: Tensor) -> Any:
        block.scale = 2
        return block(x)

    return call


def changes_in_place(block: Block) -> Any:
    def call(x: Tensor) -> Any:
        x *= block.scale
        return x

    return call


def has_a_hook(block: Block) -> Any:
    block.inner.register_forward_hook(lambda module, args, y: wait(y))
    return lambda x: block.mlp(x)


def has_another_method(block: Block) -> Any:
    block.mlp = wait  # type: ignore[method-assign]
    return lambda x: block.mlp(x)


def calls_super(block: Block) -> Any:
    return lambda x: super(Block, block).extra_repr()


def generates(x: Tensor) -> Any:
    yield x


def calls_what_has_its_own_name(block: Block) -> Any:
    def call(x: Tensor, call: Any = Waits()) -> Any:  # noqa: B008
        return call(x)

    return call


class Waits(Block):
    def forward(self, x: Tensor) -> Any:
        return wait(x)


class Locked:
    """Gives something else for an instance than for the class, as descriptors may."""

    def __init__(self, method: Any) -> None:
        self.method = method

    def __get__(self, block: Any, kind: Any = None) -> Any:
        return self.method if block is None else lambda x: wait(self.method(block, x))


class PerInstance:
    """Works for instances alone."""

    def __get__(self, block: Any, kind: Any = None) -> Any:
        return wait(block.weight)

    def __set__(self, block: Any, value: Any) -> None:
        pass


class WithDescriptors(Block):
    mlp = Locked(Block.mlp)
    alias = Block.mlp
    gain = PerInstance()


class Lazy(Block):
    def __getattr__(self, name: str) -> Any:
        return wait(super().__getattr__(name))


class LazyNumbers(Block):
    def __getattribute__(self, name: str) -> Any:
        return super().__getattribute__(name) if name != "scale" else wait(super().__getattribute__(name))


class Holds(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lazy = Lazy()

    def mlp(self, x: Tensor) -> Any:
        return x @ self.lazy.weight

    def forward(self, x: Tensor) -> Any:
        return self.mlp(x)


def has_an_alias_of_its_own(block: Block) -> Any:
    other = WithDescriptors()
    other.alias = wait  # type: ignore[assignment]
    return lambda x: other.alias(x)


def has_something_before_a_part(block: Block) -> Any:
    vars(block)["inner"] = wait
    return lambda x: block.inner(x)


def has_other_builtins(block: Block) -> Any:
    namespace: dict[str, Any] = {"__builtins__": {"abs": wait}}
    exec("def call(x): return abs(x)", namespace)
    return namespace["call"]


def takes_a_tensor_with_a_method_of_its_own(block: Block) -> Any:
    y = torch.ones(4)
    y.sin = lambda: wait(y)  # type: ignore[method-assign]
    return lambda x: y.sin() + x


class Called:
    def __call__(self, x: Tensor) -> Tensor:
        return wait(x)


UNKNOWN: list[Callable[[Block], Any]] = [
    *(counts, is_not_there_yet, has_functions_of_its_own, calls_what_it_closes_over, takes_from_a_list),
    *(loops_over_a_list, changes_a_module, changes_in_place, has_a_hook, has_another_method, calls_super),
    *(calls_what_has_its_own_name, has_an_alias_of_its_own, has_something_before_a_part, has_other_builtins),
    takes_a_tensor_with_a_method_of_its_own,
    lambda block: lambda x, other=WithDescriptors(): other.mlp(x),  # noqa: B008
    lambda block: lambda x, other=WithDescriptors(): x * other.gain,  # noqa: B008
    lambda block: lambda x, lazy=Lazy(): x @ lazy.weight,  # noqa: B008
    lambda block: lambda x, lazy=Lazy(): lazy.inner(x),  # noqa: B008
    lambda block: lambda x, lazy=LazyNumbers(): x * lazy.scale,  # noqa: B008
    lambda block: Holds().mlp,
    lambda block: wait,
    lambda block: block.wait,
    lambda block: Other().mlp,
    lambda block: Called(),
    lambda block: generates,
    lambda block: lambda x: wait(x),
    lambda block: lambda x: names_globals(x),
    lambda block: lambda x: block.wait(x),
    lambda block: lambda x: block.barrier.wait(),
    lambda block: lambda x: block.apply(wait),
    lambda block: lambda x: block.__call__(x),
    lambda block: lambda x: block.requires_grad_(False),
    lambda block: lambda *xs: xs[0],
    lambda block: lambda x, by=wait: by(x),
    lambda block: torch.no_grad()(block.mlp),
    lambda block: torch.sin_,
    lambda block: torch.rand_like,
    lambda block: functools.partial(torch.sin, out=torch.zeros(3, 4)),
    lambda block: functools.partial(F.relu, inplace=True),
    lambda block: functools.partial(block.mlp, wait),
]


@pytest.mark.parametrize("make", UNKNOWN, ids=range(len(UNKNOWN)))
def test_what_may_do_more_gets_a_thread(make: Callable[[Block], Any]) -> None:
    assert not is_made_in_turn(make(Block()))


def test_what_is_around_is_looked_at_anew_for_each_map(monkeypatch: pytest.MonkeyPatch) -> None:
    block, act = Block(), F.silu

    def call(x: Tensor) -> Any:
        return act(block(x))

    assert is_made_in_turn(call)
    assert is_made_in_turn(names_globals)
    act = wait
    assert not is_made_in_turn(call)
    act, block = F.silu, Other()
    assert not is_made_in_turn(call)
    block = Block()
    assert is_made_in_turn(call)
    monkeypatch.setitem(globals(), "EXPERT", wait)
    assert not is_made_in_turn(names_globals)
    monkeypatch.setitem(globals(), "EXPERT", block)
    assert is_made_in_turn(names_globals)
    monkeypatch.setattr(names_globals, "__code__", wait.__code__)
    assert not is_made_in_turn(names_globals)


def test_code_that_many_namespaces_have_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    for _ in range(NUM_CALLS):
        namespace: dict[str, Any] = {"F": F}
        exec("def call(x): return F.silu(x)", namespace)
        calls.append(namespace["call"])
    read = list[Any]()
    monkeypatch.setattr(
        callees, "read_callee", lambda function: read.append(function) or read_callee(function)
    )
    for _ in range(2):
        assert in_turn.call_in_turn(calls, [(torch.ones(3),)] * NUM_CALLS, [{}] * NUM_CALLS) is not None
    assert len(read) == 1


class Unresolved:
    @property
    def __class__(self) -> Any:
        raise RuntimeError("not configured")


weight = Unresolved()


def test_a_global_that_a_function_does_not_name_is_not_asked_for_anything() -> None:
    assert is_made_in_turn(lambda x: x @ EXPERT.weight)


def test_a_module_under_the_functions_own_name_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    def dropout(x: Tensor, dropout: Any = nn.Dropout(0.5)) -> Any:  # noqa: B008
        return dropout(x)

    def draw() -> list[Tensor]:
        torch.manual_seed(1)
        return parallel_apply([dropout] * NUM_CALLS, [(torch.ones(8, 8),)] * NUM_CALLS)

    assert is_made_in_turn(dropout)
    without_threads = draw()
    monkeypatch.setattr(in_turn, "MOST_SMALL", -1)
    assert all(map(torch.equal, without_threads, draw()))


def test_functions_draw_what_they_draw_on_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    dropout = nn.Dropout(0.5)
    calls = [lambda x: F.dropout(dropout(x), 0.5)] * NUM_CALLS

    def draw() -> list[Tensor]:
        torch.manual_seed(1)
        return [*parallel_apply(calls, [(torch.ones(8, 8),)] * NUM_CALLS), torch.rand(2)]

    assert is_made_in_turn(calls[0])
    without_threads = draw()
    monkeypatch.setattr(in_turn, "MOST_SMALL", -1)
    assert all(map(torch.equal, without_threads, draw()))
    assert not torch.equal(*without_threads[:2])


def test_an_error_gets_a_note_with_the_name_of_the_function() -> None:
    with pytest.raises(RuntimeError) as raised:
        parallel_apply([of_slices] * 2, [(torch.randn(3, 4),), (torch.randn(3, 5),)])
    assert raised.value.__notes__ == ["parallel_apply, forward: raised by call 1 (of_slices) of 2."]


def test_what_was_read_can_go() -> None:
    namespace: dict[str, Any] = {}
    exec("def call(x): return x.sin()", namespace)
    call = namespace.pop("call")
    assert is_made_in_turn(call)
    gone = weakref.ref(call.__code__)
    del call
    gc.collect()
    assert gone() is None
