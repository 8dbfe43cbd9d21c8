"""Fan-out: passes over many servers that take their time, and how a pass grows with the number of experts.

Servers are processes of their own; experts are small (one linear layer of 64). A pass over servers that each add
50 ms shows that they are asked at the same time; a pass over servers without delay shows what each call costs.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import torch
from torch import nn

from benchmarks.measure import print_table, stopwatch, take_turns
from experts_server import ExpertsServer
from moe_autograd.remote import connect


def serve(first: int, num_experts: int, latency_ms: float) -> None:
    """Be a server of the experts `ffn.first`, ..., until the input is closed."""
    experts = {f"ffn.{first + index}": nn.Linear(64, 64) for index in range(num_experts)}
    with ExpertsServer(experts, latency_ms=latency_ms) as server:
        print(server.address, flush=True)
        sys.stdin.read()


@contextmanager
def serving(num_servers: int, experts_each: int, latency_ms: float) -> Iterator[list[str]]:
    """Run servers; yields their addresses."""
    with ExitStack() as stack:
        servers = []
        for index in range(num_servers):
            serve = ["--serve", str(index * experts_each), str(experts_each), str(latency_ms)]
            command = [sys.executable, "-m", "benchmarks.remote_fanout.main", *serve]
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            servers.append(stack.enter_context(subprocess.Popen(command, text=True, **pipes)))
            stack.callback(servers[-1].stdin.close)
        yield [server.stdout.readline().strip() for server in servers]


def measure(num_servers: int, experts_each: int, latency_ms: float, rounds: int) -> list[object]:
    """Return a row: the medians of a forward and of a backward over all experts."""
    with serving(num_servers, experts_each, latency_ms) as addresses, connect(addresses) as experts:
        modules = list(experts.values())
        inputs = [(torch.randn(4, 64, requires_grad=True),) for _ in modules]
        group = modules[0].call_group
        outputs: list[torch.Tensor] = []

        def one_round() -> dict[str, float]:
            forward_s = stopwatch(
                lambda: outputs.__setitem__(
                    slice(None), group.call_together(modules, inputs, [{}] * len(modules))
                )
            )
            return {
                "forward": forward_s,
                "backward": stopwatch(lambda: torch.autograd.backward(outputs, outputs)),
            }

        times = take_turns({"pass": one_round}, rounds=rounds)["pass"]
    per_call_us = (times["forward"].median_ms + times["backward"].median_ms) / 2 / len(modules) * 1e3
    return [
        num_servers,
        len(modules),
        latency_ms,
        times["forward"].median_ms,
        times["backward"].median_ms,
        per_call_us,
    ]


def main(rounds: int) -> None:
    """Print the table."""
    rows = [measure(8, 16, 50.0, rounds)]
    rows += [measure(2, each, 0.0, rounds) for each in (4, 32, 256, 2048)]
    heads = ("servers", "experts", "delay, ms", "forward, ms", "backward, ms", "a call and pass, us")
    print_table(heads, rows)


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
