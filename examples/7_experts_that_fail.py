"""Go on training while one of two servers is gone, and use its experts again when it is back.

The second server is killed in the middle, as a power cut would, and started again at the same address. The layer
goes on without its experts, and says so in `routing.failures`; `RemoteOptimizer` leaves its updates out. Nobody waits
for a server that is gone, since there are others, or tokens may become zeros.
"""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

import torch
from torch.nn import functional as F

from experts_server import ExpertsServer
from moe_autograd import FeedForwardExpert, MixtureOfExperts, TopKRouter
from moe_autograd.remote import RemoteOptimizer, connect

D_MODEL = 16


class KillableServer:
    """A server of two experts, `ffn.0` and `ffn.1`, in a process of its own."""

    def __init__(self, listen: str = "127.0.0.1:0") -> None:
        flags = ["--expert", "ffn", "--num-experts", "2", "--d-model", str(D_MODEL), "--optimizer", "adam"]
        command = [sys.executable, "-m", "experts_server", "serve", *flags, "--listen", listen]
        self.process = subprocess.Popen([*command, "--log-level", "error"], stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.address = self.process.stdout.readline().split()[-1]

    def kill(self) -> None:
        """Leave it no time for anything."""
        self.process.kill()
        self.process.communicate()


def main() -> None:
    torch.manual_seed(0)
    x, target = torch.randn(64, D_MODEL), torch.randn(64, D_MODEL)
    near = {f"near.{index}": FeedForwardExpert(D_MODEL) for index in range(2)}
    far = KillableServer()
    try:
        with (
            ExpertsServer(near, optimizer=lambda parameters: torch.optim.Adam(parameters, lr=1e-3)) as server,
            connect([server.address, far.address]) as experts,
        ):
            router = TopKRouter(D_MODEL, len(experts), top_k=2)
            layer = MixtureOfExperts(router, experts, on_failure="drop", allow_zero_outputs=True)
            here = torch.optim.Adam(layer.parameters(), lr=1e-3)
            there = RemoteOptimizer(experts, on_failure="drop")

            def train(num_steps: int) -> Counter[str]:
                """Return how often each expert was missing."""
                missing: Counter[str] = Counter()
                for _ in range(num_steps):
                    here.zero_grad(), there.zero_grad()
                    y, routing = layer(x, return_routing=True)
                    F.mse_loss(y, target).backward()
                    here.step(), there.step()
                    missing.update({failure.expert for failure in routing.failures})
                return missing

            print(f"both servers there:   missing {dict(train(5))}")
            far.kill()
            print(f"one of them killed:   missing {dict(train(5))}")
            far = KillableServer(far.address)
            num_steps = 1
            while train(1):
                num_steps += 1
            print(f"started again:        back after {num_steps} steps; missing {dict(train(5))}")
            num_updates = {name: hosted.num_updates for name, hosted in experts.info().items()}
            print(f"updates of each:      {num_updates}")
    finally:
        far.kill()


if __name__ == "__main__":
    main()
