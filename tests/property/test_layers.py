"""Whatever a layer is made of, and whoever fails in it, it computes what the documentation says, token by token.

Random layers: experts of many kinds, some of which stand in several places, are frozen, or fail in the forward or the
backward; routers with and without capacity; both ways to treat failures. The reference takes one token after the other
and knows no dispatch, no plan and no map.
"""

from __future__ import annotations

import math
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import Function

from moe_autograd import MixtureOfExperts, TopKRouter
from moe_autograd.errors import TooFewExpertsError

NUM_LAYERS, AT_ONCE = 80, 20
CLOSE = 1e-9
D = 5

KINDS = ["linear", "gated", "in place", "constant", "without weights", "of no gradient", "its input"]
SHAPES = [(D,), (1, D), (7, D), (2, 3, D), (0, D), (12, D)]


class _IsLostInTheBackward(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ConnectionError


class Expert(nn.Module):
    """One of `KINDS`, which may fail in one of the phases."""

    def __init__(self, kind: str, fails: str) -> None:
        super().__init__()
        self.kind, self.fails = kind, fails
        self.linear, self.gate = (nn.Linear(D, D, dtype=torch.float64) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        if self.fails == "forward":
            raise ConnectionError
        y = self.value(x.mul_(2) if self.kind == "in place" else x)
        return _IsLostInTheBackward.apply(y) if self.fails == "backward" else y

    def of_token(self, x_D: Tensor) -> Tensor:
        """Return what it means for one token; through what is lost in the backward no gradient flows."""
        y_D = self.value(x_D[None] * (2 if self.kind == "in place" else 1))[0]
        return y_D.detach() if self.fails == "backward" else y_D

    def value(self, x: Tensor) -> Tensor:
        match self.kind:
            case "gated":
                return self.linear(x) * self.gate(x).sigmoid() + x
            case "constant":
                return self.linear.bias.expand_as(x)
            case "without weights":
                return x.sin()
            case "of no gradient":
                return self.linear(x.detach())
            case "its input":
                return x
        return self.linear(x)


def random_layer(draw: random.Random) -> MixtureOfExperts:
    num_experts = draw.randint(1, 6)
    top_k = draw.randint(1, num_experts)
    router = TopKRouter(D, num_experts, top_k, normalize=draw.random() < 0.7, dtype=torch.float64)
    router.capacity_factor = draw.choice([None, None, 0.5, 1.0, 1.25, 100])
    options: dict[str, Any] = {"max_concurrency": draw.choice([None, None, 1, 2])}
    drops = draw.random() < 0.5
    if drops:
        options |= {"on_failure": "drop", "min_experts": draw.randint(1, top_k)}
        options["allow_zero_outputs"] = draw.random() < 0.5
    fails = ["", "", "", "forward", "backward"] if drops else [""]
    experts = [Expert(draw.choice(KINDS), draw.choice(fails)) for _ in range(num_experts)]
    if draw.random() < 0.3:
        experts[0] = experts[-1]
    draw.choice(experts).requires_grad_(draw.random() < 0.8)
    if all(expert.kind != "in place" for expert in experts):
        options["recompute"] = draw.random() < 0.3
    options["defer_weight_grads"] = not drops and draw.random() < 0.3
    return MixtureOfExperts(router, experts, **options)


def kept_of(choices: list[tuple[int, int, float]], capacity: int) -> set[tuple[int, int]]:
    """Return the (token, expert) that capacity leaves, of (token, expert, weight)."""
    kept = set()
    for index in {index for _, index, _ in choices}:
        own = sorted((-weight, token) for token, i, weight in choices if i == index)
        kept |= {(token, index) for _, token in own[:capacity]}
    return kept


def token_by_token(layer: MixtureOfExperts, x: Tensor) -> Tensor | list[int]:
    """Return what the layer means, or the tokens that have too few experts."""
    router, tolerance, tokens = layer.router, layer.tolerance, x.reshape(-1, D)
    num_choices = len(tokens) * router.top_k
    weights: list[dict[int, Tensor]] = []
    for x_D in tokens:
        p_E = (router.weight @ x_D).softmax(0)
        chosen = sorted(range(router.num_experts), key=lambda i, p_E=p_E: -p_E[i].item())[: router.top_k]
        total = sum(p_E[i] for i in chosen) if router.normalize else 1.0
        weights.append({i: p_E[i] / total for i in chosen})
    factor = router.capacity_factor or router.num_experts  # which drops none
    capacity = math.ceil(min(factor * num_choices / router.num_experts, num_choices))
    kept = kept_of([(t, i, w.item()) for t, own in enumerate(weights) for i, w in own.items()], capacity)
    lost = {i for i, expert in enumerate(layer.experts) if expert.fails == "forward"}
    rows, short = list[Tensor](), list[int]()
    for t, (x_D, own) in enumerate(zip(tokens, weights, strict=True)):
        left = [i for i in own if (t, i) in kept]
        answered = [i for i in left if i not in lost]
        is_short = len(answered) < min(tolerance.min_experts, len(left))
        if is_short:
            short.append(t)
            answered = []
        share = sum(own[i] for i in left) / sum(own[i] for i in answered) if answered else 0.0
        scale = share if len(answered) < len(left) else 1.0
        parts = [own[i] * scale * layer.experts[i].of_token(x_D) for i in answered]
        rows.append(sum(parts, torch.zeros(D, dtype=torch.float64)))
    if short and not tolerance.allow_zero_outputs:
        return short
    return torch.stack(rows).reshape(x.shape) if rows else x * 0


def gradients_of(y: Tensor, layer: nn.Module, x: Tensor) -> list[Tensor]:
    """No gradient counts as zero: an expert that nothing flows through may have none."""
    trained = [tensor for tensor in (x, *layer.parameters()) if tensor.requires_grad]
    loss = (y * torch.linspace(-1, 1, y.numel(), dtype=y.dtype).reshape(y.shape) + y.square()).sum()
    if not loss.requires_grad:
        return [torch.zeros_like(tensor) for tensor in trained]
    grads = torch.autograd.grad(loss, trained, allow_unused=True, materialize_grads=True)
    return list(grads)


@pytest.mark.parametrize("first", range(0, NUM_LAYERS, AT_ONCE))
def test_a_random_layer_computes_what_it_means_token_by_token(first: int) -> None:
    for seed in range(first, first + AT_ONCE):
        draw = random.Random(seed)
        torch.manual_seed(seed)
        layer = random_layer(draw)
        x = torch.randn(draw.choice(SHAPES), dtype=torch.float64).requires_grad_(draw.random() < 0.8)
        expected = token_by_token(layer, x)
        if isinstance(expected, list):
            with pytest.raises(TooFewExpertsError) as caught:
                layer(x)
            assert list(caught.value.tokens) == expected, f"layer {seed}"
            continue
        y = layer(x)
        found = [y, *gradients_of(y, layer, x)]
        torch.testing.assert_close(
            found,
            [expected, *gradients_of(expected, layer, x)],
            rtol=CLOSE,
            atol=CLOSE,
            msg=lambda text, seed=seed: f"layer {seed}: {text}",
        )
