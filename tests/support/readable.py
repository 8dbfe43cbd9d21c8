"""Experts with forwards that a map may read (`autograd.arithmetic`)."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.functional import silu

from moe_autograd import parallel_apply
from moe_autograd.autograd import in_turn
from moe_autograd.autograd.reading.arithmetic import reading_of


def only_computes(module: object) -> bool:
    """Whether it is read as a module whose forward only computes, if its parts do not either."""
    reading = reading_of(type(module))
    return reading is not None and isinstance(module, nn.Module) and reading.fits(module)


class Expert(nn.Module):
    """Has what the forwards below name."""

    scale_of_all = 2.0
    wait_of_all = threading.Barrier(1).wait

    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = nn.Linear(4, 8), nn.Linear(8, 4), nn.Linear(4, 8)
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.bias = None
        self.eps, self.count, self.kind, self.of_which = 1e-6, 2, "gelu", None
        self.register_buffer("shift", torch.randn(4))
        self.activation = F.silu
        self.barrier = threading.Barrier(1)
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Sequential(nn.Tanh(), nn.Linear(4, 4))])
        self.norms = nn.Sequential(nn.LayerNorm(4), nn.RMSNorm(4))
        self.in_a_list = [self.w1]
        self.dropout = nn.Dropout(0.5)

    @property
    def of_class(self) -> Tensor:
        return self.weight

    def gate(self, x: Tensor, y: Tensor) -> Tensor:
        return self.activate(y) * x

    def activate(self, x: Tensor) -> Tensor:
        return F.silu(x)

    def through_layers(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x

    def wait(self, x: Tensor) -> Tensor:
        self.barrier.wait()
        return x

    def gate_and_wait(self, x: Tensor) -> Tensor:
        return self.gate(x, self.wait(x))

    def again(self, x: Tensor) -> Tensor:
        return self.again(x)

    def change(self, x: Tensor, activation: Any = F.relu) -> Any:
        return activation(x, True)

    def times(self, x: Tensor, factor: float = 2.0) -> Tensor:
        return x * factor

    def without_self() -> float:  # type: ignore[misc]
        return 1.0

    def call_first(self, pair: Any, x: Tensor) -> Any:
        return pair[0](x, True)

    @staticmethod
    def turned(x: Tensor) -> Tensor:
        first, second = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
        return torch.cat([-second, first], dim=-1)

    @staticmethod
    def wait_of_nobody(x: Tensor) -> Tensor:
        return wait(x)

    @classmethod
    def of_the_class(cls, x: Tensor) -> Tensor:
        return x


def assert_means_the_loop(forward: Any) -> None:
    """Assert that calls of it are made in turn, in the caller's graph, and give what a loop gives."""
    kind = type("Own", (Expert,), {"forward": forward})
    assert_modules_mean_the_loop([kind() for _ in range(3)])


def assert_modules_mean_the_loop(modules: list[Any]) -> None:
    """Assert that calls of these are made in turn, in the caller's graph, and give what a loop gives."""
    xs = [torch.randn(3, 4, requires_grad=True) for _ in modules]
    assert all(map(only_computes, modules))
    assert in_turn.call_in_turn(modules, [(x,) for x in xs], [{}] * 3) is not None
    mapped = parallel_apply(modules, [(x,) for x in xs])
    for one, module, x in zip(mapped, modules, xs, strict=True):
        flat, same = torch.utils._pytree.tree_leaves(one), torch.utils._pytree.tree_leaves(module(x))
        assert all(map(torch.equal, flat, same))
        assert type(flat[0].grad_fn) is type(same[0].grad_fn)  # no node of ours


_BARRIER = threading.Barrier(1)


def wait(x: Tensor) -> Tensor:
    _BARRIER.wait()
    return x


def expert_with(forward: Callable[..., Any]) -> Expert:
    """Return an instance of a class of its own with this forward."""
    return type("Own", (Expert,), {"forward": forward})()


def swiglu(self: Any, x: Tensor) -> Tensor:
    return self.w2(F.silu(self.w1(x)) * self.w3(x))


def rms_norm(self: Any, x: Tensor) -> Tensor:
    dtype = x.dtype
    y = x.float()
    y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
    return self.weight[0] * y.to(dtype)


def gated(self: Any, x: Tensor) -> Tensor:
    gate, up = self.w1(x).chunk(2, dim=-1)
    return self.activation(gate) * up / math.sqrt(x.shape[-1]) - self.shift


def imported_by_name(self: Any, x: Tensor) -> Tensor:
    return silu(x @ self.weight.T)


def waits(self: Any, x: Tensor) -> Tensor:
    self.barrier.wait()
    return x


def asserts(self: Any, x: Tensor) -> Tensor:  # pytest has assertions of its own in its tests' files
    assert x.dim() == self.count, f"expected {self.count} dimensions, got {x.shape!r}, {self.eps:.1e}"
    return -x
