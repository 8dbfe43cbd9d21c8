"""Fan-out: passes over many servers that take their time, and how a pass grows with the number of experts.

Servers are processes of their own; experts are small (one linear layer of 64). A pass over servers that each add
50 ms shows that they are asked at the same time; a pass over servers without delay shows what each call costs, in time
and in memory: what client and servers hold after some steps beyond what they held before the first.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from torch import nn

from benchmarks.measure import print_table, stopwatch, take_turns
from benchmarks.remote_fanout.bare import asking
from benchmarks.remote_fanout.plot import Cost, draw
from experts_server import ExpertsServer
from moe_autograd import parallel_apply
from moe_autograd.remote import connect

PLOT = Path(__file__).with_name("cost.png")
MB = 1e6


def serve(first: int, num_experts: int, latency_ms: float) -> None:
    """Be a server of the experts `ffn.first`, ..., until the input is closed."""
    experts = {f"ffn.{first + index}": nn.Linear(64, 64) for index in range(num_experts)}
    with ExpertsServer(experts, latency_ms=latency_ms) as server:
        print(server.address, flush=True)
        sys.stdin.read()


@contextmanager
def serving(num_servers: int, experts_each: int, latency_ms: float) -> Iterator[tuple[list[str], list[int]]]:
    """Run servers; yields their addresses and their processes."""
    with ExitStack() as stack:
        servers = []
        for index in range(num_servers):
            serve = ["--serve", str(index * experts_each), str(experts_each), str(latency_ms)]
            command = [sys.executable, "-m", "benchmarks.remote_fanout.main", *serve]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            servers.append(stack.enter_context(subprocess.Popen(command, text=True, **pipes)))
            stack.callback(servers[-1].stdin.close)
        yield [server.stdout.readline().strip() for server in servers], [server.pid for server in servers]


def resident_mb(*processes: int) -> float:
    """Return the memory that these processes hold together."""
    held = 0.0
    for process in processes:
        status = Path(f"/proc/{process}/status").read_text()
        held += int(status.split("VmRSS:")[1].split()[0]) * 1024 / MB
    return held


def measure(num_servers: int, experts_each: int, latency_ms: float, rounds: int) -> Cost:
    """Return the medians of a forward and of a backward over all experts, and what is held after them."""
    with (
        serving(num_servers, experts_each, latency_ms) as (addresses, processes),
        connect(addresses) as experts,
    ):
        held_here, held_there = resident_mb(os.getpid()), resident_mb(*processes)
        modules = list(experts.values())
        inputs = [(torch.randn(4, 64, requires_grad=True),) for _ in modules]
        outputs: list[torch.Tensor] = []

        def forward() -> None:
            outputs[:] = parallel_apply(modules, inputs)

        def one_round() -> dict[str, float]:
            forward_s = stopwatch(forward)
            return {
                "forward": forward_s,
                "backward": stopwatch(lambda: torch.autograd.backward(outputs, outputs)),
            }

        times = take_turns({"pass": one_round}, rounds=rounds)["pass"]
        return Cost(
            num_servers,
            len(modules),
            latency_ms,
            times["forward"].median_ms,
            times["backward"].median_ms,
            max(0.0, resident_mb(os.getpid()) - held_here),
            max(0.0, resident_mb(*processes) - held_there),
        )


def compare_with_bare(rounds: int) -> list[list[object]]:
    """Return rows for a pass over 8 servers that take 50 ms, and for bare gRPC with as many bytes, in turns."""
    num_servers, experts_each, latency_ms = 8, 16, 50.0
    with (
        serving(num_servers, experts_each, latency_ms) as (addresses, _),
        connect(addresses) as experts,
        asking(num_servers, latency_ms, experts_each * 4 * 64 * 4) as ask_bare,
    ):
        modules = list(experts.values())
        inputs = [(torch.randn(4, 64),) for _ in modules]

        def ask_ours() -> None:
            with torch.no_grad():
                parallel_apply(modules, inputs)

        ways = {"a forward without gradients": ask_ours, "bare gRPC, the same bytes": ask_bare}
        passes = {name: (lambda ask=ask: {"pass": stopwatch(ask)}) for name, ask in ways.items()}
        times = take_turns(passes, rounds=3 * rounds, warmup=3)
        return [[name, times[name]["pass"].median_ms] for name in ways]


def main(rounds: int) -> None:
    """Print the tables, and draw how cost grows."""
    delayed = measure(8, 16, 50.0, rounds)
    growing = [measure(2, each, 0.0, rounds) for each in (4, 32, 256, 2048)]
    heads = ("servers", "experts", "delay, ms", "forward, ms", "backward, ms", "client, MB", "servers, MB")
    rows = [list(cost) for cost in (delayed, *growing)]
    print_table(
        (*heads, "a call and pass, us"),
        [[*row, cost.call_us] for row, cost in zip(rows, (delayed, *growing), strict=True)],
    )
    print()
    print_table(("8 servers that take 50 ms", "a pass, ms"), compare_with_bare(rounds))
    draw(growing, PLOT)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument(
        "--serve", nargs=3, metavar=("FIRST", "NUM_EXPERTS", "LATENCY_MS"), help="be a server"
    )
    arguments = parser.parse_args()
    if arguments.serve:
        serve(int(arguments.serve[0]), int(arguments.serve[1]), float(arguments.serve[2]))
    else:
        main(arguments.rounds)
