"""What autograd saves while an offloaded expert runs: weights by place, the rest as it was or in a part of its own.

A graph holds the tensors it saved, so it would hold the weights: the buffer they lay in would be used for another
expert and the backward would read that one's. Saved-tensor hooks are told of every tensor, and so:

1. A tensor that lies in the buffer of the weights is remembered by its place, and found again in whatever buffer
   holds them during the backward. If the weights were changed in between, that raises, as PyTorch does.
2. If the caller has saved-tensor hooks (`save_on_cpu`, a checkpoint), they get every other tensor.
3. Otherwise it is kept, together with its version: PyTorch looks at versions only where there are no hooks.
4. Or, in micro-batches, it moves: when the micro-batch's forward is done its tensors are copied into one part,
   which leaves memory like any other.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from moe_autograd.autograd.offload.flat import Layout
from moe_autograd.autograd.offload.held import HeldExpert
from moe_autograd.autograd.offload.parts import Part
from moe_autograd.autograd.offload.residency import Residency


class _Saved(Protocol):
    def unpack(self) -> Tensor: ...


class _InWeights(NamedTuple):
    """Rule 1."""

    held: HeldExpert
    num_updates: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    start: int  # in bytes

    def unpack(self) -> Tensor:
        self.held.check_weights(self.num_updates)
        flat = self.held.weights.buffer
        assert flat is not None
        typed = flat[self.start % self.dtype.itemsize :]
        typed = typed[: typed.numel() // self.dtype.itemsize * self.dtype.itemsize].view(self.dtype)
        return typed.as_strided(self.shape, self.strides, self.start // self.dtype.itemsize)


class _ByCaller(NamedTuple):
    """Rule 2."""

    hook: Callable[[Any], Tensor]
    packed: Any

    def unpack(self) -> Tensor:
        return self.hook(self.packed)


class _Kept(NamedTuple):
    """Rule 3."""

    tensor: Tensor
    version: int

    def unpack(self) -> Tensor:
        if self.tensor._version != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"a tensor of shape {tuple(self.tensor.shape)} that an offloaded expert saved is at version "
                f"{self.tensor._version}, expected version {self.version}."
            )
        return self.tensor


class MovedActivations:
    """Rule 4: the tensors saved by one micro-batch.

    Its part is forgotten with it, at the latest when the graph goes.
    """

    def __init__(self, residency: Residency) -> None:
        self._residency = residency
        self._tensors: dict[str, Tensor] = {}
        self._names: dict[tuple[Any, ...], str] = {}
        self.part: Part | None = None

    def add(self, tensor: Tensor) -> _Moved:
        """Take a tensor; one that was taken before is not copied twice."""
        key = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor._version)
        name = self._names.setdefault(key, str(len(self._names)))
        self._tensors[name] = tensor
        return _Moved(self, name)

    def seal(self) -> None:
        """Copy what was taken into a part, and let go of it."""
        part = self._residency.add_passing("activations", Layout.of(self._tensors))
        weakref.finalize(self, self._residency.recycle, "activations", part)
        with self._residency.hold([part]):
            assert part.buffer is not None
            for name, view in part.layout.views(part.buffer).items():
                view.copy_(self._tensors[name])
            self._residency.changed(part)
        self.part = part
        self._tensors, self._names = {}, {}

    def find(self, name: str) -> Tensor:
        """Return a tensor; the part is held."""
        assert self.part is not None
        assert self.part.buffer is not None
        return self.part.layout.views(self.part.buffer)[name]


class _Moved(NamedTuple):
    moved: MovedActivations
    name: str

    def unpack(self) -> Tensor:
        return self.moved.find(self.name)


@contextlib.contextmanager
def saving(held: HeldExpert, moved: MovedActivations | None) -> Iterator[None]:
    """Inside, what autograd saves is saved by the rules above. The expert's weights are held."""
    by_caller: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    flat = held.weights.buffer
    assert flat is not None
    first, last = flat.data_ptr(), flat.data_ptr() + flat.numel()

    def pack(tensor: Tensor) -> _Saved:
        start = tensor.data_ptr() - first
        if tensor.layout is torch.strided and tensor.numel() and first <= tensor.data_ptr() < last:
            shape, strides = tuple(tensor.shape), tuple(tensor.stride())
            return _InWeights(held, held.num_updates, tensor.dtype, shape, strides, start)
        if by_caller is not None:
            return _ByCaller(by_caller[1], by_caller[0](tensor))
        if moved is not None and tensor.layout is torch.strided:
            return moved.add(tensor)
        return _Kept(tensor, tensor._version)

    with torch.autograd.graph.saved_tensors_hooks(pack, _unpack):
        yield


def _unpack(saved: _Saved) -> Tensor:
    return saved.unpack()
