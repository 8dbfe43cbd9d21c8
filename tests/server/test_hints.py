"""Hints: a server reads the experts that it will be asked for, and a hint never harms a call."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import grpc
import pytest
import torch
from torch import Tensor, nn

from experts_server.configuration.config import MemoryConfig
from experts_server.serving.service import Service
from moe_autograd import parallel_apply
from moe_autograd.autograd.offload.stores import RamStore
from moe_autograd.moe.experts import FeedForwardExpert
from moe_autograd.remote import RemoteOptimizer, connect
from moe_autograd.wire import experts_pb2 as pb
from tests.support.saving_memory import D, serving, sgd
from tests.support.servers import START_S, WireClient, wait_until


@pytest.fixture
def hinted(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What servers are told to expect."""
    told: list[list[str]] = []
    own = Service._expect

    async def expect(self: Service, request: pb.ExpectRequest) -> pb.ExpectReply:
        told.append(list(request.experts))
        return await own(self, request)

    monkeypatch.setattr(Service, "_expect", expect)
    return told


class Waits(torch.autograd.Function):
    """The identity; its backward waits for a condition."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, condition: Callable[[], bool]) -> Tensor:
        ctx.condition = condition
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        assert ctx.condition()
        return grad, None


def test_a_server_reads_what_the_layer_below_needs_while_the_layer_above_goes_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing but a hint can bring `low` into memory before its backward."""
    read: dict[str, threading.Event] = {"e.low.weights": threading.Event()}
    own_read = RamStore.read

    def note_read(self: RamStore, name: str, flat: Tensor) -> None:
        own_read(self, name, flat)
        if name in read:
            read[name].set()

    monkeypatch.setattr(RamStore, "read", note_read)
    names = ("e.low", "e.high", "e.other.0", "e.other.1")
    hosted: dict[str, nn.Module] = {name: FeedForwardExpert(D) for name in names}
    memory = MemoryConfig(recompute=True, offload=True)
    with serving(hosted, memory, optimizer=sgd) as server, connect(server.address) as there:
        h = there["e.low"](torch.randn(3, D))
        h = Waits.apply(h, lambda: read["e.low.weights"].wait(START_S))  # type: ignore[no-untyped-call]
        y = there["e.high"](h)
        with torch.no_grad():  # there is room for two
            for name in names[2:]:
                there[name](torch.randn(3, D))
        read["e.low.weights"].clear()
        y.sum().backward()
        RemoteOptimizer(there).step()
        assert (server.num_updates["e.low"], server.num_updates["e.high"]) == (1, 1)


def test_each_layer_is_announced_once_and_the_last_ones_chain_ends_with_its_backward(
    hinted: list[list[str]],
) -> None:
    hosted: dict[str, nn.Module] = {name: FeedForwardExpert(D) for name in ("a.0", "a.1", "b.0", "c.0")}
    with (
        serving(hosted, MemoryConfig(recompute=True, offload=True)) as server,
        connect(server.address) as there,
    ):
        for _ in range(2):
            h = torch.randn(3, D)
            h = sum(parallel_apply([there["a.0"], there["a.1"]], [(h,), (h,)]))
            there["c.0"](there["b.0"](h)).sum().backward()
        wait_until(lambda: len(hinted) == 4)  # nobody else waits for a hint
    assert sorted(hinted) == sorted([["b.0"], ["a.0", "a.1"]] * 2)


def test_nobody_is_told_of_experts_that_do_not_come_and_go(hinted: list[list[str]]) -> None:
    hosted: dict[str, nn.Module] = {name: FeedForwardExpert(D) for name in ("a", "b")}
    for memory in (MemoryConfig(), MemoryConfig(recompute=True, offload=True, prefetch=False)):
        with serving(hosted, memory) as server, connect(server.address) as there:
            there["b"](there["a"](torch.randn(3, D))).sum().backward()
    assert hinted == []


def test_a_hint_that_fails_harms_no_call(monkeypatch: pytest.MonkeyPatch) -> None:
    failed = threading.Event()

    async def fail(self: Service, request: pb.ExpectRequest) -> pb.ExpectReply:
        failed.set()
        raise LookupError("hints are out of order")

    monkeypatch.setattr(Service, "_expect", fail)
    hosted: dict[str, nn.Module] = {name: FeedForwardExpert(D) for name in ("a", "b")}
    with (
        serving(hosted, MemoryConfig(recompute=True, offload=True)) as server,
        connect(server.address) as there,
    ):
        x = torch.randn(3, D, requires_grad=True)
        there["b"](there["a"](x)).sum().backward()
        assert failed.wait(START_S)
        assert x.grad is not None
        RemoteOptimizer(there).step()
        assert server.num_updates == {"a": 1, "b": 1}


def test_an_expert_that_is_not_hosted_cannot_be_expected() -> None:
    with serving({"e": FeedForwardExpert(D)}, MemoryConfig()) as server, WireClient(server.address) as client:
        with pytest.raises(grpc.RpcError, match="got 'x'"):
            client.expect("x")
        client.expect("e")
