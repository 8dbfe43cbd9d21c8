"""A store that can be watched and disturbed."""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from moe_autograd.autograd.offload.flat import Layout
from moe_autograd.autograd.offload.parts import Part
from moe_autograd.autograd.offload.residency import Residency
from moe_autograd.autograd.offload.stores import RamStore


class WatchedStore(RamStore):
    """Writes down what is read and written; can be told to block, or to fail."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []
        self.gate = threading.Event()
        self.gate.set()
        self.failing = ""
        self.happened = threading.Condition()

    def _happen(self, event: str) -> None:
        self.gate.wait()
        if self.failing and self.failing in event:
            raise OSError(28, "No space left on device")
        with self.happened:
            self.events.append(event)
            self.happened.notify_all()

    def write(self, name: str, layout: Layout, flat: Tensor) -> None:
        self._happen(f"write {name}")
        super().write(name, layout, flat)

    def read(self, name: str, flat: Tensor) -> None:
        super().read(name, flat)
        self._happen(f"read {name}")

    def wait_for(self, event: str) -> None:
        with self.happened:
            assert self.happened.wait_for(lambda: event in self.events, timeout=60)


def put_all_out(residency: Residency) -> None:
    """Need all the memory for a moment, so that every other part leaves it."""
    large = residency.add(Part("large", Layout({}, residency.limit_bytes)))
    with residency.hold([large]):
        pass
    residency.forget(large)


def part_of(residency: Residency, name: str, num_bytes: int = 100) -> Part:
    """Return a part that is in the store; its bytes are the length of its name."""
    part = residency.add(Part(name, Layout.of({"x": torch.empty(num_bytes, dtype=torch.uint8)})))
    with residency.hold([part]):
        assert part.buffer is not None
        part.buffer.fill_(len(name))
        residency.changed(part)
    residency.flush()
    return part
