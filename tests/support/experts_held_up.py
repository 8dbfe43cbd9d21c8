"""Experts of every kind whose kernels come late on a GPU, layers of them, and comparisons with plain loops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.nn import functional as F

from moe_autograd import FeedForwardExpert, MixtureOfExperts, TopKRouter
from moe_autograd.moe.experts import SwiGLUExpert
from moe_autograd.moe.routing import Routing
from tests.support.devices import DEVICE, hold_up
from tests.support.plain_layer import plain_loop

Apply = Callable[..., Any]  # called like `parallel_apply`
WIDTH, NUM_EXPERTS, NUM_TOKENS, NUM_CALLS = 16, 4, 48, 4
SHORT = 5_000_000  # cycles of a GPU's clock: some 3 ms


class Delay(Function):
    """A copy that comes late, in the backward too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        hold_up(SHORT)
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        hold_up(SHORT)
        return grad * 1


def delayed(x: Tensor) -> Tensor:
    late: Tensor = Delay.apply(x)  # type: ignore[no-untyped-call]  # torch's own gap
    return late


class Late(nn.Module):
    """A module whose input and output come late."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return delayed(self.inner(delayed(x)))


class Recurrent(nn.Module):
    """Each token is a sequence of its own."""

    def __init__(self, kind: Callable[..., nn.Module]) -> None:
        super().__init__()
        self.rnn = kind(4, 4, num_layers=2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.rnn(x.reshape(len(x), WIDTH // 4, 4))[0]
        return y.reshape(x.shape)


class Convolution(nn.Module):
    """Each token is a line of numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv1d(1, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv(x.unsqueeze(1)).squeeze(1)
        return y


class Attention(nn.Module):
    """Each token is two rows that attend to each other."""

    def __init__(self) -> None:
        super().__init__()
        self.project = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).reshape(len(x), 1, 6, WIDTH // 2).chunk(3, dim=2)
        return F.scaled_dot_product_attention(q, k, v).reshape(x.shape)


EXPERTS: dict[str, Callable[[], nn.Module]] = {
    "feed-forward": lambda: FeedForwardExpert(WIDTH, 32),
    "swiglu": lambda: SwiGLUExpert(WIDTH, 32),
    "convolution": Convolution,
    "lstm": lambda: Recurrent(nn.LSTM),
    "gru": lambda: Recurrent(nn.GRU),
    "batch norm": lambda: nn.BatchNorm1d(WIDTH),
    "attention": Attention,
}


class ByPosition(nn.Module):
    """A router of a user's own, without logits that mean anything: tokens take turns, with weights that are learnt."""

    num_experts = NUM_EXPERTS

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, NUM_EXPERTS)

    def forward(self, x: Tensor) -> Routing:
        logits = self.gate(x.reshape(-1, WIDTH))
        index = torch.arange(len(logits), device=x.device).unsqueeze(1) % NUM_EXPERTS
        return Routing(logits, logits.softmax(-1), index, logits.sigmoid().gather(1, index))


ROUTERS: dict[str, Callable[[], nn.Module]] = {
    "top 1, not normalized": lambda: TopKRouter(WIDTH, NUM_EXPERTS, top_k=1, normalize=False),
    "top 2": lambda: TopKRouter(WIDTH, NUM_EXPERTS, top_k=2),
    "all": lambda: TopKRouter(WIDTH, NUM_EXPERTS, top_k=NUM_EXPERTS),
    "top 2, some dropped": lambda: TopKRouter(WIDTH, NUM_EXPERTS, top_k=2, capacity_factor=0.75),
    "a user's own": ByPosition,
}


def layer_of(
    make_expert: Callable[[], nn.Module],
    make_router: Callable[[], nn.Module] = ROUTERS["top 2"],
    dtype: torch.dtype = torch.float64,
    **options: Any,
) -> MixtureOfExperts:
    torch.manual_seed(1)
    experts = [Late(make_expert()) for _ in range(NUM_EXPERTS)]
    return MixtureOfExperts(make_router(), experts, **options).to(DEVICE, dtype)


def tokens(num_tokens: int = NUM_TOKENS, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randn(num_tokens, WIDTH, generator=generator, dtype=dtype).to(DEVICE)


def step(function: Callable[[Tensor], Tensor], layer: nn.Module, x: Tensor) -> dict[str, Tensor]:
    """Values, gradients and buffers; the caller's own kernels come late as well."""
    layer.zero_grad(set_to_none=True)
    x = x.clone().requires_grad_()
    y = delayed(function(delayed(x)))
    y.backward(torch.linspace(-1, 1, y.numel(), dtype=y.dtype, device=y.device).reshape(y.shape))
    grads = {
        name: tensor.grad * 1
        for name, tensor in [("x", x), *layer.named_parameters()]
        if tensor.grad is not None
    }
    buffers = {f"{name} itself": buffer.clone() for name, buffer in layer.named_buffers()}
    return {"y": y.detach(), **grads, **buffers}


def assert_equals_plain_loop(
    make: Callable[[], MixtureOfExperts], x: Tensor, tolerance: float | None = None
) -> None:
    ours, theirs = make(), make()
    got, expected = step(ours, ours, x), step(lambda x: plain_loop(theirs, x), theirs, x)
    torch.testing.assert_close(got, expected, rtol=tolerance, atol=tolerance)
