"""How long a small call and a health check wait while four large experts are under load.

One server process hosts a small expert and four large ones. A client calls the small one now and then and checks the
server's health, first with nobody else there, and then while four other clients keep the large experts busy. The
server's own account of each call (time in the queue, time computing) says where the time went.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import threading
import time
from multiprocessing.synchronize import Barrier, Event
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks.measure import print_table, stopwatch
from tests.support.servers import ServerProcess, WireClient

NUM_LARGE, D_LARGE, D_SMALL = 4, 1024, 64
CONFIG = f"""
listen = "127.0.0.1:0"
optimizer = "none"
experts."large.[0:{NUM_LARGE}]" = {{ class = "ffn", args = {{ d_model = {D_LARGE} }} }}
experts.small = {{ class = "ffn", args = {{ d_model = {D_SMALL} }} }}
"""
PAUSE_S = 0.005
HEADS = ("", "p50, ms", "p99, ms", "most, ms")


def press(address: str, number: int, has_begun: Barrier, is_over: Event) -> None:
    """Keep one large expert busy: some 9 GFLOP a call."""
    torch.set_num_threads(1)
    x = torch.randn(512, D_LARGE)
    with WireClient(address, client_id=bytes([number])) as client:
        client.forward(f"large.{number}", x, keep_graph=False)
        has_begun.wait()
        while not is_over.is_set():
            client.forward(f"large.{number}", x, keep_graph=False)


def measure(address: str, num_calls: int) -> dict[str, list[float]]:
    """Return times in seconds, by what they are of."""
    taken: dict[str, list[float]] = {
        name: [] for name in ("small call", "in its queue", "computing", "health check")
    }
    x = torch.randn(4, D_SMALL)
    with WireClient(address, client_id=b"small") as client:
        health = health_pb2_grpc.HealthStub(client.channel)
        for _ in range(num_calls):
            begun_s = time.perf_counter()
            answer = client.forward("small", x, keep_graph=False)
            taken["small call"].append(time.perf_counter() - begun_s)
            taken["in its queue"].append(answer.result.queue_s)
            taken["computing"].append(answer.result.compute_s)
            taken["health check"].append(stopwatch(lambda: health.Check(health_pb2.HealthCheckRequest())))
            threading.Event().wait(PAUSE_S)
    return taken


def rows(when: str, taken: dict[str, list[float]]) -> list[list[object]]:
    found: list[list[object]] = []
    for name, times_s in taken.items():
        ordered = sorted(1e3 * time_s for time_s in times_s)
        at = [ordered[len(ordered) // 2], ordered[int(0.99 * len(ordered))], ordered[-1]]
        found.append([f"{name}, {when}", *at])
    return found


def main(num_calls: int) -> None:
    """Print the table."""
    spawn = multiprocessing.get_context("spawn")
    has_begun, is_over = spawn.Barrier(NUM_LARGE + 1), spawn.Event()
    with TemporaryDirectory() as folder:
        config = Path(folder) / "server.toml"
        config.write_text(CONFIG)
        with ServerProcess("--config", str(config)) as server:
            measure(server.address, 20)
            table = rows("alone", measure(server.address, num_calls))
            arguments = [(server.address, number, has_begun, is_over) for number in range(NUM_LARGE)]
            clients = [spawn.Process(target=press, args=given) for given in arguments]
            for client in clients:
                client.start()
            has_begun.wait()
            table += rows("under load", measure(server.address, num_calls))
            is_over.set()
            for client in clients:
                client.join()
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.0f} in the last minute")
    print_table(HEADS, table)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--calls", type=int, default=500)
    main(parser.parse_args().calls)
