"""What an expert takes: the check that every call passes before it can meet another's.

What is certain about an expert (the built-in ones, a plain `torch.nn.Linear`, a `Sequential` that starts with
one, a module with an `input_spec`) refuses a call up front. What is only likely (the first layer is a Linear)
refuses nothing: it explains afterwards why the module raised, and keeps the call from being joined with others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moe_autograd.errors import InvalidCallError
from moe_autograd.moe.experts import FeedForwardExpert, SwiGLUExpert
from moe_autograd.wire import experts_pb2 as pb
from moe_autograd.wire.tensors import DTYPES


@dataclass(frozen=True)
class InputSpec:
    """The first input of an expert.

    Args:
        dtype: the only one it takes; `None`: any.
        width: the size of the last dimension; `None`: any.
        rank: the number of dimensions; `None`: two or more.
        is_certain: whether a call that does not fit is refused without asking the module.
    """

    dtype: torch.dtype | None = None
    width: int | None = None
    rank: int | None = None
    is_certain: bool = False

    def mismatch(self, expert: str, inputs: Sequence[Tensor]) -> InvalidCallError | None:
        """Return what is wrong with these inputs for the expert called `expert`, if anything is."""
        x = inputs[0]
        shape = x.shape
        has_rank = len(shape) >= 2 if self.rank is None else len(shape) == self.rank
        if not has_rank or (self.width is not None and shape[-1] != self.width):
            return InvalidCallError(
                f"expert {expert!r}: expected shape {self.shape_text()}, got {tuple(shape)} (dtype={x.dtype}). "
                "Give it the rank and width it was made for."
            )
        if self.dtype is not None and x.dtype != self.dtype:
            return InvalidCallError(
                f"expert {expert!r}: expected dtype {self.dtype}, got {x.dtype} (shape={tuple(shape)}). "
                f"Convert the input with .to({self.dtype})."
            )
        return None

    def shape_text(self) -> str:
        """Return the expected shape in words: `(num_tokens, 64)`."""
        leading = {None: "..., num_tokens", 2: "num_tokens", 3: "batch, num_tokens"}
        width = "d_model" if self.width is None else str(self.width)
        return f"({leading.get(self.rank, f'{self.rank} dimensions')}, {width})"

    def wire_shape(self) -> list[int]:
        """Return the shape as it is announced: -1 stands for any size."""
        return [-1] * ((self.rank or 2) - 1) + [self.width or -1]

    def announcement(self) -> pb.TensorSpec:
        """Return what clients are told, so that they can check their calls before anything travels."""
        return pb.TensorSpec(
            dtype=pb.DTYPE_NONE if self.dtype is None else DTYPES[self.dtype],
            shape=self.wire_shape(),
            may_have_more=self.rank is None,
        )


def infer_spec(module: nn.Module) -> InputSpec:
    """Return what can be known of the first input of `module` without calling it."""
    declared = getattr(module, "input_spec", None)
    if isinstance(declared, InputSpec):
        return declared
    if isinstance(module, FeedForwardExpert):
        return InputSpec(module.up.weight.dtype, module.up.in_features, 2, is_certain=True)
    if isinstance(module, SwiGLUExpert):
        return InputSpec(module.gate.weight.dtype, module.gate.in_features, 2, is_certain=True)
    first = module
    while isinstance(first, nn.Sequential) and len(first) > 0:
        first = first[0]
    if isinstance(first, nn.Linear):
        return InputSpec(first.weight.dtype, first.in_features, is_certain=True)
    leaf = next((m for m in module.modules() if next(m.children(), None) is None), None)
    if isinstance(leaf, nn.Linear):
        return InputSpec(leaf.weight.dtype, leaf.in_features)
    return InputSpec()
