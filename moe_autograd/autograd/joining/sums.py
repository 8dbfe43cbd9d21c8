"""Add what many calls compute for one tensor while they are under way, as plain PyTorch does.

A join hands on the gradients of all calls at once. What calls share, a weight of them all or a batch that goes to every
expert, has one gradient from each: for 32 calls with one weight of 16 MB half a gigabyte was in memory, where a loop
holds two gradients. So they are added as they come, and the join hands on the sum::

      calls       3     2     1     0        the last call first, as a loop's backward meets them
                  │     │     │     │
                  ▼     ▼     ▼     ▼
                 g3 ─▶ + ──▶ + ──▶ + ──▶     one gradient for the tensor

Rule 1. They are added in the order of the loop, whoever ends first, and so to the same bits. One that ends before its
        turn waits for it.
Rule 2. Added is what is as the tensor itself: dense, of its shape, dtype and device. All else goes to the engine, which
        makes it fit or complains.
Rule 3. Nothing with a graph; nothing under compiled autograd, whose graph adds all gradients that the join returns:
        none of them may be missing; and nothing where what is done in place would be recorded, or under a transform of
        `torch.func`, where a sum may have room for one backward, and the next gradient be of many.
Rule 4. A gradient that a call has returned may still be the call's own. Only sums are changed in place.
Rule 5. On an accelerator a sum goes on after what both of its terms have queued, wherever that was.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from moe_autograd._ambient import is_recorded
from moe_autograd._streams import continue_after, queued_here, use_here
from moe_autograd.autograd.grad_dtypes import differs
from moe_autograd.autograd.joining import accumulating
from moe_autograd.autograd.uncompiled import is_backward_compiled

FEWEST = 3  # gradients; of two the engine holds no more than a loop

_Place: TypeAlias = tuple[int, int]  # a call, and which of its inputs
_Queued: TypeAlias = Sequence[torch.Event]  # what a gradient comes after


class Shared(NamedTuple):
    """A tensor that several inputs are, and what its gradients are like."""

    places: Sequence[_Place]  # those of the last call first
    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    def is_like(self, grad: Tensor) -> bool:
        """Whether a gradient may be added to others (Rule 2)."""
        return (
            type(grad) is Tensor
            and grad.layout is torch.strided
            and grad.shape == self.shape
            and grad.dtype is self.dtype
            and grad.device == self.device
            and not grad.requires_grad
            and not grad._is_zerotensor()  # a sum of such is one, too, and cannot be changed in place
            and not torch._C._functorch.is_legacy_batchedtensor(grad)
        )


def shared_by_many(inputs_of: Sequence[Sequence[Tensor]]) -> list[Shared]:
    """Return the large tensors that need a gradient and that at least `FEWEST` calls take."""
    places: dict[int, list[_Place]] = {}
    tensors: dict[int, Tensor] = {}
    for call in reversed(range(len(inputs_of))):
        for i, tensor in enumerate(inputs_of[call]):
            if tensor.requires_grad and tensor.numel() >= accumulating.LEAST_ADDED:
                places.setdefault(id(tensor), []).append((call, i))
                tensors[id(tensor)] = tensor
    return [
        Shared(own, tensors[key].shape, tensors[key].dtype, tensors[key].device)
        for key, own in places.items()
        if len(own) >= FEWEST and not differs(tensors[key])
    ]


class Sums:
    """The sums of one backward.

    Args:
        shared: what is to be added up.
        calls: those that take part; they have to come, each once.
        wanted_of: for each of them which of its gradients this backward uses, empty where all; `None` if it uses all.

    Threads: any.
    """

    def __init__(
        self,
        shared: Iterable[Shared],
        calls: Iterable[int],
        wanted_of: Mapping[int, Sequence[object]] | None = None,
    ) -> None:
        self._of_call: dict[int, list[tuple[int, _Sum]]] = {}
        self._sums: list[_Sum] = []
        is_transformed = torch._C._are_functorch_transforms_active() or is_recorded()
        if torch.is_grad_enabled() or is_backward_compiled() or is_transformed:
            return  # Rule 3
        taking_part = set(calls)
        for one in shared:
            places = [(call, i) for call, i in one.places if call in taking_part and _has(wanted_of, call, i)]
            total = _Sum(one, places)
            self._sums.append(total)
            for call, i in places:
                self._of_call.setdefault(call, []).append((i, total))

    def add(self, call: int, grads: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
        """Add those of a call's gradients that are to be added; return the others, each in its place."""
        own = self._of_call.get(call)
        if own is None:
            return grads
        others = list(grads)
        del grads
        for i, total in own:
            grad = others[i]
            if grad is not None and total.shared.is_like(grad):
                others[i] = None
            else:
                grad = None
            total.put((call, i), grad)
        return others

    def hand_out(self, grads_of: dict[int, Sequence[Tensor | None]] | list[Sequence[Tensor | None]]) -> None:
        """Put each sum in the place of the first gradient that it has."""
        for total in self._sums:
            if total.first is not None:
                call, i = total.first
                grads = list(grads_of[call])
                grads[i] = total.value
                grads_of[call] = grads


def _has(wanted_of: Mapping[int, Sequence[object]] | None, call: int, i: int) -> bool:
    return wanted_of is None or not wanted_of[call] or bool(wanted_of[call][i])


class _Sum:
    """The sum of the gradients in some places.

    Mutable state: all is guarded by the lock, but for `value` and `first`, which belong to the thread that is adding.
    """

    def __init__(self, shared: Shared, places: Sequence[_Place]) -> None:
        self.shared = shared
        self.value: Tensor | None = None
        self.first: _Place | None = None  # whose gradient it begins with
        self._is_own = False  # whether the value is no call's
        self._lock = threading.Lock()
        self._places = places
        self._num_added = 0
        self._queued: _Queued = ()
        self._waiting: dict[_Place, tuple[Tensor | None, _Queued]] = {}
        self._is_adding = False

    def put(self, place: _Place, grad: Tensor | None) -> None:
        """Add what has come to a place, and all whose turn is next (Rule 1), unless another thread does."""
        queued = () if grad is None else queued_here()
        with self._lock:
            self._waiting[place] = grad, queued
            if self._is_adding:
                return
            self._is_adding = True
        while (come := self._next()) is not None:
            self._add(*come)

    def _next(self) -> tuple[_Place, Tensor | None, _Queued] | None:
        """Return whose turn it is, what has come from there, and after what; `None` if nothing has."""
        with self._lock:
            if self._num_added < len(self._places):
                turn = self._places[self._num_added]
                if turn in self._waiting:
                    self._num_added += 1
                    return turn, *self._waiting.pop(turn)
            self._is_adding = False
            return None

    def _add(self, turn: _Place, grad: Tensor | None, queued: _Queued) -> None:
        if grad is None:
            return
        if self.value is None:
            self.value, self.first, self._queued = grad, turn, queued
            return
        continue_after([*self._queued, *queued])  # Rule 5
        use_here((self.value, grad))
        if self._is_own:
            self.value += grad
        else:
            self.value, self._is_own = self.value + grad, True  # Rule 4
        self._queued = queued_here()
