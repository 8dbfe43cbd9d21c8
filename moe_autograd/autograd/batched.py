"""Gradients of many backwards at once (`is_grads_batched=True`, `vectorize=True`), as tensors with a dimension more.

Torch makes such backwards in one, with tensors each of which stands for many (`torch._vmap_internals`, one within the
other at several levels). Such a tensor says that it requires no gradient; the many do, and have a history. So where
that counts, in a backward that makes a graph, calls take and return the many::

        grad_outputs ──▶ apart ─────────────▶ [ map ] ─────────────▶ together ──▶ gradients
                                  many          │  ▲         many
                                                ▼  │
                                         together, apart          within each call, around its own backward
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._C._functorch import is_legacy_batchedtensor

from moe_autograd.autograd.joined import Tensors


class Batches:
    """The dimensions that some gradients have more than they say.

    Args:
        grads: all gradients that a backward begins with.

    Attributes:
        sizes: of the dimensions, by their levels; empty where there are none, as mostly.
    """

    def __init__(self, grads: Tensors) -> None:
        self.sizes: dict[int, int] = {}
        for grad in grads:
            if grad is not None and is_legacy_batchedtensor(grad):
                self.sizes |= _sizes_of(grad)

    def apart(self, grads: Tensors) -> list[Tensor | None]:
        """Return gradients with all dimensions, these first."""
        return [None if grad is None else self._apart(grad) for grad in grads]

    def together(self, grads: Tensors) -> list[Tensor | None]:
        """Return gradients that `apart` has made as they were."""
        return [None if grad is None else self._together(grad) for grad in grads]

    def _apart(self, grad: Tensor) -> Tensor:
        for level in sorted(self.sizes, reverse=True):
            grad = torch._remove_batch_dim(grad, level, self.sizes[level], 0)
        return grad

    def _together(self, grad: Tensor) -> Tensor:
        for level in sorted(self.sizes):
            grad = torch._add_batch_dim(grad, 0, level)
        return grad


@torch.no_grad()
def _sizes_of(grad: Tensor) -> dict[int, int]:
    sizes: dict[int, int] = {}
    level = 0
    while is_legacy_batchedtensor(grad):
        level += 1
        # Without a dimension of this level torch repeats the tensor as often as it is told.
        size, same = [torch._remove_batch_dim(grad, level, told, 0).shape[0] for told in (2, 3)]
        if size == same:
            sizes[level] = size
            grad = torch._remove_batch_dim(grad, level, size, 0)
    return sizes
