"""What residency moves: parts, and the buffers that they lie in while they are in memory. No locks here.

A buffer that a part leaves is spare: the next part of its size takes it, so that memory is asked for once. Buffers in
use and spare ones together never exceed the limit; spare ones go first.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from moe_autograd.autograd.offload.flat import Layout


class Part:
    """A run of bytes that is resident or not.

    Args:
        name: in the store.
        layout: which tensors it consists of.
        attach: called with the buffer when it becomes resident.
        detach: called before its buffer is taken away.
    """

    def __init__(
        self,
        name: str,
        layout: Layout,
        attach: Callable[[torch.Tensor], None] = lambda _: None,
        detach: Callable[[], None] = lambda: None,
    ) -> None:
        self.name, self.layout, self.attach, self.detach = name, layout, attach, detach
        self.buffer: torch.Tensor | None = None  # (num_bytes,) of uint8
        self.num_holders = 0
        self.is_reading = False  # nobody has it before its bytes are there
        self.is_writing = (
            False  # may be held meanwhile; whoever changes it then says so, and it is written again
        )
        self.is_stored = False  # the store has it, perhaps not the newest
        self.is_changed = False  # since it was stored
        self.is_wished = False  # resident, and wished for since it was used last

    @property
    def is_busy(self) -> bool:
        """Whether its buffer is being read into or written from."""
        return self.is_reading or self.is_writing

    def __repr__(self) -> str:
        state = "busy" if self.is_busy else "absent" if self.buffer is None else "resident"
        return f"Part({self.name!r}, {self.layout.num_bytes} bytes, {state}, held by {self.num_holders})"


class Buffers:
    """The memory of all parts.

    Args:
        limit_bytes: for buffers in use and spare ones together.
        device: of the buffers.

    Threads: one at a time; `Residency` has the lock.
    """

    def __init__(self, limit_bytes: int, device: torch.device) -> None:
        self.limit_bytes, self.device = limit_bytes, device
        self.used_bytes = 0
        self.peak_bytes = 0
        self._spare: dict[int, list[torch.Tensor]] = {}

    @property
    def taken_bytes(self) -> int:
        """What all buffers take, the spare ones included."""
        return self.used_bytes + sum(size * len(buffers) for size, buffers in self._spare.items())

    def lacking_bytes(self, num_bytes: int) -> int:
        """Return how much has to be given back before `num_bytes` more fit; none, if not positive."""
        return self.used_bytes + num_bytes - self.limit_bytes

    def take(self, num_bytes: int) -> torch.Tensor:
        """Return a buffer of undefined bytes: a spare one of this size, or a new one in place of other spare ones."""
        spare = self._spare.get(num_bytes)
        self.used_bytes += num_bytes
        if spare:
            buffer = spare.pop()
        else:
            self._drop_spare(self.taken_bytes - self.limit_bytes)
            buffer = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        self.peak_bytes = max(self.peak_bytes, self.taken_bytes)
        return buffer

    def give_back(self, buffer: torch.Tensor) -> None:
        """Keep a buffer that is no longer used as a spare one."""
        self._spare.setdefault(buffer.numel(), []).append(buffer)
        self.used_bytes -= buffer.numel()

    def _drop_spare(self, num_bytes: int) -> None:
        for size, buffers in self._spare.items():
            while buffers and num_bytes > 0:
                buffers.pop()
                num_bytes -= size
