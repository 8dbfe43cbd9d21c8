"""Buffers of offloaded experts that a call puts others in the place of, gives other memory, or changes unseen."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.ao import quantization

from moe_autograd import parallel_apply
from tests.support.offloading import assert_same_weights, both


class Counting(nn.Module):
    """Puts a new tensor in the place of a buffer instead of changing it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count = self.count + 1
        return x * self.count


def test_buffers_that_are_replaced() -> None:
    experts, plain = both(Counting, num=20, optimizer=None, max_resident_bytes=8)
    for _ in range(3):
        for modules in (experts, plain):
            for module in modules:
                result = module(torch.ones(2))
    assert torch.equal(result, torch.full((2,), 3.0))
    assert_same_weights(experts, plain)


def test_buffers_that_are_replaced_in_inference_mode() -> None:
    experts, plain = both(Counting, num=3, optimizer=None, max_resident_bytes=8)
    for mode in (torch.inference_mode, torch.enable_grad, torch.inference_mode):
        for modules in (experts, plain):
            with mode():
                for module in modules:
                    result = module(torch.ones(2))
    assert torch.equal(result, torch.full((2,), 3.0))
    assert_same_weights(experts, plain)


class Setting(nn.Module):
    """Gives a buffer the memory of another tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x) - self.mean  # of the call before
        self.mean.set_(x.detach().mean(0))
        return y


class Swapping(nn.Module):
    """Has two buffers that change their memory, each with the other."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("scale", torch.ones(8))
        self.register_buffer("shift", torch.arange(8.0))

    def forward(self, x: Tensor) -> Tensor:
        y = self.scale * self.linear(x) + self.shift
        scale = self.scale.detach().view(8)
        self.scale.set_(self.shift)
        self.shift.set_(scale)
        return y


class Alternating(nn.Module):
    """Gives a buffer other memory in turn, and keeps and returns what has that which it had before."""

    def __init__(self, set_it: Callable[[Tensor, Tensor], object]) -> None:
        super().__init__()
        self.set_it = set_it
        self.linear = nn.Linear(8, 8)
        self.register_buffer("mean", torch.zeros(8))
        self.register_buffer("num_calls", torch.zeros(()))
        self.made = torch.zeros(8)
        self.first = self.before = None

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        self.num_calls += 1  # as of `mean.data` nobody is told
        self.first = self.mean.view(2, 4) if self.first is None else self.first
        left, y = self.before, self.linear(x) - self.mean + self.first.view(-1)
        self.before = before = self.mean.detach()
        self.made.mul_(2)  # the memory of `mean`, from the second call on
        self.made = 0.9 * self.mean + x.detach().mean(0)
        self.set_it(self.mean, self.made)
        self.made.add_(1)
        return y, self.mean, before, before[2:], *([] if left is None else [left])


def set_data(tensor: Tensor, other: Tensor) -> None:
    tensor.data = other


@pytest.mark.parametrize("num_resident", [1, 3])
@pytest.mark.parametrize("set_it", [Tensor.set_, set_data])
def test_what_has_the_memory_that_a_buffer_had_before_keeps_its_values(
    set_it: Callable[[Tensor, Tensor], object], num_resident: int
) -> None:
    """Results, attributes and kept views of it read the new ones."""
    make = functools.partial(Alternating, set_it)
    experts, plain = both(make, num=3, max_resident_bytes=1400 * num_resident)
    for number in range(1, 5):
        x = torch.randn(4, 8) * number
        for module, expert in zip(plain, experts, strict=True):
            results = zip(module(x), expert(x), strict=True)
            assert all(torch.equal(*pair) for pair in results), number
    assert_same_weights(experts, plain)


class Past(nn.Module):
    """Returns what a buffer was, which it makes anew."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.ones(4))

    def forward(self, x: Tensor) -> dict[str, list[Tensor]]:
        past = [self.mean[None], self.mean.detach(), self.mean]
        past[0].note = "of the past"
        self.mean = self.mean + x.mean(0)
        return {"past": past, "now": [self.mean]}


@pytest.mark.parametrize("options", [{}, {"recompute": True}])
def test_views_that_a_call_returns_of_a_buffer_it_makes_anew_keep_their_values(
    options: dict[str, Any],
) -> None:
    """They read the new ones."""
    experts, plain = both(Past, num=2, optimizer=None)
    for _ in range(3):
        calls = [(torch.ones(2, 4),)] * 2
        for result, want in zip(
            *(parallel_apply(m, calls, **options) for m in (experts, plain)), strict=True
        ):
            for key in want:
                assert all(map(torch.equal, result[key], want[key]))
            assert result["past"][0].note == "of the past"


def make_fused_observer() -> nn.Module:
    """Its operator changes buffers and no versions."""
    fused = quantization.FusedMovingAvgObsFakeQuantize(observer=quantization.MovingAverageMinMaxObserver)
    return nn.Sequential(nn.Linear(8, 8), fused)


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated")
@pytest.mark.parametrize("num_resident", [1, 3])
@pytest.mark.parametrize("make", [Setting, Swapping, make_fused_observer])
def test_buffers_that_get_other_memory_or_change_unseen(
    make: Callable[[], nn.Module], num_resident: int, tmp_path: Path
) -> None:
    experts, plain = both(make, num=3, max_resident_bytes=1400 * num_resident, store=tmp_path)
    for number in range(1, 4):
        x = torch.randn(4, 8) * number
        for module, expert in zip(plain, experts, strict=True):
            assert torch.equal(module(x), expert(x))
        assert_same_weights(experts, plain)
        experts.checkpoint()
        experts.restore()
    assert_same_weights(experts, plain)


class SharesBuffer(nn.Module):
    """Its parts have one buffer, and in training get a new one; all of them, or only the first."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.BatchNorm1d(2), nn.BatchNorm1d(2), nn.BatchNorm1d(2)])
        self.num_renewed = len(self.parts)
        for part in self.parts:
            part.running_mean = self.parts[0].running_mean

    def forward(self, x: Tensor) -> Tensor:
        self.parts[0].num_batches_tracked += 1
        if self.training:
            mean = 0.9 * self.parts[0].running_mean + x.detach().mean(0)
            for part in self.parts[: self.num_renewed]:
                part.running_mean = mean
        return sum(i * x * part.running_mean for i, part in enumerate(self.parts, 1))


def test_a_buffer_that_parts_share_and_that_is_replaced_in_all_of_them() -> None:
    """Only the first part had got what comes and goes."""
    experts, plain = both(SharesBuffer, num=3, optimizer=None)
    for step in range(6):
        for i, module in enumerate(plain):
            x = torch.full((4, 2), step + i + 1.0)
            results = [one.train(step % 3 != 2)(x) for one in (experts[i], module)]
            assert torch.equal(*results), (step, i)
    assert_same_weights(experts, plain)


def test_a_call_that_is_refused_leaves_parts_the_buffer_that_they_share() -> None:
    experts, plain = both(SharesBuffer, num=3, optimizer=None)
    x = torch.ones(4, 2)
    module = experts[0].stands_for
    module.num_renewed = 1
    with pytest.raises(
        RuntimeError, match=r"expected a call .* parts\.1.* and parts\.0.* one tensor, got two"
    ):
        experts[0](x)
    plain[0].parts[0].num_batches_tracked += 1  # in place, as the refused call did
    assert_same_weights(experts, plain)
    module.num_renewed = 3
    for _ in range(2):
        assert torch.equal(experts[0](x), plain[0](x))
    assert_same_weights(experts, plain)
