"""A server under mixed load and faults for minutes: memory and files stay what they are. `make soak` runs twenty."""

from __future__ import annotations

import contextlib
import statistics
import threading
import time
from pathlib import Path

import grpc
import psutil
import pytest
import torch

from moe_autograd import parallel_apply
from moe_autograd.errors import RemoteError
from moe_autograd.remote import RemoteOptimizer, RetryPolicy, connect
from tests.support.proxy import Proxy
from tests.support.servers import ServerProcess, WireClient, tokens

D = 32
MIB = 1 << 20
FLAGS = (
    "--expert",
    "ffn",
    "--num-experts",
    "8",
    "--d-model",
    str(D),
    "--optimizer",
    "adam",
    "--log-level",
    "error",
)
ENVIRONMENT = {
    "GRPC_VERBOSITY": "NONE",  # what grpc itself says of connections that are cut is no complaint of ours
    "EXPERTS_SERVER_CHECKPOINT_INTERVAL_S": "2",
    # What is held for clients that went away reaches its limits within the first minutes.
    "EXPERTS_SERVER_LIMITS__MAX_CLIENTS": "32",
    "EXPERTS_SERVER_LIMITS__GATHERED_GRADIENT_S": "30",
    "EXPERTS_SERVER_LIMITS__KEPT_FORWARD_BYTES": str(4 * MIB),
    "EXPERTS_SERVER_LIMITS__LEDGER_REPLY_BYTES": str(4 * MIB),
}


def train(address: str, seed: int, done: threading.Event) -> None:
    """Train through the faulty network; what the retries cannot mend is an error, and it begins again."""
    retry = RetryPolicy(patience_s=20.0, budget=1000.0, update_attempt_s=2.0)
    while not done.is_set():
        with contextlib.suppress(RemoteError), connect(address, timeout_s=20.0, retry=retry) as experts:
            optimizer = RemoteOptimizer(experts)
            while not done.is_set():
                x = tokens(4 + seed, D, seed=seed).requires_grad_()
                optimizer.zero_grad()
                outputs = parallel_apply(list(experts.values()), [(x,)] * len(experts))
                torch.stack(outputs).square().mean().backward()
                optimizer.step()


def misbehave(address: str, done: threading.Event) -> None:
    with WireClient(address, client_id=b"villain") as client:
        number = 0
        while not done.is_set():
            number += 1
            try:
                client.forward("ffn.0", tokens(3, D), call_id=number)  # never comes back for its backward
                client.forward("ffn.0", tokens(3, D + 1))
                list(client.stream_messages("Forward", [b"noise"]))
            except grpc.RpcError:
                continue


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_memory_and_files_stay_what_they_are(request: pytest.FixtureRequest, tmp_path: Path) -> None:
    minutes = request.config.getoption("--soak-minutes")
    done = threading.Event()
    resident, files = [], []
    with ServerProcess(*FLAGS, "--checkpoint-dir", str(tmp_path), environment=ENVIRONMENT) as server:
        process = psutil.Process(server.process.pid)
        with Proxy(server.address) as proxy:
            proxy.flip_chance = proxy.cut_chance = 0.002
            work = [threading.Thread(target=train, args=(proxy.address, seed, done)) for seed in range(3)]
            work.append(threading.Thread(target=misbehave, args=(server.address, done)))
            for thread in work:
                thread.start()
            until = time.monotonic() + 60 * minutes
            while time.monotonic() < until:
                done.wait(0.5)
                resident.append(process.memory_info().rss)
                files.append((process.num_fds(), sum(1 for _ in tmp_path.iterdir())))
            done.set()
            for thread in work:
                thread.join(200)
            assert not any(thread.is_alive() for thread in work)
        assert server.process.poll() is None, "\n".join([f"ended with {server.process.poll()}", *server.log])
        with WireClient(server.address) as client:
            assert min(client.num_updates().values()) > 0
        assert server.stop() == 0
        assert server.log == []
    third = len(resident) // 3
    middle, last = statistics.median(resident[third : 2 * third]), statistics.median(resident[2 * third :])
    allowed = 0.01 if minutes >= 10 else 0.1  # an allocator needs minutes to find its level
    assert last <= middle * (1 + allowed), f"{middle / MIB:.0f} -> {last / MIB:.0f} MiB"
    assert max(fds for fds, _ in files[2 * third :]) <= max(fds for fds, _ in files[:third]) + 8
    assert max(num for _, num in files) <= 3 + 1 + 1 + 1, (
        "three generations, the lock, one coming and one going"
    )
