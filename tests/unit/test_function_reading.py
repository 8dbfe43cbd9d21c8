"""What is read of a module's forward, instruction by instruction. Whoever waits is never taken for arithmetic."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import silu

from tests.support.readable import (
    assert_means_the_loop,
    asserts,
    gated,
    imported_by_name,
    rms_norm,
    swiglu,
)

GAIN = 2.0


def residual(self: Any, x: Tensor) -> Tensor:
    return x + self.w2(torch.nn.functional.gelu(self.w1(x)))


def names_numbers(self: Any, x: Tensor) -> Tensor:
    return GAIN * x + math.pi


def with_a_branch(self: Any, x: Tensor) -> Tensor:
    y = F.linear(x, self.weight)
    if self.bias is not None:
        y = y + self.bias
    return y if self.count > 1 else -y


def two_results(self: Any, x: Tensor) -> Any:
    return x.sin(), (x[..., :2], torch.cat([x, x]).reshape(-1))


def with_arguments(self: Any, x: Tensor) -> Tensor:
    y = F.elu(F.leaky_relu(self.w1(x.add(x, alpha=2)), 0.1), alpha=math.sqrt(2.0))
    return F.normalize(self.activation(silu(y)), 2.0, dim=-1, eps=self.eps)


def in_one_expression(self: Any, x: Tensor) -> Tensor:
    return (y := self.w1(x)) * self.w3(x) + F.silu(y)  # 3.13 stores `y` and puts `self` on the stack in one


def with_what_may_not_be_there(self: Any, x: Tensor) -> Tensor:
    if self.count > 1:
        y = self.activation(x)
    if self.count > 1:
        x = x + y  # 3.12 looks whether it is
    return x


def calls_methods(self: Any, x: Tensor) -> Tensor:
    return self.gate(self.activate(x), y=self.through_layers(x))


def takes_more(self: Any, x: Tensor, y: Any = None, *, scale: float = 2.0) -> Tensor:
    return x * scale if y is None else x + self.w2(y)


def calls_a_method_with_a_number_by_default(self: Any, x: Tensor) -> Any:
    return self.times(x)


def split_and_gate(x: Tensor, power: float = 1.0, *, scale: float = GAIN) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return F.silu(a) * b**power * scale


def calls_functions_of_its_file(self: Any, x: Tensor) -> Tensor:
    y = split_and_gate(self.w1(x), scale=self.eps)
    return self.w2(torch.cat([y, split_and_gate(self.w3(x), 2)], dim=-1))


def of_more_functions(self: Any, x: Tensor) -> Any:
    y = self.w1(x) / (torch.norm(self.w1(x)) + self.w1(x).norm(dim=-1, keepdim=True))
    y = y + torch.linalg.vector_norm(y, dim=-1, keepdim=True) + y.logcumsumexp(-1).sinh().nan_to_num()
    y = F.prelu(y.atan() + torch.erfc(y), self.w2.bias[:1]) + torch.logaddexp(y, y.cosh().reciprocal())
    return torch.special.expit(y) + torch.atan2(y, torch.hypot(y, y)), y.cummax(0)[0]


def norms_its_weight(self: Any, x: Tensor) -> Any:
    return F.linear(x, self.weight / self.weight.norm(dim=1, keepdim=True))


def asks_what_it_is(self: Any, x: Tensor) -> Any:
    if self.kind == "relu":
        return F.relu(x)
    if self.kind in ("gelu", "gelu_new") and not isinstance(x, str):
        return F.gelu(x) * self.scale_of_all
    raise ValueError(f"expected relu or gelu, got {self.kind}")


def looks_at_a_weight(self: Any, x: Tensor) -> Any:
    """As the experts of `transformers`' Switch."""
    y = F.linear(x, self.w1.weight, self.w1.bias)
    if isinstance(self.w2.weight, torch.Tensor) and y.dtype != self.w2.weight.dtype != torch.int8:
        y = y.to(self.w2.weight.dtype)
    return self.w2(y) / self.w2.in_features


def takes_what_the_class_has(self: Any, x: Tensor) -> Tensor:
    return x * self.scale_of_all


def calls_a_static_method(self: Any, x: Tensor) -> Any:
    return self.turned(x) + x


def gives_shapes(self: Any, x: Tensor) -> Any:
    y = self.w1(x).reshape(*x.shape[:-1], 2, -1)
    return y.view(*y.shape[:1], 8) + max(len(x), abs(-2)) * float(self.count) + min(1, int(2.5))


def inverts_and_clamps(self: Any, x: Tensor) -> Any:
    return torch.where(~(x > 0), x.clamp_min(-1.0), torch.clamp_max(x, 1.0)).reshape_as(self.w2(self.w1(x)))


def returns_two_by_name(self: Any, x: Tensor) -> Any:
    named = {"x": x.sin(), "y": self.w1(x)}
    return named["y"], named


def returns_one_by_name(self: Any, x: Tensor) -> Any:
    return {"y": self.w1(x)}


ARITHMETIC = [
    *(swiglu, residual, rms_norm, gated, with_a_branch, imported_by_name, two_results, with_arguments),
    *(names_numbers, calls_methods, asserts, in_one_expression, with_what_may_not_be_there),
    *(takes_more, calls_a_method_with_a_number_by_default, calls_functions_of_its_file),
    *(asks_what_it_is, looks_at_a_weight, calls_a_static_method, gives_shapes, returns_one_by_name),
    inverts_and_clamps,
    of_more_functions,
    norms_its_weight,
    returns_two_by_name,
    takes_what_the_class_has,
]


@pytest.mark.parametrize("forward", ARITHMETIC)
def test_a_forward_that_only_computes_is_called_in_turn_and_means_the_loop(forward: Any) -> None:
    assert_means_the_loop(forward)
