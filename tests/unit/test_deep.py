"""How deep graphs are taken note of: each node in one list, which the stops that lead to it share."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import Node

from moe_autograd.autograd import deep
from moe_autograd.autograd.walks import Edge, walk

DEPTH = 2 * deep.DEEP


@pytest.fixture
def x() -> Tensor:
    return torch.ones(1, requires_grad=True)


def edge_of(tensor: Tensor) -> Edge:
    return tensor.grad_fn, 0


def nodes_of(*tensors: Tensor) -> set[Node]:
    """Walk the graphs of tensors, which takes note of them."""
    return {node for node, _ in walk(map(edge_of, tensors)) if node is not None}


def lists_in(nodes: set[Node]) -> dict[int, list[Node]]:
    """Return the lists that stops hold, by `id`."""
    stops: list[Any] = [node for node in nodes if deep._BELOW in node.metadata]  # type: ignore[operator]
    return {id(held): held.nodes for stop in stops for held in stop.metadata[deep._BELOW]}


def lattice(x: Tensor, width: int, depth: int) -> list[Tensor]:
    """Compute rows of sums, each of two neighbours in the row before."""
    row = [x * i for i in range(width)]
    for _ in range(depth):
        row = [row[i] + row[i - 1] for i in range(width)]
    return row


@pytest.mark.parametrize("width", [1, 2, 7])
def test_each_node_is_in_one_list(x: Tensor, width: int) -> None:
    """With a list for each stop of a row, there were as many entries as stops for each node."""
    row = lattice(x, width, DEPTH)
    nodes = nodes_of(*row)
    listed = [node for one in lists_in(nodes).values() for node in one]
    assert len(listed) == len({*listed}) > len(nodes) - 2 * deep._STRETCH * width


def test_a_wide_graph_needs_none(x: Tensor) -> None:
    """Many nodes, few one below the other."""
    nodes = nodes_of(*lattice(x, 10, deep.DEEP // 2))
    assert len(nodes) > deep.DEEP
    assert not lists_in(nodes)


def test_lists_are_there_whoever_has_made_the_nodes(x: Tensor) -> None:
    """Each thread counts its nodes by itself: those of one that has made others before have the higher numbers."""

    def ahead() -> None:
        y = torch.ones(1, requires_grad=True)
        for _ in range(DEPTH):
            y.sin()

    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        one.submit(ahead).result()
        y = x
        for i in range(DEPTH):
            y = (one, other)[i % 2].submit(torch.sin, y).result()
    nodes = nodes_of(y)
    assert sum(map(len, lists_in(nodes).values())) > len(nodes) - 2 * deep._STRETCH


def test_a_graph_that_is_walked_again_keeps_its_lists(x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others were made at each walk, and let go of by a thread."""
    (y,) = lattice(x, 1, DEPTH)
    nodes = nodes_of(y)
    before = lists_in(nodes)
    assert before
    monkeypatch.delattr(deep, "_Held")
    assert lists_in(nodes_of(y)) == before


class Told(torch.autograd.Function):
    """Hand on what it gets; its node holds an object that tells when it is gone."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tell: Callable[[], object]) -> Tensor:
        ctx.held = held = threading.Event()
        weakref.finalize(held, tell)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


def test_a_branch_goes_with_its_own_result(x: Tensor) -> None:
    """Of two that are as deep, one leads to the other: what only the first leads to does not wait for the second."""
    gone = {name: threading.Event() for name in ("left", "right", "both")}
    right = Told.apply(x, gone["both"].set)
    left = right * 2
    for _ in range(DEPTH):
        left, right = left + right, right.sin()
    left, right = Told.apply(left, gone["left"].set), Told.apply(right, gone["right"].set)
    for _ in range(DEPTH):
        left, right = left + right, right.sin()
    nodes_of(left, right)
    del left
    assert gone["left"].wait(60)
    assert not gone["right"].is_set()
    del right
    assert gone["right"].wait(60)
    assert gone["both"].wait(60)
