"""What rounding tensors on their way is worth on links of different speed, and whether "auto" chooses well.

    python -m benchmarks.compression.main

A step is a forward and a backward of an expert that returns its input, in a server process; a proxy in another process
lets only so many bytes a second through in each direction.
"""

from __future__ import annotations

import argparse
import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from benchmarks.measure import print_table, stopwatch, take_turns
from experts_server import ExpertsServer
from moe_autograd.remote import RemoteExperts, RetryPolicy, connect
from tests.support.proxy import Proxy

LINKS = {"100 Mbit/s": 12.5e6, "1 Gbit/s": 125e6, "loopback": 0.0}
CHOICES = ("none", "bfloat16", "int8", "auto")
ROWS, WIDTH = 512, 1024  # 2 MiB
WARMUP = 6  # "auto" chooses after four


def serve() -> None:
    with ExpertsServer({"echo": nn.Identity()}) as server:
        print(server.address, flush=True)
        sys.stdin.read()


def slow_down(address: str, bytes_per_s: float) -> None:
    with Proxy(address) as proxy:
        proxy.bytes_per_s = bytes_per_s
        print(proxy.address, flush=True)
        sys.stdin.read()


@contextmanager
def running(*arguments: str) -> Iterator[str]:
    """Run a part of this benchmark in a process of its own; its address."""
    command = [sys.executable, "-m", "benchmarks.compression.main", *arguments]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.communicate("")


def step_of(experts: RemoteExperts) -> Callable[[], dict[str, float]]:
    x = torch.randn(ROWS, WIDTH, requires_grad=True)
    grad = torch.randn(ROWS, WIDTH)
    return lambda: {"s": stopwatch(lambda: experts["echo"](x).backward(grad))}


def measure(link: str, address: str, rounds: int) -> list[object]:
    """Return a row of the table."""
    with contextlib.ExitStack() as stack:
        patient = RetryPolicy(patience_s=100.0)
        connected = {
            name: stack.enter_context(connect(address, compression=name, timeout_s=200.0, retry=patient))
            for name in CHOICES
        }
        steps = {name: step_of(experts) for name, experts in connected.items()}
        times = take_turns(steps, rounds=rounds, warmup=WARMUP)
        chosen = connected["auto"].compression
    taken = {name: times[name]["s"] for name in CHOICES}
    best = min(CHOICES[:-1], key=lambda name: taken[name].median_ms)
    return [
        link,
        *(taken[name].median_ms for name in CHOICES),
        f"{chosen.forward}, {chosen.backward}",
        taken["auto"].ratio_to(taken[best]),
    ]


def main(rounds: int) -> None:
    rows = []
    with running("--serve") as server:
        for link, bytes_per_s in LINKS.items():
            with contextlib.ExitStack() as stack:
                address = server
                if bytes_per_s:
                    address = stack.enter_context(running("--slow-down", server, str(bytes_per_s)))
                rows.append(measure(link, address, rounds))
    heads = ("link", *(f"{name}, ms" for name in CHOICES), "auto chose", "auto / best")
    print_table(heads, rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--serve", action="store_true", help="be the server")
    parser.add_argument("--slow-down", nargs=2, metavar=("ADDRESS", "BYTES_PER_S"), help="be the proxy")
    arguments = parser.parse_args()
    if arguments.serve:
        serve()
    elif arguments.slow_down:
        slow_down(arguments.slow_down[0], float(arguments.slow_down[1]))
    else:
        main(arguments.rounds)
