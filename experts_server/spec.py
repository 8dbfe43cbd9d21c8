"""What an expert takes: the check that every call passes before it can meet another's.

What is certain about an expert (the built-in ones, a `torch.nn.Linear`, a `Sequential` that starts with one, a
module with an `input_spec`) refuses a call up front. What is only likely (the first layer is a Linear, or one with a
forward of its own) refuses nothing: it explains afterwards why the module raised, and keeps the call from being joined
with others.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from moe_autograd.errors import InvalidCallError
from moe_autograd.moe.experts import FeedForwardExpert, SwiGLUExpert
from moe_autograd.wire.specs import TensorSpec


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

    @functools.cached_property
    def tensor(self) -> TensorSpec:
        """What clients are told, so that they can check their calls before anything travels."""
        leading = (None,) * ((self.rank or 2) - 1)
        return TensorSpec((*leading, self.width), self.dtype, may_have_more=self.rank is None)

    def mismatch(self, expert: str, inputs: Sequence[Tensor]) -> InvalidCallError | None:
        """Return what is wrong with these inputs for the expert called `expert`, if anything is."""
        wrong = self.tensor.mismatch(inputs[0])
        return None if wrong is None else InvalidCallError(f"expert {expert!r}: {wrong}")


def infer_spec(module: nn.Module) -> InputSpec:
    """Return what can be known of the first input of `module` without calling it."""
    declared = getattr(module, "input_spec", None)
    if isinstance(declared, InputSpec):
        return declared
    first, rank = module, None
    if isinstance(module, FeedForwardExpert):
        first, rank = module.up, 2
    elif isinstance(module, SwiGLUExpert):
        first, rank = module.gate, 2
    while isinstance(first, nn.Sequential) and len(first) > 0:
        first = first[0]
    if isinstance(first, nn.Linear):
        return _spec_of(first, rank)
    leaf = next((m for m in module.modules() if next(m.children(), None) is None), None)
    if isinstance(leaf, nn.Linear):
        return replace(_spec_of(leaf), is_certain=False)
    return InputSpec()


def _spec_of(layer: nn.Linear, rank: int | None = None) -> InputSpec:
    """Return what a linear layer takes: with a forward of its own, which may quantize, of any dtype."""
    if type(layer).forward is not nn.Linear.forward:
        return InputSpec(None, layer.in_features, rank)
    # Not `layer.weight`: where that is computed, a look at it goes on with the power iteration of a spectral norm.
    dtypes = (p.dtype for p in layer.parameters() if p.is_floating_point() or p.is_complex())
    return InputSpec(next(dtypes, None), layer.in_features, rank, is_certain=True)
