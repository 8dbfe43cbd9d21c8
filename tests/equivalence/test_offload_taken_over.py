"""What offloading takes over: modules of dense tensors with values, and optimizers that gradients are enough for."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe_autograd.autograd.offload import OffloadedExperts
from tests.support.offloading import OPTIMIZERS

sgd = OPTIMIZERS["sgd"]


def offloaded(*modules: nn.Module, **options: Any) -> OffloadedExperts:
    return OffloadedExperts(modules, sgd, **{"max_resident_bytes": 10_000, **options})


class Buffered(nn.Module):
    def __init__(self, value: Tensor) -> None:
        super().__init__()
        self.register_buffer("kept", value)

    def forward(self) -> Tensor:
        return self.get_buffer("kept").clone()


def test_tensors_without_bytes_or_elsewhere_are_refused_by_name() -> None:
    with torch.device("meta"):
        empty = nn.Linear(4, 4)
    for modules in ([empty], [nn.Linear(4, 4), empty]):
        with pytest.raises(ValueError, match=r"expected weight with values, on (cpu|meta), got one on meta"):
            offloaded(*modules)
    with pytest.raises(
        ValueError, match=r"expert-00000: expected weight with values, .* got one without a shape"
    ):
        offloaded(nn.LazyLinear(4))


def test_weights_of_a_dtype_that_safetensors_has_not_are_refused_with_those_that_it_has() -> None:
    with pytest.raises(
        TypeError, match=r"got torch\.complex128 \(name='weight'\)\. Keep the expert .* complex64"
    ):
        offloaded(nn.Linear(4, 4, dtype=torch.complex128))


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("way", [Tensor.to_sparse, Tensor.to_sparse_csr])
def test_a_sparse_buffer_is_refused_by_name(way: Any) -> None:
    with pytest.raises(
        TypeError, match=r"expected a dense tensor, got one of torch\.sparse_.* \(name='kept'\)"
    ):
        offloaded(Buffered(way(torch.eye(3))))


@pytest.mark.parametrize(
    "dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.uint64, torch.uint32, torch.uint16]
)
def test_buffers_of_every_dtype_of_safetensors_come_and_go(dtype: torch.dtype, tmp_path: Path) -> None:
    values = [torch.arange(8.0).add(i).to(dtype) for i in range(4)]
    size = values[0].nbytes
    with offloaded(*map(Buffered, values), max_resident_bytes=2 * size, store=tmp_path) as experts:
        experts.checkpoint()
        for order in ([0, 1, 2, 3], [2, 0, 3, 1]):
            for i in order:
                assert torch.equal(experts[i]().double(), values[i].double())
        experts.restore()
        assert torch.equal(experts.state_dict(1)["kept"].double(), values[1].double())


class _Wrapped:
    """As wrappers of others are, whose step passes on whatever it gets."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.param_groups, self.state = inner, inner.param_groups, inner.state

    def step(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner.step(*args, **kwargs)


@pytest.mark.parametrize(
    ("optimizer", "wants"),
    [(torch.optim.LBFGS, "closure"), (torch.optim.SparseAdam, "sparse gradients")],
)
def test_an_optimizer_whose_step_wants_what_nobody_has_is_refused_when_the_experts_are_built(
    optimizer: Any, wants: str
) -> None:
    module = nn.Linear(4, 4)
    with pytest.raises(
        TypeError, match=rf"expert-00000: expected .*, got {optimizer.__name__}, whose step wants {wants}\. C"
    ):
        OffloadedExperts([module], optimizer, max_resident_bytes=10_000)
    # It was not taken over.
    experts = OffloadedExperts([module], lambda p: _Wrapped(sgd(p)), max_resident_bytes=10_000)
    experts[0](torch.ones(2, 4)).sum().backward()
    experts.step()


def _scheduled(make: Any) -> Any:
    def made(parameters: Any) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = make(parameters)
        torch.optim.lr_scheduler.StepLR(optimizer, 2)
        return optimizer

    return made


def _in_a_partial(make: Any) -> Any:
    def made(parameters: Any) -> Any:
        optimizer = make(parameters)
        optimizer.step = functools.partial(optimizer.step)
        return optimizer

    return made


@pytest.mark.parametrize("made", [_scheduled, lambda make: _in_a_partial(_scheduled(make)), _in_a_partial])
def test_an_optimizer_that_has_a_schedule_is_taken_and_asked_for_no_self(made: Any) -> None:
    """A schedule puts a function in the place of its `step`, which looks as one that wants `self`: all were refused."""
    experts = OffloadedExperts([nn.Linear(4, 4)], made(sgd), max_resident_bytes=10_000)
    experts[0](torch.ones(2, 4)).sum().backward()
    experts.step()
    with pytest.raises(TypeError, match=r"got LBFGS, whose step wants closure\. C"):
        OffloadedExperts([nn.Linear(4, 4)], made(torch.optim.LBFGS), max_resident_bytes=10_000)
