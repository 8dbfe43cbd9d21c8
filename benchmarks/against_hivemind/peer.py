"""hivemind's side, in an interpreter of its own: serves and calls experts, and tells how long each turn took.

Reads a line for each turn from stdin and answers with a line of JSON. The first line is written when it is ready.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
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


def main(name: str) -> None:
    workload = WORKLOADS[name]
    uids = [f"expert.{index}" for index in range(workload.num_experts)]
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
        if workload.kind == "layer":
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
        dht.shutdown()


if __name__ == "__main__":
    main(sys.argv[1])
