"""What both sides do, told by numbers alone: imported by two interpreters, so it imports the standard library only."""

from __future__ import annotations

import random
from typing import NamedTuple


class Workload(NamedTuple):
    """Experts on one server, and what one client does with them, over and over.

    Args:
        kind: "layer": a mixture of the experts, forward, backward and update. "experts": each expert by itself,
            all at once, forward and backward. "clients": what hivemind's own `benchmark_throughput` does: each client
            is a process with one thread of torch, and calls one expert after another, chosen at random, forward and
            backward. "echo": forward of an expert that returns its input.
        num_experts: on the server.
        width: of the experts.
        num_rows: given to the layer, or to each expert.
        top_k: of the layer.
        num_handlers: processes that take hivemind's requests; its benchmark takes half as many as clients.
        num_clients: processes that call.
        num_batches: that each of them calls in a turn.
        wants_input_grads: whether the rows require grad; in hivemind's benchmark they do not.
        update: when our server applies gradients. hivemind's does with each backward; "on_step" makes two requests
            more, and the client decides.
        is_fused: whether Adam is torch's fused one, on our server and in one process.
    """

    kind: str
    num_experts: int
    width: int
    num_rows: int
    top_k: int
    num_handlers: int
    num_clients: int = 1
    num_batches: int = 0
    wants_input_grads: bool = False
    update: str = "on_backward"
    is_fused: bool = False

    def chosen_experts(self, client: int, turn: int) -> list[int]:
        """Return which experts a client calls in a turn, one after another; both sides have the same."""
        chance = random.Random(f"{client} {turn}")
        return [chance.randrange(self.num_experts) for _ in range(self.num_batches)]

    @property
    def num_samples(self) -> int:
        """How many rows are called in a turn."""
        return self.num_clients * self.num_batches * self.num_rows


WORKLOADS = {
    "step": Workload("layer", num_experts=16, width=256, num_rows=64, top_k=2, num_handlers=16),
    "experts": Workload("experts", num_experts=8, width=256, num_rows=64, top_k=0, num_handlers=16),
    "throughput": Workload(
        "clients", num_experts=1, width=1024, num_rows=2048, top_k=0, num_handlers=1, num_batches=4
    ),
    "4 clients": Workload(
        "clients",
        num_experts=4,
        width=512,
        num_rows=256,
        top_k=0,
        num_handlers=2,
        num_clients=4,
        num_batches=16,
    ),
    "echo": Workload("echo", num_experts=1, width=2048, num_rows=1024, top_k=0, num_handlers=4),  # 8 MiB
}
WORKLOADS["step, on_step"] = WORKLOADS["step"]._replace(update="on_step")
WORKLOADS["step, fused"] = WORKLOADS["step"]._replace(is_fused=True)
for name in ("throughput", "4 clients"):
    WORKLOADS[f"{name}, input gradients"] = WORKLOADS[name]._replace(wants_input_grads=True)
