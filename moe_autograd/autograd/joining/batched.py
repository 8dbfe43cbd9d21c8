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
    VmapInterpreter,
    temporarily_clear_interpreter_stack,
    temporarily_restore_interpreter_stack,
)

from moe_autograd._contexts import contextmanager
from moe_autograd.autograd.joining.joined import Tensors
from moe_autograd.errors import UnsupportedTransformError


class _Kind(NamedTuple):
    """Whose tensors they are: how to take the dimension of a level out, and to put it in."""

    remove: Callable[[Tensor, int, int, int], Tensor]
    add: Callable[[Tensor, int, int], Tensor]


_torch: Any = torch  # which does not tell of these
_OF_BACKWARDS = _Kind(_torch._remove_batch_dim, _torch._add_batch_dim)
_OF_FUNC = _Kind(_functorch._remove_batch_dim, _functorch._add_batch_dim)


class Batches:
    """The dimensions that gradients have more than they say, in a backward that makes a graph.

    Args:
        grads: all gradients that it begins with. Under `torch.vmap` hooks may bring in others, of any of its levels.

    Attributes:
        sizes: of the dimensions, by their levels; empty where there are none, as mostly.

    Raises:
        UnsupportedTransformError: another transform of `torch.func` is around the backward than `torch.vmap`, or that
            is around one with `is_grads_batched=True`.
    """

    def __init__(self, grads: Tensors) -> None:
        legacy = [grad for grad in grads if grad is not None and _functorch.is_legacy_batchedtensor(grad)]
        self._kind, self.sizes = _OF_BACKWARDS, dict[int, int]()
        self._transforms: list[Any] = []
        if torch._C._are_functorch_transforms_active():
            self._kind, self.sizes = _OF_FUNC, _sizes_in_func()
            if legacy:
                raise _unsupported()
        for grad in legacy:
            self.sizes |= _sizes_of(grad)

    @contextmanager
    def beyond_transforms(self) -> Iterator[None]:
        """Leave the transforms of `torch.func` that the backward is in, for what takes the many."""
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


def all_of(grad: Tensor) -> Tensor:
    """Return all numbers that a gradient stands for, in whichever order, to look at them."""
    while _functorch.is_functorch_wrapped_tensor(grad):
        grad = _functorch.get_unwrapped(grad)
    for level, size in sorted(_sizes_of(grad).items(), reverse=True):
        grad = _OF_BACKWARDS.remove(grad, level, size, 0)
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


def _sizes_in_func() -> dict[int, int]:
    transforms: Any = _functorch.get_interpreter_stack()
    if any(one.key() != _functorch.TransformType.Vmap for one in transforms):
        raise _unsupported()
    return {one.level(): VmapInterpreter(one).batch_size() for one in transforms}


def _unsupported() -> UnsupportedTransformError:
    return UnsupportedTransformError(
        "parallel map, backward: expected create_graph=True alone, in torch.vmap or with is_grads_batched=True, "
        "got another transform of torch.func around it, or both of these. Transform the backward by one."
    )
