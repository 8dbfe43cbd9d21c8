"""What both sides do, told by numbers alone: imported by two interpreters, so it imports nothing."""

from __future__ import annotations

from typing import NamedTuple


class Workload(NamedTuple):
    """Experts on one server, and what one client does with them, over and over.

    Args:
        kind: "layer": a mixture of the experts, forward, backward and update. "experts": each expert by itself,
            all at once, forward and backward. "echo": forward of an expert that returns its input.
        num_experts: on the server.
        width: of the experts.
        num_rows: given to the layer, or to each expert.
        top_k: of the layer.
        num_handlers: processes that take hivemind's requests; it starts eight for each expert by default.
    """

    kind: str
    num_experts: int
    width: int
    num_rows: int
    top_k: int
    num_handlers: int


WORKLOADS = {
    "step": Workload("layer", num_experts=16, width=256, num_rows=64, top_k=2, num_handlers=16),
    "experts": Workload("experts", num_experts=8, width=256, num_rows=64, top_k=0, num_handlers=16),
    "throughput": Workload("experts", num_experts=1, width=1024, num_rows=2048, top_k=0, num_handlers=8),
    "echo": Workload("echo", num_experts=1, width=2048, num_rows=1024, top_k=0, num_handlers=4),  # 8 MiB
}
