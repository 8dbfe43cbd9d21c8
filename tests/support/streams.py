"""A device that only remembers: streams of numbered kernels, and which of them are known to come before which.

It stands in for an accelerator where the order of kernels is asked for, which no result on a real one can prove: a
missing event gives the right numbers most of the time. Each stream knows, by a vector clock, how far each other
stream has come at least when its next kernel runs.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

Clock = dict["Stream", int]


@dataclass(frozen=True)
class Event:
    """A point in a stream, and all that comes before it."""

    clock: Clock


@dataclass(eq=False)
class Stream:
    """A queue of kernels on one device."""

    device: int
    name: str
    is_in_capture: bool = False
    num_kernels: int = 0
    known: Clock = field(default_factory=dict)

    def record_event(self) -> Event:
        return Event({**self.known, self: self.num_kernels})

    def wait_event(self, event: Event) -> None:
        for stream, num_kernels in event.clock.items():
            self.known[stream] = max(self.known.get(stream, 0), num_kernels)

    def is_capturing(self) -> bool:
        return self.is_in_capture


@dataclass(frozen=True)
class Kernel:
    """One kernel: its stream, its place there, and what is known to come before it."""

    stream: Stream
    number: int
    known: Clock

    def comes_after(self, other: Kernel) -> bool:
        if self.stream is other.stream:
            return self.number > other.number
        return self.known.get(other.stream, 0) >= other.number


class RecordingAccelerator:
    """See `moe_autograd._streams.Accelerator`; each thread begins with device 0 and the default streams.

    Args:
        num_devices: that are in use.
    """

    def __init__(self, num_devices: int = 1) -> None:
        self.num_devices = num_devices
        self.defaults = [Stream(device, f"default {device}") for device in range(num_devices)]
        self.lanes: dict[tuple[int, int], Stream] = {}
        self.recorded: list[tuple[Any, Stream]] = []
        self._here = threading.local()

    def is_in_use(self) -> bool:
        return True

    def devices(self) -> range:
        return range(self.num_devices)

    def current_device(self) -> int:
        return getattr(self._here, "device", 0)

    def set_device(self, device: int) -> None:
        self._here.device = device

    def current_stream(self, device: int) -> Stream:
        return self._streams().get(device, self.defaults[device])

    def set_stream(self, stream: Stream) -> None:
        self._streams()[stream.device] = stream
        self._here.device = stream.device

    def lane(self, device: int, number: int) -> Stream:
        return self.lanes.setdefault((device, number), Stream(device, f"lane {number} of {device}"))

    def record(self, tensor: Any) -> None:
        self.recorded.append((tensor, self.current_stream(self.current_device())))

    def launch(self, device: int | None = None) -> Kernel:
        """Queue a kernel as an operator does: on this thread's stream of the device."""
        stream = self.current_stream(self.current_device() if device is None else device)
        stream.num_kernels += 1
        return Kernel(stream, stream.num_kernels, dict(stream.known))

    def _streams(self) -> dict[int, Stream]:
        if not hasattr(self._here, "streams"):
            self._here.streams = {}
        return self._here.streams
