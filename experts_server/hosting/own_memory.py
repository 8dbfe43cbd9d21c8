"""What a module returns of its own memory is copied: an answer waits for others that leave with it, and meanwhile
another client's step may change weights and buffers in place.

Most modules return nothing of theirs, and pay for the question alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

import torch
from torch import Tensor, nn

from moe_autograd._streams import sparse_parts

Place = tuple[int, int]  # from the first byte to the one behind the last
T = TypeVar("T", Tensor, Tensor | None)


class OwnMemory:
    """Where the parameters and buffers of a module are.

    Args:
        module: its parameters stay where they are; it may put other buffers in the place of its own.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._weights = _places(module.parameters())
        self._has_buffers = next(module.buffers(), None) is not None

    def __repr__(self) -> str:
        return f"<OwnMemory of {type(self._module).__name__}, {len(self._weights)} weights>"

    def holds(self, tensor: Tensor) -> bool:
        """Whether a tensor lies there."""
        at = tensor.data_ptr()
        for start, end in self._weights:
            if start <= at < end:
                return True
        return self._has_buffers and any(start <= at < end for start, end in _places(self._module.buffers()))


def storages(tensor: Tensor) -> list[torch.UntypedStorage]:
    """Return the memory that a tensor lies in: one, that of each part of a sparse one, or none."""
    if tensor.layout is not torch.strided and (parts := sparse_parts(tensor.detach())):
        return [part.untyped_storage() for part in parts]
    return [] if tensor._is_zerotensor() else [tensor.untyped_storage()]


def _places(tensors: Iterable[Tensor]) -> list[Place]:
    memories = [memory for tensor in tensors for memory in storages(tensor)]
    return sorted({(memory.data_ptr(), memory.data_ptr() + memory.nbytes()) for memory in memories})


def apart(tensors: tuple[T, ...], is_own: Callable[[Tensor], bool]) -> tuple[T, ...]:
    """Return the same tensors, with copies of those that are the module's own memory."""
    for tensor in tensors:
        if tensor is not None and is_own(tensor):
            return tuple([t.clone() if t is not None and is_own(t) else t for t in tensors])
    return tensors
