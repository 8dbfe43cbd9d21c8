"""A layer whose experts do not fit into memory trains as one whose experts do."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from moe_autograd.autograd.offload import OffloadedExperts, read_ahead
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


@pytest.mark.parametrize("copying", [copy.deepcopy, pickle.dumps])
def test_a_layer_that_cannot_be_copied_says_which_expert_stays(
    copying: Callable[[nn.Module], object],
) -> None:
    with OffloadedExperts([nn.Linear(4, 4)], make_adam, max_resident_bytes=10_000) as experts:
        layer = MixtureOfExperts(TopKRouter(4, 1, 1), experts)
        with pytest.raises(
            TypeError, match="offloaded expert 'expert-00000': expected to stay where it is, got copied"
        ):
            copying(layer)


PLACES = ["all in memory", "ram", "folder"]


@pytest.mark.parametrize("update", ["on_step", "on_backward"])
@pytest.mark.parametrize("num_microbatches", [None, 3])
@pytest.mark.parametrize("options", [{}, {"recompute": True}, {"defer_weight_grads": True}], ids=str)
def test_layers_that_share_memory_and_read_ahead_train_as_plain_ones_with_every_option(
    options: dict[str, Any],
    num_microbatches: int | None,
    update: Literal["on_step", "on_backward"],
    tmp_path: Path,
) -> None:
    """With dropout, except in micro-batches, which draw by slices."""
    dropout = 0.0 if num_microbatches else 0.4

    def train(place: str) -> list[Tensor]:
        torch.manual_seed(0)
        # In double precision: Adam makes much of what parts of a batch round otherwise.
        routers = [TopKRouter(D_MODEL, 4, top_k=2).double() for _ in range(3)]
        modules = [
            [nn.Sequential(FeedForwardExpert(D_MODEL), nn.Dropout(dropout)).double() for _ in range(4)]
            for _ in range(3)
        ]
        bytes_of_one = sum(parameter.nbytes for parameter in modules[0][0].parameters())
        optimizers: list[Any] = [make_adam([p for router in routers for p in router.parameters()])]
        experts: list[Any] = modules
        if place == "all in memory":
            optimizers += [make_adam(expert.parameters()) for own in modules for expert in own]
            layers = [MixtureOfExperts(*pair) for pair in zip(routers, experts, strict=True)]
        else:
            store = tmp_path if place == "folder" else place
            more: dict[str, Any] = {"update": update, "num_microbatches": num_microbatches}
            first = OffloadedExperts(
                modules[0], make_adam, max_resident_bytes=8 * bytes_of_one, store=store, **more
            )
            experts = [
                first,
                *(OffloadedExperts(own, make_adam, beside=first, **more) for own in modules[1:]),
            ]
            read_ahead(*experts)
            if update == "on_step":
                optimizers += experts
            layers = [MixtureOfExperts(*pair, **options) for pair in zip(routers, experts, strict=True)]
        said: list[Tensor] = []
        for _ in range(3):
            h = x = torch.randn(12, D_MODEL, dtype=torch.float64, requires_grad=True)
            for layer in layers:
                h = h + layer(h)
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss = h.square().mean()
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
            assert x.grad is not None
            said += [loss.detach(), x.grad]
        if place != "all in memory":
            assert experts[0].residency.peak_bytes <= 8 * bytes_of_one
            return [*said, *(t for own in experts for i in range(4) for t in own.state_dict(i).values())]
        return [*said, *(t for own in modules for expert in own for t in expert.state_dict().values())]

    expected, *others = [train(place) for place in PLACES]
    for other in others:
        torch.testing.assert_close(other, expected)
