"""What an expert takes: the check that every call passes before it can meet another's.

What is certain about an expert (the built-in ones, a `torch.nn.Linear`, a `Sequential` that starts with one, a
module with an `input_spec`) refuses a call up front. What is only likely (the first layer is a Linear, but a forward of
somebody's own or a hook comes before it) refuses nothing: it explains afterwards why the module raised, and keeps the
call from being joined with others.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moe_autograd._computed_once import computed_once
from moe_autograd.autograd.in_turn import is_watched
from moe_autograd.moe.experts import FeedForwardExpert, SwiGLUExpert
from moe_autograd.wire.specs import TensorSpec


@dataclass(frozen=True)
class InputSpec:
    """The first input of an expert.

    Args:
        dtype: the only one it takes; `None`: any.
        width: the size of the last dimension; `None`: any.
        rank: the number of dimensions; `None`: one or more.
        is_certain: whether a call that does not fit is refused without asking the module.
    """

    dtype: torch.dtype | None = None
    width: int | None = None
    rank: int | None = None
    is_certain: bool = False

    @computed_once
    def tensor(self) -> TensorSpec:
        """What clients are told, so that they can check their calls before anything travels."""
        leading = (None,) * ((self.rank or 1) - 1)
        return TensorSpec((*leading, self.width), self.dtype, may_have_more=self.rank is None)

    def mismatch(self, expert: str, x: Tensor) -> str | None:
        """Return what an error says of a first input for the expert called `expert`, if anything is wrong with it."""
        wrong = self.tensor.mismatch(x)
        return None if wrong is None else f"expert {expert!r}: {wrong}"


def infer_spec(module: nn.Module) -> InputSpec:
    """Return what can be known of the first input of `module` without calling it."""
    declared = getattr(module, "input_spec", None)
    if isinstance(declared, InputSpec):
        return declared
    return _certain_spec(module) or _likely_spec(module)


def _certain_spec(module: nn.Module, rank: int | None = None) -> InputSpec | None:
    """Return what a module takes whose input reaches a linear layer through no code but torch's and ours."""
    forward = _forward_of(module)
    if is_watched(module):
        return None
    if isinstance(module, nn.Linear) and forward is nn.Linear.forward:
        return InputSpec(_dtype_of(module), module.in_features, rank, is_certain=True)
    if isinstance(module, FeedForwardExpert) and forward is FeedForwardExpert.forward:
        return _certain_spec(module.up, 2)
    if isinstance(module, SwiGLUExpert) and forward is SwiGLUExpert.forward:
        return _certain_spec(module.gate, 2)
    if forward is nn.Sequential.forward and (first := next(module.children(), None)) is not None:
        return _certain_spec(first, rank)
    return None


def _likely_spec(module: nn.Module) -> InputSpec:
    """Return what the first layer takes if it is linear; with a forward of its own, which may quantize, any dtype."""
    leaf = next((m for m in module.modules() if next(m.children(), None) is None), None)
    if not isinstance(leaf, nn.Linear):
        return InputSpec()
    return InputSpec(_dtype_of(leaf) if _forward_of(leaf) is nn.Linear.forward else None, leaf.in_features)


def _dtype_of(layer: nn.Linear) -> torch.dtype | None:
    # Not `layer.weight`: where that is computed, a look at it goes on with the power iteration of a spectral norm.
    return next((p.dtype for p in layer.parameters() if p.is_floating_point() or p.is_complex()), None)


def _forward_of(module: nn.Module) -> object:
    """Return the forward of its class; `None`: that has none by itself, as of what `torch.jit` has scripted."""
    return getattr(type(module), "forward", None)
