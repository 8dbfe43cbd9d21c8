"""What a map's calls take and return is looked through once, and plain values are not looked at one by one."""

from __future__ import annotations

import collections
import enum
import functools
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.autograd import Function
from torch.utils._pytree import tree_leaves

from moe_autograd import map_with_parallel_backward, parallel_apply
from moe_autograd.autograd.contents.leaves import PLAIN_VALUES, LookedThrough, leaves_of


class Pair(NamedTuple):
    first: Any
    second: Any


class Number(enum.IntEnum):
    ONE = 1


TREES: dict[str, Any] = {
    "a number": 1,
    "a tensor": torch.ones(2),
    "an object": object(),
    "numbers": [1, True, 1.0, 1j, "1", b"1", None],
    "nested": {"a": [(1, torch.ones(2)), {"b": ([torch.ones(3), "c"], object)}], "d": ()},
    "a named tuple": [Pair([1, torch.ones(2)], object())],
    "an ordered dictionary": (collections.OrderedDict(a=[torch.ones(2), 1]), 1),
    "a deque": {"a": collections.deque([1, torch.ones(2), Number.ONE])},
    "a set, which is no pytree": [{1, 2}],
    "a parameter": ["a", torch.nn.Parameter(torch.ones(2))],
}


@pytest.mark.parametrize("tree", TREES.values(), ids=TREES.keys())
def test_the_leaves_are_those_of_pytorch_but_for_plain_values(tree: Any) -> None:
    expected = [leaf for leaf in tree_leaves(tree) if type(leaf) not in PLAIN_VALUES]
    known: LookedThrough = {}
    for _ in range(2):
        assert [*map(id, leaves_of(tree, known))] == [*map(id, expected)]


def test_what_is_made_anew_is_not_taken_for_what_was_there_before() -> None:
    known: LookedThrough = {}
    for i in range(100):
        (leaf,) = leaves_of([1, torch.tensor(i)], known)
        assert isinstance(leaf, Tensor)
        assert leaf.item() == i


@pytest.mark.parametrize("others", [[], ["a", torch.ones(2)]], ids=["alone", "beside others"])
def test_a_list_that_holds_itself_raises_as_it_does_in_pytorch(others: list[Any]) -> None:
    held: list[Any] = [*others]
    held.append(held)
    for look in (tree_leaves, functools.partial(leaves_of, known={})):
        with pytest.raises(RecursionError):
            look(held)


class Scales(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, table: Any) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * 2, None


class Takes(torch.nn.Linear):
    def forward(self, x: Tensor, table: Any = None) -> Any:
        return super().forward(x)


class Returns(torch.nn.Linear):
    def __init__(self, table: Any) -> None:
        super().__init__(2, 2)
        self.table = table

    def forward(self, x: Tensor) -> Any:
        return super().forward(x), self.table


def by_position(table: Any) -> None:
    parallel_apply([Takes(2, 2) for _ in range(3)], [(torch.ones(1, 2), table)] * 3, max_concurrency=1)


def by_keyword(table: Any) -> None:
    inputs = [(torch.ones(1, 2, requires_grad=True),)] * 3
    parallel_apply([Takes(2, 2)] * 3, inputs, [{"table": table}] * 3, max_concurrency=1)


def as_result(table: Any) -> None:
    parallel_apply([Returns(table) for _ in range(3)], [(torch.ones(1, 2),)] * 3, max_concurrency=1)


def of_functions(table: Any) -> None:
    args = [(torch.ones(2, requires_grad=True), table)] * 3
    map_with_parallel_backward(Scales, *args, max_concurrency=1)


def num_python_calls(call: Callable[[], object]) -> int:
    counts: collections.Counter[str] = collections.Counter()
    sys.setprofile(lambda frame, event, arg: counts.update([event]))
    try:
        call()
    finally:
        sys.setprofile(None)
    return counts["call"]


TABLES: dict[str, Callable[[int], Any]] = {
    "list of numbers": lambda size: [*range(size)],
    "list of texts": lambda size: [*map(str, range(size))],
    "dictionary of texts": lambda size: {i: str(i) for i in range(size)},
    "tuple within a list": lambda size: [tuple(map(float, range(size)))],
}


@pytest.mark.parametrize("table", TABLES.values(), ids=TABLES.keys())
@pytest.mark.parametrize("way", [by_position, by_keyword, as_result, of_functions])
def test_no_function_is_called_for_each_plain_value_in_a_container(
    way: Callable[[Any], None], table: Callable[[int], Any]
) -> None:
    few, many = (functools.partial(way, table(size)) for size in (2, 2000))
    few()  # what is done once for a process
    # Of the attributes of each of three modules 256 values are looked at.
    assert num_python_calls(many) - num_python_calls(few) < 1000


def test_a_tensor_among_many_plain_values_that_all_calls_share_gets_its_gradient() -> None:
    weight = torch.ones(2, requires_grad=True)
    table = [*map(str, range(100)), {"weight": [weight, 1]}]

    def call(x: Tensor, table: Any) -> Tensor:
        product: Tensor = x * table[-1]["weight"][0]
        return product

    for y in parallel_apply([call] * 3, [(torch.full((2,), float(i)), table) for i in range(3)]):
        y.sum().backward()
    assert weight.grad is not None
    assert weight.grad.tolist() == [3.0, 3.0]
