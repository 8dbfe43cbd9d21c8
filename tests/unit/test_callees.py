"""Functions and methods that only compute are called in turn."""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_autograd import parallel_apply
from moe_autograd.autograd import in_turn
from moe_autograd.autograd.reading import callees
from moe_autograd.autograd.reading.function_reading import read_callee
from tests.support.callees import Block, Other
from tests.support.comparison import one_after_another
from tests.support.made_in_turn import is_made_in_turn
from tests.support.readable import wait

NUM_CALLS = 4

EXPERT = nn.Linear(4, 4)
WEIGHT = torch.randn(4, 4, requires_grad=True)


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


def asks_for_a_norm(block: Block) -> Any:
    parts = nn.ModuleDict({"norm": block.norms[0]})  # of which a tensor has one, too
    return lambda x: parts.norm(x)


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
    asks_for_a_norm,
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


def test_what_need_not_be_given_may_be_something_else_where_it_is_given() -> None:
    x, call = torch.randn(3, 4), has_a_default(Block())
    assert is_made_in_turn(call, x)
    assert not is_made_in_turn(call, x, block=Other())
    assert not is_made_in_turn(call, x, act=wait)
    assert not is_made_in_turn(functools.partial(call, act=wait), x)
    assert not is_made_in_turn(lambda x, block=EXPERT: block(x), x, Other())


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
