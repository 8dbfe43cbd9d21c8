"""What a hosted expert takes, as its server says, so that a bad call fails here before anything travels.

A server says it only where it is certain; everything else it checks itself when a call arrives.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moe_autograd.wire import experts_pb2 as pb
from moe_autograd.wire.tensors import TORCH_DTYPES


@dataclass(frozen=True)
class InputSpec:
    """One input of an expert.

    Args:
        shape: of its last dimensions; None is any size.
        dtype: None: any.
        may_have_more: whether more dimensions may come before those of `shape`.
    """

    shape: tuple[int | None, ...]
    dtype: torch.dtype | None = None
    may_have_more: bool = False

    @classmethod
    def of(cls, spec: pb.TensorSpec) -> InputSpec:
        """Return what a server's message says."""
        shape = tuple(None if size < 0 else size for size in spec.shape)
        return cls(shape, TORCH_DTYPES.get(spec.dtype), spec.may_have_more)

    def mismatch(self, x: Tensor) -> str | None:
        """Return what is wrong with `x` as the second half of an error, or None if it fits."""
        if not self._has_shape(x):
            return (
                f"expected shape {self}, got {tuple(x.shape)} (dtype={x.dtype}). "
                "Give it the rank and width it was made for."
            )
        if self.dtype is not None and x.dtype != self.dtype:
            return (
                f"expected dtype {self.dtype}, got {x.dtype} (shape={tuple(x.shape)}). "
                f"Convert the input with .to({self.dtype})."
            )
        return None

    def _has_shape(self, x: Tensor) -> bool:
        num_dims = len(self.shape)
        if x.dim() != num_dims and not (self.may_have_more and x.dim() > num_dims):
            return False
        last = x.shape[x.dim() - num_dims :]
        return all(expected in (None, size) for expected, size in zip(self.shape, last, strict=True))

    def __str__(self) -> str:
        """Show the shape as our errors do: `(num_tokens, 64)`."""
        sizes = ["any" if size is None else str(size) for size in self.shape]
        if len(sizes) > 1 and self.shape[-2] is None:
            sizes[-2] = "num_tokens"
        return f"({', '.join(['...'] * self.may_have_more + sizes)}{',' if len(sizes) == 1 else ''})"
