"""Host experts on a server and train them from a client, with the losses of training them locally.

The server usually runs elsewhere, from a shell:

    experts-server serve --expert ffn --num-experts 4 --d-model 32 --optimizer adam --lr 1e-3 --listen 127.0.0.1:31415

Here it runs in the background of this script, with modules of our own, so that both sides can be seen and compared.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from experts_server import ExpertsServer
from moe_autograd import MixtureOfExperts, TopKRouter
from moe_autograd.remote import RemoteOptimizer, connect

D_MODEL, NUM_EXPERTS, NUM_STEPS = 32, 4, 20


class Gated(nn.Module):
    """An expert of our own: any module that maps (num_tokens, d_model) to the same shape."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.value = nn.Linear(D_MODEL, D_MODEL), nn.Linear(D_MODEL, D_MODEL)

    def forward(self, x: Tensor) -> Tensor:
        """Compute ``sigmoid(gate(x)) * value(x)``."""
        return torch.sigmoid(self.gate(x)) * self.value(x)


def make_adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Make the optimizer of one expert; the server calls this for each."""
    return torch.optim.Adam(parameters, lr=1e-3)


def main() -> None:
    torch.manual_seed(0)
    modules = {f"gated.{index}": Gated() for index in range(NUM_EXPERTS)}
    router = TopKRouter(D_MODEL, NUM_EXPERTS, top_k=2)
    local = copy.deepcopy(MixtureOfExperts(router, modules))  # the same, to be trained here
    x, target = torch.randn(128, D_MODEL), torch.randn(128, D_MODEL)

    with ExpertsServer(modules, optimizer=make_adam) as server, connect(server.address) as experts:
        print(f"serving {', '.join(experts)} at {server.address}")
        remote = MixtureOfExperts(router, experts)
        of_router = make_adam(router.parameters())
        of_experts = RemoteOptimizer(experts)
        of_all = make_adam(local.parameters())
        for step in range(NUM_STEPS):
            remote_loss, local_loss = F.mse_loss(remote(x), target), F.mse_loss(local(x), target)
            for optimizer in (of_router, of_experts, of_all):
                optimizer.zero_grad()
            remote_loss.backward()
            local_loss.backward()
            for optimizer in (of_router, of_experts, of_all):
                optimizer.step()
            if step % 5 == 4:
                print(
                    f"step {step + 1:2}: loss {remote_loss.item():.6f} remote, {local_loss.item():.6f} local"
                )
        num_updates = {name: hosted.num_updates for name, hosted in experts.info().items()}

    print(f"updates by the server's own count: {num_updates}")
    for trained, twin in zip(modules.values(), local.experts, strict=True):
        torch.testing.assert_close(trained.state_dict(), twin.state_dict(), rtol=1e-4, atol=1e-6)
    print("the weights on the server are those of training locally")


if __name__ == "__main__":
    main()
