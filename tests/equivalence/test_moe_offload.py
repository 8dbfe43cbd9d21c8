"""A layer whose experts do not fit into memory trains as one whose experts do."""

from __future__ import annotations

import copy
from collections.abc import Iterable

import torch
from torch import nn
from torch.nn import functional as F

from moe_autograd.autograd.offload import OffloadedExperts
from moe_autograd.moe.experts import FeedForwardExpert
from moe_autograd.moe.layer import MixtureOfExperts
from moe_autograd.moe.routers import TopKRouter

D_MODEL, NUM_EXPERTS = 16, 8


def make_adam(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.Adam(parameters, lr=1e-2)


def test_losses_are_those_of_a_layer_whose_experts_are_all_in_memory() -> None:
    torch.manual_seed(0)
    router = TopKRouter(D_MODEL, NUM_EXPERTS, top_k=2)
    modules = [FeedForwardExpert(D_MODEL) for _ in range(NUM_EXPERTS)]
    plain = copy.deepcopy(MixtureOfExperts(router, modules))
    bytes_of_one = sum(parameter.nbytes for parameter in modules[0].parameters())
    offloaded = OffloadedExperts(modules, make_adam, max_resident_bytes=3 * 4 * bytes_of_one)
    layer = MixtureOfExperts(router, offloaded)
    here, all_of_plain = make_adam(router.parameters()), make_adam(plain.parameters())

    x, target = torch.randn(2, 64, D_MODEL)
    losses: list[tuple[float, float]] = []
    for _ in range(10):
        pair = F.mse_loss(layer(x), target), F.mse_loss(plain(x), target)
        for optimizer in (here, offloaded, all_of_plain):
            optimizer.zero_grad()
        for loss in pair:
            loss.backward()
        for optimizer in (here, offloaded, all_of_plain):
            optimizer.step()
        losses.append((pair[0].item(), pair[1].item()))

    of_layer, of_plain = zip(*losses, strict=True)
    torch.testing.assert_close(of_layer, of_plain, rtol=1e-4, atol=0)
    assert of_plain[-1] < of_plain[0]
    assert offloaded.resident_bytes < NUM_EXPERTS * bytes_of_one * 4
