"""Kept forwards stay within their budget, and what each of them weighs in memory is what is counted."""

from __future__ import annotations

from collections.abc import Callable

import psutil
import pytest
import torch
from torch import Tensor, nn

from experts_server.configuration.config import LimitsConfig
from experts_server.hosting.kept import RECORD_BYTES, SAVED_BYTES
from moe_autograd.autograd.offload.freed_memory import give_back_freed_memory
from tests.support.gated import D, serving
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
