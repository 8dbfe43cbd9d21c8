"""Transport: what an expert call costs beyond its computation, against bare gRPC moving the same bytes.

Servers are processes of their own. The peer is grpc.aio echoing messages of 1 MiB that are ready-made `bytes` on
both sides: no tensor, no checksum, nothing assembled. It sends each message back as it comes; an expert cannot, which
needs all of its input first: what that alone costs shows in a second peer, which waits as well. All take turns within
one run.
"""

from __future__ import annotations

import argparse
import functools
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import grpc
import torch
from torch import nn

from benchmarks.bare_grpc import serve_bare
from benchmarks.measure import print_table, stopwatch, take_turns
from experts_server import ExpertsServer
from moe_autograd import parallel_apply
from moe_autograd.remote import connect
from moe_autograd.wire.options import CHANNEL_OPTIONS, PART_BYTES

MIB = 1 << 20


# ---- servers


def serve_experts(latency_ms: float) -> None:
    experts: dict[str, nn.Module] = {f"echo.{index}": nn.Identity() for index in range(64)}
    with ExpertsServer(experts, latency_ms=latency_ms) as server:
        print(server.address, flush=True)
        sys.stdin.read()


def serve_echoes() -> None:
    async def echo_one(request: bytes, context: object) -> bytes:
        return request

    async def echo_stream(requests, context):
        async for message in requests:
            yield message

    async def echo_after_all(requests, context):
        for message in [message async for message in requests]:
            yield message

    serve_bare(
        {
            "One": grpc.unary_unary_rpc_method_handler(echo_one),
            "Stream": grpc.stream_stream_rpc_method_handler(echo_stream),
            "AfterAll": grpc.stream_stream_rpc_method_handler(echo_after_all),
        }
    )


@contextmanager
def serving(kind: str, latency_ms: float = 0.0) -> Iterator[str]:
    """Run one of the servers above; yields its address."""
    program = [sys.executable, "-m", "benchmarks.transport.main"]
    command = [*program, "--serve", kind, "--latency-ms", str(latency_ms)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.communicate("")


# ---- clients


def bare_echo(channel: grpc.Channel, parts: list[bytes], how: str = "Stream") -> None:
    """Send and receive ready-made messages, some in flight at once."""
    received = list(channel.stream_stream(f"/Bare/{how}")(iter(parts), timeout=60))
    assert len(received) == len(parts)


def compare(
    what: str, ours: Callable[[], object], bare: Callable[[], object], rounds: int, num_bytes: int = 0
) -> list[object]:
    """Return a row of the table: medians, and the ratio of each round's times."""
    times = take_turns(
        {"ours": lambda: {"s": stopwatch(ours)}, "bare": lambda: {"s": stopwatch(bare)}},
        rounds=rounds,
        warmup=3,
    )
    ours_s, bare_s = times["ours"]["s"], times["bare"]["s"]
    rate = num_bytes / ours_s.median_ms / 1e6 if num_bytes else ""
    return [what, ours_s.median_ms, bare_s.median_ms, ours_s.ratio_to(bare_s), rate]


def alone(what: str, ours: Callable[[], object], rounds: int) -> list[object]:
    times = take_turns({"ours": lambda: {"s": stopwatch(ours)}}, rounds=rounds, warmup=3)["ours"]["s"]
    return [what, times.median_ms, "", "", ""]


def passes(modules: list[nn.Module], rounds: int) -> list[list[object]]:
    """Return rows for the forward and the backward of a layer's pass over small inputs, gradients included."""
    xs = [torch.randn(16, 64, requires_grad=True) for _ in modules]
    grad_outputs = [torch.randn(16, 64) for _ in modules]
    outputs: list[torch.Tensor] = []

    def forward() -> None:
        outputs[:] = parallel_apply(modules, [(x,) for x in xs])

    def run() -> dict[str, float]:
        for x in xs:
            x.grad = None
        return {
            "forward": stopwatch(forward),
            "backward": stopwatch(lambda: torch.autograd.backward(outputs, grad_outputs)),
        }

    times = take_turns({"ours": run}, rounds=rounds, warmup=10)["ours"]
    return [[f"64 calls of 4 KiB, {part}", times[part].median_ms, "", "", ""] for part in times]


def main(rounds: int) -> None:
    rows = []
    with (
        serving("experts") as address,
        serving("bare") as bare_address,
        connect(address) as experts,
        grpc.insecure_channel(bare_address, CHANNEL_OPTIONS) as channel,
    ):
        one = experts["echo.0"]
        empty = torch.empty(0)
        bare_one = channel.unary_unary("/Bare/One")
        modules = list(experts.values())
        small = [(torch.randn(16, 64),) for _ in modules]
        small_bytes = [b"x" * (64 * 4096)]
        rows += passes(modules, 20 * rounds)
        with torch.no_grad():
            rows.append(
                compare("empty call", lambda: one(empty), lambda: bare_one(b"", timeout=9), 20 * rounds)
            )
            rows.append(
                compare(
                    "64 calls of 4 KiB, forward without gradients",
                    lambda: parallel_apply(modules, small),
                    lambda: bare_echo(channel, small_bytes),
                    5 * rounds,
                    2 * 64 * 4096,
                )
            )
            for mib in (8, 64):
                x = torch.randn(mib * MIB // 4)
                parts = [bytes(PART_BYTES) for _ in range(mib)]
                ours, bare = (lambda x=x: one(x)), (lambda parts=parts: bare_echo(channel, parts))
                after_all = functools.partial(bare_echo, channel, parts, "AfterAll")
                rows.append(compare(f"echo of {mib} MiB", ours, bare, rounds, 2 * mib * MIB))
                name = f"echo of {mib} MiB, bare gRPC once all is there"
                rows.append(compare(name, ours, after_all, rounds, 2 * mib * MIB))
    with serving("experts", latency_ms=20) as address, connect(address) as experts:
        modules = list(experts.values())
        inputs = [(torch.randn(16, 64, requires_grad=True),) for _ in modules]

        def forward_and_backward() -> None:
            outputs = parallel_apply(modules, inputs)
            torch.autograd.backward(outputs, outputs)

        rows.append(alone("64 experts 20 ms away, forward and backward", forward_and_backward, rounds))
    print_table(("what", "ours, ms", "bare gRPC, ms", "ratio", "ours, GB/s both ways"), rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--serve", choices=["experts", "bare"], help="be one of the servers")
    parser.add_argument("--latency-ms", type=float, default=0.0)
    arguments = parser.parse_args()
    if arguments.serve == "bare":
        serve_echoes()
    elif arguments.serve == "experts":
        serve_experts(arguments.latency_ms)
    else:
        main(arguments.rounds)
