"""Kept forwards stay within their budget, and what each of them weighs in memory is what is counted."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor, nn

from experts_server import ExpertsServer
from experts_server.configuration.config import LimitsConfig, MemoryConfig, ServingConfig
from experts_server.hosting.kept import RECORD_BYTES, SAVED_BYTES, KeptForward, KeptForwards, OwnForwards
from moe_autograd.autograd.offload.freed_memory import give_back_freed_memory
from tests.support.gated import D, serving
from tests.support.hosting import Changes, sgd
from tests.support.servers import (
    WireClient,
    tokens,
    wait_until,
)


def test_kept_forwards_stay_within_their_budget_and_the_oldest_go_first() -> None:
    one_call = 2 * 100 * D * 4 + RECORD_BYTES + 2 * SAVED_BYTES  # its input and its output
    limits = LimitsConfig(kept_forward_bytes=3 * one_call + 2000)
    with serving({"e": nn.Linear(D, D)}, limits=limits) as server, WireClient(server.address) as client:
        for call_id in range(6):
            client.forward("e", tokens(100, D), call_id=call_id)
        codes = [client.backward("e", tokens(100, D), call_id=n).code for n in range(6)]
    assert codes == ["INPUTS_NEEDED"] * 3 + ["OK"] * 3


def test_a_small_kept_forward_holds_nothing_of_a_large_one_that_came_with_it() -> None:
    """Nor of a run of small ones; each is counted by itself."""
    with serving({"e": nn.Linear(D, D)}) as server, WireClient(server.address) as client:
        assert server._server is not None
        kept = server._server.memory.kept
        sizes = (1, 2, 1000)
        calls = [
            client.forward_call("e", tokens(rows, D), call_id=rows, keep_graph=rows < 1000) for rows in sizes
        ]
        client.stream("Forward", calls)
        held = [own.inputs[0].untyped_storage().nbytes() for own in kept._kept.values()]
        assert sorted(held) == [1 * D * 4, 2 * D * 4]
        assert kept.num_bytes < 16_000
        for rows in sizes[:2]:
            client.backward("e", tokens(rows, D), call_id=rows)
        assert kept.num_bytes == 0


def test_a_forward_that_comes_twice_is_kept_once() -> None:
    """Its answer was lost on the way, so its client sent it again."""
    with serving({"e": nn.Linear(D, D)}) as server, WireClient(server.address) as client:
        assert server._server is not None
        kept = server._server.memory.kept
        for _ in range(3):
            client.forward("e", tokens(100, D))
        assert client.backward("e", tokens(100, D)).code == "OK"
        assert (len(kept), kept.num_bytes) == (0, 0)


def test_of_a_forward_that_finds_no_room_its_inputs_may_stay_and_what_is_let_go_is_counted() -> None:
    module = nn.Linear(D, 100 * D)
    limits = LimitsConfig(kept_forward_bytes=10_000)  # of outputs it has ten times as many
    with serving({"e": module}, limits=limits) as server, WireClient(server.address) as client:
        assert server._server is not None
        kept = server._server.memory.kept
        client.forward("e", tokens(30, D))
        assert (len(kept), kept.num_let_go) == (1, 0)
        answer = client.backward("e", torch.ones(30, 100 * D))
        assert answer.code == "OK"
        torch.testing.assert_close(answer.tensors[0], torch.ones(30, 100 * D) @ module.weight.detach())
        client.forward("e", tokens(1000, D))
        assert (len(kept), kept.num_let_go) == (0, 1)


def test_inputs_that_a_module_was_found_to_change_are_not_kept() -> None:
    """Nothing computed from them again would be what it was: they come again with the backward."""
    hosted = Changes(D)
    local = copy.deepcopy(hosted)
    config = ServingConfig(memory=MemoryConfig(recompute=True))
    no_grads: dict[str, Any] = {"input_requires_grad": [False]}
    with (
        ExpertsServer({"e": hosted}, optimizer=sgd, config=config) as server,
        WireClient(server.address) as client,
    ):
        client.forward("e", tokens(3, D), **no_grads)
        assert client.backward("e", tokens(3, D), wants_input_grads=[False]).code == "INPUTS_NEEDED"
        x, grad = tokens(3, D), tokens(3, D)
        assert client.backward("e", grad, inputs=[x], wants_input_grads=[False]).code == "OK"
        client.forward("e", tokens(3, D), **no_grads)  # with copies of them, now that it is known
        assert client.backward("e", tokens(3, D), wants_input_grads=[False]).code == "OK"
        client.step("e")
    for _ in range(2):
        local(tokens(3, D)).backward(tokens(3, D))
    sgd(local.parameters()).step()
    torch.testing.assert_close(hosted.state_dict(), local.state_dict())


def test_an_expert_remembers_no_more_graphs_than_there_are() -> None:
    store = KeptForwards(10 * RECORD_BYTES, max_age_s=60)
    own = OwnForwards("e", store)
    for call_id in range(1000):
        own.put(b"", call_id, KeptForward((torch.ones(1),), (torch.ones(1),), None, False, 0))
    assert len(store) == 10
    assert len(own._graphs) < 50
    own.remove_graphs()
    assert all(own.get(b"", call_id).outputs is None for call_id in range(990, 1000))


def test_what_small_kept_forwards_weigh_in_memory_is_counted() -> None:
    num_calls = 20_000
    with serving({"e": nn.Linear(D, D)}) as server, WireClient(server.address) as client:
        assert server._server is not None
        kept = server._server.memory.kept
        process = psutil.Process()

        def forwards(first: int, num: int) -> None:
            for start in range(first, first + num, 100):
                client.stream(
                    "Forward",
                    [client.forward_call("e", tokens(1, D), call_id=n) for n in range(start, start + 100)],
                )

        forwards(0, 1000)
        held, counted = process.memory_info().rss, kept.num_bytes
        forwards(1000, num_calls)
        held, counted = process.memory_info().rss - held, kept.num_bytes - counted
    assert held < 2 * counted, f"{held} bytes held, {counted} counted"


class SelfAttention(nn.Module):
    """Between rows: its graph grows with the square of their number."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(D, D)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        return torch.softmax(y @ y.T, -1) @ y


class Masked(nn.Module):
    """Its graph is mostly a product of weights, there for any number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4000, 4000))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.sigmoid()[:D]


@pytest.mark.parametrize(
    ("make", "rows_before", "num_rows"),
    [
        (lambda: nn.Linear(D, 40_000, bias=False), [2], 400),
        (SelfAttention, [2, 8], 4000),
        (SelfAttention, [2, 4600], 4000),
        (Masked, [2000], 1),
        (lambda: nn.Sequential(nn.Linear(D, 4000), nn.GELU(), nn.Linear(4000, D)), [0], 2000),
    ],
    ids=[
        "an output alone",
        "attention",
        "attention between",
        "for any number of rows",
        "after an empty call",
    ],
)
def test_what_a_large_kept_forward_weighs_in_memory_is_counted(
    make: Callable[[], nn.Module], rows_before: list[int], num_rows: int
) -> None:
    with serving({"e": make()}) as server, WireClient(server.address) as client:
        assert server._server is not None
        kept, process = server._server.memory.kept, psutil.Process()

        def resident_bytes() -> int:
            give_back_freed_memory()
            return int(process.memory_info().rss)

        for call_id, rows in enumerate(rows_before):
            client.forward("e", tokens(rows, D), call_id=call_id)
        held, counted = resident_bytes(), kept.num_bytes
        client.forward("e", tokens(num_rows, D), call_id=100)
        counted = kept.num_bytes - counted
        assert counted > 50e6
        wait_until(lambda: resident_bytes() - held < 1.2 * counted + 16e6)  # messages may be on their way out
    assert counted < 2 * held + 16e6, "nor is it counted many times over"
