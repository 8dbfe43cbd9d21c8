"""Gradients of many backwards at once, as tensors with a dimension more.

Torch makes such backwards in one, with tensors each of which stands for many, one within the other at several levels:
those of `torch._vmap_internals` by `is_grads_batched=True` and `vectorize=True`, those of `torch.func` by `torch.vmap`
around a backward. Such a tensor says that it requires no gradient; the many do, and have a history. So where that
counts, in a backward that makes a graph, calls take and return the many::

        grad_outputs ──▶ apart ─────────────▶ [ map ] ─────────────▶ together ──▶ gradients
                                  many          │  ▲         many
                                                ▼  │
                                         together, apart          within each call, around its own backward

The map between is of no transform: its node would have to be transformed as well. Within each call they are on again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._C import _functorch
from torch._functorch.pyfunctorch import (
    temporarily_clear_interpreter_stack,
    temporarily_restore_interpreter_stack,
)

from moe_autograd._contexts import contextmanager
from moe_autograd.autograd.joined import Tensors
from moe_autograd.errors import UnsupportedTransformError


class _Kind(NamedTuple):
    """Whose tensors they are: how to tell them, to take the dimension of a level out, and to put it in."""

    is_batched: Callable[[Tensor], bool]
    remove: Callable[[Tensor, int, int, int], Tensor]
    add: Callable[[Tensor, int, int], Tensor]


_torch: Any = torch  # which does not tell of these
_OF_BACKWARDS = _Kind(_functorch.is_legacy_batchedtensor, _torch._remove_batch_dim, _torch._add_batch_dim)
_OF_FUNC = _Kind(_functorch.is_batchedtensor, _functorch._remove_batch_dim, _functorch._add_batch_dim)


class Batches:
    """The dimensions that some gradients have more than they say.

    Args:
        grads: all gradients that a backward begins with.

    Attributes:
        sizes: of the dimensions, by their levels; empty where there are none, as mostly.

    Raises:
        UnsupportedTransformError: `is_grads_batched=True` within `torch.vmap`, or another transform of `torch.func`.
    """

    def __init__(self, grads: Tensors) -> None:
        self.sizes: dict[int, int] = {}
        self._kind = _OF_BACKWARDS
        self._transforms: list[Any] = []
        for grad in grads:
            if grad is not None:
                self._look_at(grad)

    def _look_at(self, grad: Tensor) -> None:
        if _functorch.is_functorch_wrapped_tensor(grad):
            self._kind = _OF_FUNC
            self.sizes |= _sizes_in_func(grad)
        elif _functorch.is_legacy_batchedtensor(grad):
            self.sizes |= _sizes_of(grad)

    @contextmanager
    def beyond_transforms(self) -> Iterator[None]:
        """Leave the transforms of `torch.func` that the backward is in, for a map of the many."""
        with temporarily_clear_interpreter_stack() as self._transforms:
            yield

    @contextmanager
    def within_transforms(self) -> Iterator[None]:
        """Enter them again, in a call."""
        with temporarily_restore_interpreter_stack(self._transforms):
            yield

    def apart(self, grads: Tensors) -> list[Tensor | None]:
        """Return gradients with all dimensions, these first."""
        return [None if grad is None else self._apart(grad) for grad in grads]

    def together(self, grads: Tensors) -> list[Tensor | None]:
        """Return gradients that `apart` has made as they were."""
        return [None if grad is None else self._together(grad) for grad in grads]

    def _apart(self, grad: Tensor) -> Tensor:
        for level in sorted(self.sizes, reverse=True):
            grad = self._kind.remove(grad, level, self.sizes[level], 0)
        return grad

    def _together(self, grad: Tensor) -> Tensor:
        for level in sorted(self.sizes):
            grad = self._kind.add(grad, 0, level)
        return grad


@torch.no_grad()
def _sizes_of(grad: Tensor) -> dict[int, int]:
    sizes: dict[int, int] = {}
    level = 0
    while _functorch.is_legacy_batchedtensor(grad):
        level += 1
        # Without a dimension of this level torch repeats the tensor as often as it is told.
        size, same = [_OF_BACKWARDS.remove(grad, level, told, 0).shape[0] for told in (2, 3)]
        if size == same:
            sizes[level] = size
            grad = _OF_BACKWARDS.remove(grad, level, size, 0)
    return sizes


def _sizes_in_func(grad: Tensor) -> dict[int, int]:
    sizes: dict[int, int] = {}
    while _functorch.is_batchedtensor(grad):
        within = _functorch.get_unwrapped(grad)
        sizes[_functorch.maybe_get_level(grad)] = within.shape[_functorch.maybe_get_bdim(grad)]
        grad = within
    if _functorch.is_functorch_wrapped_tensor(grad) or _functorch.is_legacy_batchedtensor(grad):
        raise UnsupportedTransformError(
            "parallel_apply, backward: expected gradients of one backward, or of many by is_grads_batched=True or by "
            "torch.vmap, got one of another transform of torch.func, or of both. Transform the backward by one."
        )
    return sizes
