"""What an expert takes: as its server says it, and as both sides check it before a call."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from moe_autograd._computed_once import computed_once
from moe_autograd.wire import experts_pb2 as pb
from moe_autograd.wire.tensors import DTYPES, TORCH_DTYPES

_NAMES = ("batch", "num_tokens", "d_model")  # of the last dimensions, where these may have any size


@dataclass(frozen=True)
class TensorSpec:
    """One input of an expert.

    Args:
        shape: of its last dimensions; None is any size.
        dtype: None: any.
        may_have_more: whether more dimensions may come before those of `shape`.
    """

    shape: tuple[int | None, ...]
    dtype: torch.dtype | None
    may_have_more: bool

    @classmethod
    def of(cls, message: pb.TensorSpec) -> TensorSpec:
        """Return what a server's message says."""
        shape = tuple(None if size < 0 else size for size in message.shape)
        return cls(shape, TORCH_DTYPES.get(message.dtype), message.may_have_more)

    def message(self) -> pb.TensorSpec:
        """Return what clients are told."""
        return pb.TensorSpec(
            dtype=pb.DTYPE_NONE if self.dtype is None else DTYPES[self.dtype],
            shape=[-1 if size is None else size for size in self.shape],
            may_have_more=self.may_have_more,
        )

    def mismatch(self, x: torch.Tensor) -> str | None:
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

    def _has_shape(self, x: torch.Tensor) -> bool:
        shape, num_dims = x.shape, len(self.shape)
        if len(shape) != num_dims and not (self.may_have_more and len(shape) > num_dims):
            return False
        for place, size in self._sizes:  # noqa: SIM110  # a generator costs more than the loop
            if shape[place] != size:
                return False
        return True

    @computed_once
    def _sizes(self) -> list[tuple[int, int]]:
        """The sizes that are not any, each with its place from the end."""
        places = range(-len(self.shape), 0)
        return [(place, size) for place, size in zip(places, self.shape, strict=True) if size is not None]

    def describe(self) -> str:
        """Show the shape and the dtype."""
        return str(self) if self.dtype is None else f"{self} {str(self.dtype).removeprefix('torch.')}"

    def __str__(self) -> str:
        """Show the shape as our errors do: `(num_tokens, 64)`."""
        num_more = len(self.shape) - len(_NAMES)
        names = ["any"] * num_more + [*_NAMES[max(0, -num_more) :]]
        sizes = [name if size is None else str(size) for name, size in zip(names, self.shape, strict=True)]
        shown = ["..."] * self.may_have_more + sizes
        return f"({', '.join(shown)}{',' if len(shown) == 1 else ''})"
