"""A server that is killed, frozen or restarted: when does its client notice, and when is it served again?

Real server processes and real signals. Noticed: from the signal until a call under way on the server raises. Served
again: from the moment when the server is back (it says that it serves; SIGCONT) until a call that has been waiting
for it returns.
"""

from __future__ import annotations

import argparse
import signal
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from benchmarks.measure import print_table
from moe_autograd.errors import ServerUnavailableError
from moe_autograd.remote import RemoteExpert, RetryPolicy, connect

UNDER_WAY_S = 1.0  # after so long a call is with its server
LOST_FOR_S = 3.0
AT_ONCE, PATIENT = RetryPolicy(patience_s=0.0), RetryPolicy(patience_s=100.0)


class Server:
    """`experts-server serve`; killed and started again on the same port."""

    def __init__(self, latency_ms: float) -> None:
        self._latency_ms = latency_ms
        self.address = "127.0.0.1:0"
        self.start()

    def start(self) -> float:
        """Return when it serves."""
        command = [
            sys.executable,
            "-m",
            "experts_server",
            "serve",
            "--listen",
            self.address,
            "--expert",
            "ffn",
        ]
        command += ["--num-experts", "1", "--d-model", "8", "--latency-ms", str(self._latency_ms)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().split()[-1]
        return time.perf_counter()

    def signal(self, number: signal.Signals) -> float:
        self.process.send_signal(number)
        return time.perf_counter()

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


@contextmanager
def serving(latency_ms: float = 0.0) -> Iterator[Server]:
    server = Server(latency_ms)
    try:
        yield server
    finally:
        server.kill()


def call_in_thread(expert: RemoteExpert) -> tuple[threading.Thread, list[float]]:
    """Begin a call; the list will hold when it ended."""
    ended_at: list[float] = []

    def call() -> None:
        try:
            expert(torch.ones(1, 8))
        except ServerUnavailableError:
            pass
        finally:
            ended_at.append(time.perf_counter())

    thread = threading.Thread(target=call)
    thread.start()
    return thread, ended_at


def noticed(number: signal.Signals) -> float:
    with (
        serving(latency_ms=60_000) as server,
        connect(server.address, timeout_s=60.0, retry=AT_ONCE) as experts,
    ):
        thread, ended_at = call_in_thread(experts["ffn.0"])
        thread.join(UNDER_WAY_S)
        lost_at = server.signal(number)
        thread.join()
        return ended_at[0] - lost_at


def served_again_after_restart() -> float:
    with serving() as server, connect(server.address, timeout_s=100.0, retry=PATIENT) as experts:
        experts["ffn.0"](torch.ones(1, 8))
        server.kill()
        thread, ended_at = call_in_thread(experts["ffn.0"])
        back_at = server.start()
        thread.join()
        return ended_at[0] - back_at


def served_again_after_thaw() -> float:
    with serving() as server, connect(server.address, timeout_s=100.0, retry=PATIENT) as experts:
        experts["ffn.0"](torch.ones(1, 8))
        server.signal(signal.SIGSTOP)
        thread, ended_at = call_in_thread(experts["ffn.0"])
        thread.join(LOST_FOR_S)
        back_at = server.signal(signal.SIGCONT)
        thread.join()
        return ended_at[0] - back_at


CASES: dict[str, Callable[[], float]] = {
    "killed (SIGKILL): noticed": lambda: noticed(signal.SIGKILL),
    "frozen (SIGSTOP): noticed": lambda: noticed(signal.SIGSTOP),
    "restarted: served again": served_again_after_restart,
    "thawed (SIGCONT): served again": served_again_after_thaw,
}


def main(rounds: int) -> None:
    rows = []
    for case, measure in CASES.items():
        taken_s = [measure() for _ in range(rounds)]
        rows.append([case, statistics.median(taken_s), max(taken_s)])
    print_table(("what", "median, s", "longest, s"), rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    main(parser.parse_args().rounds)
