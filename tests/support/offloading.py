"""Plain modules and the same ones offloaded, and what is to be equal."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from moe_autograd.autograd.offload import OffloadedExperts

Make = Callable[[Iterable[nn.Parameter]], Optimizer]


OPTIMIZERS: dict[str, Make] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True, fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, centered=True),
}


def ffn() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 8))


def weights_of(modules: list[nn.Module]) -> list[dict[str, Tensor]]:
    return [{name: value.clone() for name, value in module.state_dict().items()} for module in modules]


def assert_same_weights(experts: OffloadedExperts, plain: list[nn.Module]) -> None:
    for i, module in enumerate(plain):
        got, want = experts.state_dict(i), module.state_dict()
        assert got.keys() == want.keys()
        for name in want:
            torch.testing.assert_close(got[name], want[name], msg=lambda text, n=name: f"{n}: {text}")


def assert_same_gradients(experts: OffloadedExperts, plain: list[nn.Module]) -> None:
    for i, module in enumerate(plain):
        got, want = experts.gradients(i), {n: p.grad for n, p in module.named_parameters()}
        assert {n for n, g in got.items() if g is not None} == {n for n, g in want.items() if g is not None}
        for name, grad in want.items():
            if grad is not None:
                torch.testing.assert_close(got[name], grad, msg=lambda text, n=name: f"{n}: {text}")


def both(
    make: Callable[[], nn.Module], num: int = 5, optimizer: Make | None = OPTIMIZERS["adam"], **options: Any
) -> tuple[OffloadedExperts, list[nn.Module]]:
    torch.manual_seed(0)
    plain = [make() for _ in range(num)]
    size = sum(t.nbytes for t in (*plain[0].parameters(), *plain[0].buffers()))
    options = {"max_resident_bytes": 5 * size + 64, **options}
    return OffloadedExperts(copy.deepcopy(plain), optimizer, **options), plain
