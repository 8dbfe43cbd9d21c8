"""A layer of experts and the plain loop that it is to equal."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from moe_autograd.moe.experts import FeedForwardExpert
from moe_autograd.moe.layer import MixtureOfExperts
from moe_autograd.moe.routers import TopKRouter

D_MODEL = 12


def plain_loop(layer: MixtureOfExperts, x: Tensor) -> Tensor:
    """The definition: one expert after the other, in the calling thread."""
    x_TD = x.reshape(-1, x.shape[-1])
    routing = layer.router(x_TD)
    y_TD = torch.zeros_like(x_TD)
    for index, expert in enumerate(layer.experts):
        tokens, choice = (routing.expert_index == index).nonzero(as_tuple=True)
        if len(tokens):
            weights = routing.combine_weights[tokens, choice].unsqueeze(1)
            y_TD = y_TD.index_add(0, tokens, (weights * expert(x_TD[tokens])).to(x.dtype))
    return y_TD.reshape(x.shape)


def layer_of(
    make_expert: Callable[[], nn.Module] = lambda: FeedForwardExpert(D_MODEL, 20),
    num_experts: int = 6,
    top_k: int = 2,
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> MixtureOfExperts:
    torch.manual_seed(1)
    router = TopKRouter(D_MODEL, num_experts, top_k)
    return MixtureOfExperts(router, [make_expert() for _ in range(num_experts)], **options).to(dtype)


def grads_of(function: Callable[[Tensor], Tensor], layer: nn.Module, x: Tensor) -> dict[str, Tensor | None]:
    """Values and gradients of a weighted sum of the outputs."""
    layer.zero_grad(set_to_none=True)
    x = x.clone().requires_grad_()
    y = function(x)
    y.backward(torch.linspace(-1, 1, y.numel(), dtype=y.dtype).reshape(y.shape))
    return {"y": y.detach(), "x": x.grad, **{name: p.grad for name, p in layer.named_parameters()}}


def assert_equals_plain_loop(layer: MixtureOfExperts, x: Tensor, **tolerance: float) -> None:
    actual, expected = grads_of(layer, layer, x), grads_of(lambda x: plain_loop(layer, x), layer, x)
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        assert (actual[name] is None) == (value is None), name
        if value is not None:
            torch.testing.assert_close(
                actual[name], value, **tolerance, msg=lambda text, name=name: f"{name}: {text}"
            )


def favour(layer: MixtureOfExperts, expert_index: int) -> None:
    """Make the router send every positive token to one expert first."""
    with torch.no_grad():
        layer.router.weight.zero_()
        layer.router.weight[expert_index] = 1.0
