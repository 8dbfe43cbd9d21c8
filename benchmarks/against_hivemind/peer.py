"""hivemind's side, in an interpreter of its own: serves and calls experts, and tells how long each turn took.

Reads a line for each turn from stdin and answers with a line of JSON. The first line is written when it is ready.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.pool import ThreadPool

import hivemind
import torch
from hivemind.moe import RemoteMixtureOfExperts, get_experts
from hivemind.moe.client.expert import RemoteExpert
from hivemind.moe.server.server import background_server
from workloads import WORKLOADS, Workload

ATTEMPTS_TO_FIND = 60


def find(dht: hivemind.DHT, uids: list[str]) -> list[RemoteExpert]:
    """Return the experts once all are declared, which takes the server a moment."""
    for _ in range(ATTEMPTS_TO_FIND):
        found = get_experts(dht, uids)
        if all(expert is not None for expert in found):
            return found
        time.sleep(0.5)
    raise SystemExit(f"hivemind: expected experts {uids}, got {found}")


def layer_turn(workload: Workload, dht: hivemind.DHT) -> Callable[[], object]:
    layer = RemoteMixtureOfExperts(
        in_features=workload.width,
        grid_size=(workload.num_experts,),
        dht=dht,
        uid_prefix="expert.",
        k_best=workload.top_k,
    )
    optimizer = torch.optim.Adam(layer.parameters(), lr=1e-3)
    x = torch.randn(workload.num_rows, workload.width)

    def turn() -> None:  # the server applies each backward at once, with its Adam
        optimizer.zero_grad()
        layer(x).square().mean().backward()
        optimizer.step()

    return turn


def experts_turn(workload: Workload, experts: list[RemoteExpert]) -> Callable[[], object]:
    """All at once, each on a thread of its own: that is how hivemind's users call several experts of their choice."""
    pool = ThreadPool(len(experts))
    x = torch.randn(workload.num_rows, workload.width)

    def one(expert: RemoteExpert) -> None:
        expert(x.clone().requires_grad_()).sum().backward()

    return lambda: pool.map(one, experts)


def echo_turn(workload: Workload, expert: RemoteExpert) -> Callable[[], object]:
    x = torch.randn(workload.num_rows, workload.width)

    def turn() -> None:
        with torch.no_grad():
            expert(x)

    return turn


class Clients:
    """Client processes, each with one thread of torch; in a turn all of them call at once, until the last is done."""

    def __init__(self, name: str, addresses: Sequence[object]) -> None:
        self._num_turns = 0
        self._processes = [
            subprocess.Popen(
                [
                    sys.executable,
                    "-W",
                    "ignore",
                    __file__,
                    name,
                    "--client",
                    str(client),
                    *map(str, addresses),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for client in range(WORKLOADS[name].num_clients)
        ]
        self._wait_for("ready")

    def turn(self) -> None:
        for process in self._processes:
            process.stdin.write(f"{self._num_turns}\n")
            process.stdin.flush()
        self._wait_for("done")
        self._num_turns += 1

    def close(self) -> None:
        for process in self._processes:
            process.communicate()

    def _wait_for(self, word: str) -> None:
        for process in self._processes:
            while (line := process.stdout.readline()) != f"{word}\n":  # its libraries print too
                if not line:
                    raise SystemExit(
                        f"hivemind: expected {word!r} of a client, got its end ({process.wait()})"
                    )


def be_client(name: str, client: int, addresses: list[str]) -> None:
    workload = WORKLOADS[name]
    torch.set_num_threads(1)
    dht = hivemind.DHT(initial_peers=addresses, start=True, client_mode=True)
    experts = find(dht, uids_of(workload))
    x = torch.randn(workload.num_rows, workload.width, requires_grad=workload.wants_input_grads)
    print("ready", flush=True)
    for turn in sys.stdin:
        for index in workload.chosen_experts(client, int(turn)):
            experts[index](x).sum().backward()
        print("done", flush=True)
    dht.shutdown()


def uids_of(workload: Workload) -> list[str]:
    return [f"expert.{index}" for index in range(workload.num_experts)]


def main(name: str) -> None:
    workload = WORKLOADS[name]
    uids = uids_of(workload)
    server = background_server(
        expert_uids=uids,
        expert_cls="nop" if workload.kind == "echo" else "ffn",
        hidden_dim=workload.width,
        device="cpu",
        num_handlers=workload.num_handlers,
        max_batch_size=16384,
    )
    with server as info:
        dht = hivemind.DHT(initial_peers=info.addrs, start=True, client_mode=True)
        experts = find(dht, uids)
        clients = Clients(name, info.addrs) if workload.kind == "clients" else None
        if clients is not None:
            turn = clients.turn
        elif workload.kind == "layer":
            turn = layer_turn(workload, dht)
        elif workload.kind == "experts":
            turn = experts_turn(workload, experts)
        else:
            turn = echo_turn(workload, experts[0])
        print(json.dumps({"hivemind": hivemind.__version__, "torch": torch.__version__}), flush=True)
        for _ in sys.stdin:
            began_s = time.perf_counter()
            turn()
            print(json.dumps({"s": time.perf_counter() - began_s}), flush=True)
        if clients is not None:
            clients.close()
        dht.shutdown()


if __name__ == "__main__":
    if sys.argv[2:3] == ["--client"]:
        be_client(sys.argv[1], int(sys.argv[3]), sys.argv[4:])
    else:
        main(sys.argv[1])
