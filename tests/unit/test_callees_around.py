"""What a function takes from around itself, and its methods: others of the same name or code may do more."""

from __future__ import annotations

import builtins
import types
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_autograd import parallel_apply
from moe_autograd.autograd import in_turn
from tests.support.made_in_turn import is_made_in_turn
from tests.support.readable import wait


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def mlp(self, x: Tensor) -> Any:
        return self.inner(x)

    def drop(self, x: Tensor) -> Any:
        return F.dropout(x, 0.5)


def mlp(block: Block, x: Tensor) -> Any:
    return wait(block.inner(x))


def test_a_function_with_a_methods_name_is_not_taken_for_the_method() -> None:
    assert is_made_in_turn(Block().mlp)
    assert not is_made_in_turn(types.MethodType(mlp, Block()))


def has_a_default(x: Tensor, block: Any = Block()) -> Any:  # noqa: B008
    return block.mlp(x)


def test_a_tensor_that_is_given_in_the_place_of_a_module_may_have_a_method_of_its_own() -> None:
    x, waiting = torch.randn(3, 4), torch.ones(4)
    waiting.mlp = wait  # type: ignore[attr-defined]
    for args, kwargs in ([(x, waiting), {}], [(x,), {"block": waiting}]):
        assert in_turn.call_in_turn([has_a_default], [args], [kwargs]) is None
    assert is_made_in_turn(has_a_default)


class Activates(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.relu() + 1


def test_a_tensor_that_a_module_takes_may_have_methods_of_its_own() -> None:
    x = torch.randn(3, 4)
    x.whose = "ours"  # type: ignore[attr-defined]
    assert is_made_in_turn(Activates(), x)
    x.relu = lambda: wait(x)  # type: ignore[method-assign]
    assert not is_made_in_turn(Activates(), x)


def functions_of_one_code(*namespaces: dict[str, Any]) -> list[Any]:
    code = compile("def call(x): return act(x)", "experts.py", "exec")
    for namespace in namespaces:
        exec(code, namespace)
    return [namespace["call"] for namespace in namespaces]


def test_functions_of_one_code_are_looked_at_each_in_its_file() -> None:
    computes, waits = functions_of_one_code({"act": F.silu}, {"act": wait})
    assert computes.__code__ == waits.__code__
    x = (torch.randn(3, 4),)
    assert in_turn.call_in_turn([computes, computes], [x, x], [{}, {}]) is not None
    assert in_turn.call_in_turn([computes, waits], [x, x], [{}, {}]) is None


def test_what_a_file_has_under_a_name_is_looked_at_anew_for_each_map() -> None:
    namespace: dict[str, Any] = {"act": F.silu}
    exec("def call(x): return act(x) + x", namespace)
    call = namespace["call"]
    assert is_made_in_turn(call)
    namespace["act"] = wait
    assert not is_made_in_turn(call)


class Finds(dict[str, Any]):
    def __missing__(self, name: str) -> Any:
        return wait


def test_a_namespace_may_have_what_it_does_not_list() -> None:
    namespace = Finds(__builtins__=vars(builtins))
    exec("def call(x): return abs(x)", namespace)
    assert not is_made_in_turn(namespace["call"])


sin = Block()


def test_a_variable_may_have_the_name_of_a_module_in_the_file() -> None:
    def call(x: Tensor) -> Tensor:
        sin = x * 2
        return sin.sin()

    assert is_made_in_turn(call)


def test_what_a_method_draws_that_a_function_calls_is_what_it_draws_on_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    block = Block()
    calls = [lambda x: block.drop(x)] * 3

    def draw() -> list[Tensor]:
        torch.manual_seed(1)
        return [*parallel_apply(calls, [(torch.ones(8, 8),)] * 3), torch.rand(2)]

    assert is_made_in_turn(calls[0])
    without_threads = draw()
    monkeypatch.setattr(in_turn, "MOST_SMALL", -1)
    assert all(map(torch.equal, without_threads, draw()))
