"""What residency moves: parts, the buffers that they lie in while they are in memory, and who leaves first.

No locks here: `Residency` has the only one.

A buffer that a part leaves is spare: the next part of its size takes it, so that memory is asked for once. Buffers in
use and spare ones together never exceed the limit; spare ones go first. On a GPU they are taken for a stream of their
own: torch gives a stream memory back that its kernels may still use, and those of others do not wait for these.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence

import torch

from moe_autograd.autograd.offload.apart_streams import on_stream, stream_apart
from moe_autograd.autograd.offload.flat import Layout


class Part:
    """A run of bytes that is resident or not.

    Args:
        name: in the store.
        layout: which tensors it consists of.
        attach: called with the buffer when it becomes resident.
        detach: called before its buffer is taken away.
        count_changes: returns something else whenever anybody has changed the tensors since; those who do not say so
            (`notice`) are found by that.
    """

    def __init__(
        self,
        name: str,
        layout: Layout,
        attach: Callable[[torch.Tensor], None] = lambda _: None,
        detach: Callable[[], None] = lambda: None,
        count_changes: Callable[[], object] = lambda: None,
    ) -> None:
        self.name, self.layout, self.attach, self.detach = name, layout, attach, detach
        self._count_changes, self._count = count_changes, count_changes()
        self.buffer: torch.Tensor | None = None  # (num_bytes,) of uint8
        self.num_holders = 0
        self.is_reading = False  # nobody has it before its bytes are there
        self.is_writing = False  # may be held meanwhile; who changes it then says so, and it is written again
        self.is_stored = False  # the store has it, perhaps not the newest
        self.is_changed = False  # since it was stored
        self.is_wished = False  # resident, and wished for since it was used last

    @property
    def is_busy(self) -> bool:
        """Whether its buffer is being read into or written from."""
        return self.is_reading or self.is_writing

    def views(self) -> dict[str, torch.Tensor]:
        """Return the tensors as they lie in its buffer, while it is resident."""
        assert self.buffer is not None
        return self.layout.views(self.buffer)

    def same_as_stored(self) -> None:
        """Say that it was read."""
        self._count = self._count_changes()

    def changed(self) -> None:
        """Say that it was changed since it was stored."""
        self.is_changed, self._count = True, self._count_changes()

    def notice(self) -> bool:
        """Whether it was changed since it was stored, also by those who did not say so, in memory as it is."""
        if self._count_changes() != self._count:
            self.changed()
        return self.is_changed

    def __repr__(self) -> str:
        state = "busy" if self.is_busy else "absent" if self.buffer is None else "resident"
        return f"Part({self.name!r}, {self.layout.num_bytes} bytes, {state}, held by {self.num_holders})"


class Buffers:
    """The memory of all parts.

    Args:
        limit_bytes: for buffers in use and spare ones together.
        device: of the buffers.
    """

    def __init__(self, limit_bytes: int, device: torch.device) -> None:
        self.limit_bytes, self.device = limit_bytes, device
        self.used_bytes = 0
        self.peak_bytes = 0
        self._spare: dict[int, list[torch.Tensor]] = {}
        self._stream = stream_apart(device)

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
        if spare:
            buffer = spare.pop()
        else:
            self._drop_spare(self.taken_bytes + num_bytes - self.limit_bytes)
            with on_stream(self._stream), torch.inference_mode(False):  # training may use it next
                buffer = torch.empty(num_bytes, dtype=torch.uint8, device=self.device)
        self.used_bytes += num_bytes
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


class Resident:
    """The parts that are in memory, the least recently used first.

    Args:
        limit_bytes: for the buffers of all of them and spare ones.
        device: of the buffers.
    """

    def __init__(self, limit_bytes: int, device: torch.device) -> None:
        self.buffers = Buffers(limit_bytes, device)
        self.come_in_bytes = 0  # since memory was given back (Rule 5 of `residency`)
        self._order: OrderedDict[Part, None] = OrderedDict()

    def __iter__(self) -> Iterator[Part]:
        return iter(self._order)

    def __len__(self) -> int:
        return len(self._order)

    def take_in(self, part: Part) -> None:
        """Give a part a buffer of undefined bytes; there is room."""
        part.buffer = self.buffers.take(part.layout.num_bytes)
        self._order[part] = None
        self.come_in_bytes += part.layout.num_bytes

    def put_out(self, part: Part) -> None:
        """Take a part's buffer away."""
        assert part.buffer is not None
        part.detach()
        self.buffers.give_back(part.buffer)
        part.buffer = None
        part.is_wished = False
        del self._order[part]

    def used(self, part: Part) -> None:
        """Let it leave after all others."""
        self._order.move_to_end(part)

    def not_soon(self, part: Part) -> None:
        """Let it leave before all others, if it is in memory."""
        if part in self._order:
            self._order.move_to_end(part, last=False)

    def has_room(self, num_bytes: int) -> bool:
        """Whether so many more bytes fit."""
        return self.buffers.lacking_bytes(num_bytes) <= 0

    def make_room(self, num_bytes: int, keep: Sequence[Part], spare_wished: bool) -> list[Part]:
        """Put out the least recently used, those that were wished for last, until `num_bytes` more fit.

        Args:
            num_bytes: how much is wanted.
            keep: stay.
            spare_wished: let those stay, too, that were wished for since they were used.

        Returns:
            Those that would go as well, but have to be written before.
        """
        missing = self.buffers.lacking_bytes(num_bytes)
        to_write = []
        for part in sorted(self._order, key=lambda part: part.is_wished):
            if missing <= 0 or (spare_wished and part.is_wished):
                break
            if part.num_holders > 0 or part.is_reading or part in keep:
                continue
            missing -= part.layout.num_bytes
            if part.is_writing:
                continue  # makes room later
            if part.notice():
                to_write.append(part)
            else:
                self.put_out(part)
        return to_write
