"""The rows of a call, all at once or in micro-batches: cut for the expert, and put together again behind it.

A tensor that has as many rows as the call is cut; any other goes whole to each micro-batch. Nothing tells a tensor of
rows from one that has this size by chance, so users are told how to give the latter (`OffloadedExperts`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from moe_autograd.autograd.contents.in_objects import notes_on, put_on

Rows: TypeAlias = tuple[int, int]  # the first one, and the one after the last


class Microbatches:
    """How the rows of a call are cut.

    Args:
        num_rows: of the call.
        most: how many micro-batches there are, if there are rows for each.

    Attributes:
        rows: of each micro-batch.
    """

    def __init__(self, num_rows: int, most: int) -> None:
        count = max(1, min(most, num_rows))
        self._num_rows = num_rows
        self.rows: list[Rows] = list(itertools.pairwise(num_rows * i // count for i in range(count + 1)))

    def cut(self, tensors: Sequence[Tensor], rows: Rows) -> list[Tensor]:
        """Return the tensors that the expert gets for a micro-batch."""
        if len(self.rows) == 1:
            return list(tensors)
        # without it, slices would say that they require a gradient, and lead nowhere
        with torch.enable_grad():
            return [tensor[slice(*rows)] if self._has_rows(tensor.shape) else tensor for tensor in tensors]

    def part_of(self, grad: Tensor, rows: Rows) -> Tensor:
        """Return what of a result's gradient is a micro-batch's."""
        return grad if len(self.rows) == 1 else grad[slice(*rows)]

    def put_together(self, shape: torch.Size, grads: Sequence[Tensor | None]) -> Tensor | None:
        """Return the gradient of a tensor of this shape, of which each micro-batch has found its rows, or a summand."""
        known = [grad for grad in grads if grad is not None]
        if len(grads) == 1 or not known:
            return grads[0]
        if not self._has_rows(shape):
            return torch.stack(known).sum(0)
        sizes = [stop - start for start, stop in self.rows]
        return torch.cat(
            [known[0].new_zeros(n, *shape[1:]) if g is None else g for g, n in zip(grads, sizes, strict=True)]
        )

    def _has_rows(self, shape: torch.Size) -> bool:
        return len(shape) > 0 and shape[0] == self._num_rows


def joined(results: Sequence[Any]) -> Any:
    """Put the results of micro-batches one below the other."""
    if len(results) == 1:
        return results[0]
    leaves_of_each = [tree_flatten(result)[0] for result in results]
    leaves = [
        _below(one) if isinstance(one[0], Tensor) else one[0] for one in zip(*leaves_of_each, strict=True)
    ]
    return tree_unflatten(leaves, tree_flatten(results[0])[1])


def _below(pieces: tuple[Tensor, ...]) -> Tensor:
    whole = torch.cat(pieces)
    put_on(whole, notes_on(pieces[0]))
    return whole
