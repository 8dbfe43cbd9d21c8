"""What autograd saves while an offloaded expert runs: weights by place, the rest as it was or in a part of its own.

A graph holds the tensors it saved, so it would hold the weights: the buffer they lay in would be used for another
expert and the backward would read that one's. Saved-tensor hooks are told of every tensor, and so:

1. A tensor that lies in the buffer of the weights is remembered by its place, and found again in whatever buffer
   holds them during the backward. If the weights were changed in between, that raises, as PyTorch does. A buffer that
   the module replaces by another is copied, before that one takes its place when no call runs any more: the graph of a
   plain module would still have the old one.
2. If the caller has saved-tensor hooks (`save_on_cpu`, a checkpoint), they get every other tensor. Those of a
   checkpoint give it back ahead, in the backward that the caller started: they run the forward again for each
   backward they see, and the expert's own is one.
3. Otherwise it is kept, together with its version: PyTorch looks at versions only where there are no hooks.
4. Or, in micro-batches, it moves: when the micro-batch's forward is done its tensors are copied into one part,
   which leaves memory like any other. What was changed since it was saved raises in the backward.
5. A tensor that is not strided may hold weights inside (the values of a sparse matrix), so it is copied.
6. What is kept is cut off its history: a result leads back to the node that saved it, and nobody would find the two.
   It is a tensor of its own also without one: the module may keep the other, which follows a buffer made anew.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from moe_autograd._interrupts import uninterrupted, unwindable
from moe_autograd.autograd.offload.flat import Layout, Place, lies_in
from moe_autograd.autograd.offload.held import HeldExpert
from moe_autograd.autograd.offload.parts import Part
from moe_autograd.autograd.offload.residency import Residency
from moe_autograd.autograd.ordered_hooks import counts, handing_on


class _Saved(Protocol):
    def unpack(self) -> Tensor: ...


class _InWeights:
    """Rule 1."""

    def __init__(self, held: HeldExpert, place: Place) -> None:
        self._held, self._num_updates, self._place = held, held.num_updates, place
        self._name = held.weights.layout.name_at(place.start)
        self._owner = held.tensors[self._name]
        self._version = self._owner._version
        self._copy: Tensor | None = None
        held.saved_by_place[self._name].add(self)

    def unpack(self) -> Tensor:
        if self._copy is not None:
            return self._copy
        self._held.check_weights(self._num_updates)
        _check_version(self._name, self._place.shape, self._owner._version, self._version)
        return self._find()

    def keep(self) -> None:
        """Copy it, if it was not changed since it was saved: other bytes take its place."""
        if self._copy is None and self._owner._version == self._version:
            self._copy = self._find().clone()

    def _find(self) -> Tensor:
        assert self._held.weights.buffer is not None
        return self._place.find(self._held.weights.buffer)


class ByCaller:
    """Rule 2."""

    __slots__ = ("__weakref__", "_ahead", "_packed", "_unpack")

    def __init__(self, unpack: Callable[[Any], Tensor], packed: Any) -> None:
        self._unpack, self._packed = unpack, packed
        self._ahead: Tensor | None = None

    def unpack_ahead(self) -> None:
        """Get the tensor back now; once it has been asked for it is kept no longer."""
        self._ahead = self._unpack(self._packed)

    def unpack(self) -> Tensor:
        """Return the tensor."""
        ahead, self._ahead = self._ahead, None
        return self._unpack(self._packed) if ahead is None else ahead


class _Kept(NamedTuple):
    """Rule 3."""

    tensor: Tensor
    version: int

    def unpack(self) -> Tensor:
        _check_version("a tensor", tuple(self.tensor.shape), self.tensor._version, self.version)
        return self.tensor


class MovedActivations:
    """Rule 4: the tensors saved by one micro-batch.

    Its part is forgotten with it, at the latest when the graph goes.
    """

    def __init__(self, residency: Residency) -> None:
        self._residency = residency
        self._tensors: dict[str, Tensor] = {}
        self._names: dict[tuple[Any, ...], str] = {}
        self._versions: dict[str, int] = {}  # of the tensors when they were copied
        self.part: Part | None = None

    def add(self, tensor: Tensor) -> _Moved:
        """Take a tensor; one that was taken before is not copied twice."""
        place = (tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride())
        key = (*place, tensor._version, tensor.is_conj(), tensor.is_neg())
        name = self._names.setdefault(key, str(len(self._names)))
        self._tensors[name] = tensor.detach()
        return _Moved(self, name, tensor._version)

    def seal(self) -> None:
        """Copy what was taken into a part, and let go of it."""
        part = self._residency.add_passing(Layout.of(self._tensors))
        weakref.finalize(self, self._residency.lose_passing, part)
        with self._residency.hold([part]):
            for name, view in part.views().items():
                view.copy_(self._tensors[name])
            self._residency.changed(part)
        self._versions = {name: tensor._version for name, tensor in self._tensors.items()}
        self.part = part
        self._tensors, self._names = {}, {}

    def find(self, name: str, version: int) -> Tensor:
        """Return a tensor, as it was at this version; the part is held."""
        if self.part is None:  # a backward inside the forward
            found = self._tensors[name]
            now = found._version
        else:
            found, now = self.part.views()[name], self._versions[name]
        _check_version("a tensor", tuple(found.shape), now, version)
        return found


class _Moved(NamedTuple):
    moved: MovedActivations
    name: str
    version: int

    def unpack(self) -> Tensor:
        return self.moved.find(self.name, self.version)


@unwindable
def saving(held: HeldExpert, moved: MovedActivations | None) -> Iterator[Sequence[weakref.ref[ByCaller]]]:
    """Inside, what autograd saves is saved by the rules above; yields what to unpack ahead of a backward (Rule 2).

    The expert's weights are held.
    """
    by_caller: Any = torch._C._autograd._top_saved_tensors_default_hooks(True)
    ahead: list[weakref.ref[ByCaller]] = []

    def pack(tensor: Tensor) -> _Saved:
        # not from outside: the graph holds this function, and with it what it refers to
        flat = held.weights.buffer
        assert flat is not None
        if lies_in(tensor, flat):
            return _InWeights(held, Place.of(tensor, flat))
        if tensor.layout is not torch.strided:
            tensor = tensor.clone()
        if by_caller is not None:
            saved = ByCaller(by_caller[1], by_caller[0](tensor))
            if is_counting:
                ahead.append(weakref.ref(saved))
            return saved
        if moved is not None and tensor.layout is torch.strided:
            return moved.add(tensor)
        return _Kept(tensor.detach(), tensor._version)

    to = None if by_caller is None else by_caller[0]
    is_counting = to is not None and counts(to)
    with (
        uninterrupted() as section,
        handing_on(pack, to),
        torch.autograd.graph.saved_tensors_hooks(pack, _unpack),
        section.opened(),
    ):
        yield ahead


def _unpack(saved: _Saved) -> Tensor:
    return saved.unpack()


def _check_version(what: str, shape: tuple[int, ...], version: int, expected: int) -> None:
    if version != expected:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"{what} of shape {shape} that an offloaded expert saved is at version {version}, expected version "
            f"{expected}."
        )
