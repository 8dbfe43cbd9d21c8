"""Calls that queue kernels on a device that only remembers (`tests.support.streams`)."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from tests.support.functions_waiting import PATIENCE_S
from tests.support.streams import Kernel, RecordingAccelerator

NUM_CALLS = 4


def launch_everywhere(accelerator: RecordingAccelerator) -> list[Kernel]:
    return [accelerator.launch(device) for device in accelerator.devices()]


class Launches(Function):
    """Queues a kernel on each device, in forward and in backward, once all calls have come."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, launch: Callable[[str], None]) -> Tensor:
        ctx.launch = launch
        launch("forward")
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        ctx.launch("backward")
        return grad * 2, None


class Log:
    """The kernels of all calls, by pass."""

    def __init__(self, accelerator: RecordingAccelerator, num_calls: int = NUM_CALLS) -> None:
        self.kernels: dict[str, list[Kernel]] = {"forward": [], "backward": []}
        self._accelerator = accelerator
        self._barrier = threading.Barrier(num_calls)

    def launch(self, where: str) -> None:
        self._barrier.wait(PATIENCE_S)
        self.kernels[where] += launch_everywhere(self._accelerator)


def leaves() -> list[Tensor]:
    return [torch.ones(2, requires_grad=True) for _ in range(NUM_CALLS)]


def assert_between(earlier: list[Kernel], kernels: list[Kernel], later: list[Kernel]) -> None:
    assert all(kernel.comes_after(other) for kernel in kernels for other in earlier)
    assert all(other.comes_after(kernel) for kernel in kernels for other in later)
