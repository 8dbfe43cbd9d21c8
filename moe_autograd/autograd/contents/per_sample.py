"""Weights that gather a gradient for each sample: `torch.nn.utils`' `ExpandedWeight`, of which Opacus makes use.

Such a weight stands for another one during a forward. The backwards of what it computed put the gradients of all
samples into `grad_sample` of that other weight, add to what is there, and hand on nothing: the leaf itself never gets
a gradient. Its class refuses to be asked anything, `requires_grad` too. So

1. where a call's graph ends at one, the join is tied to a plain leaf in its place: so the engine still says whether
   a backward goes there, and the inner backward goes to the weight itself;
2. calls with such weights are made one after the other (`ranks`), as two could add to one weight at once.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from moe_autograd._imported import imported

_HOME = "torch.nn.utils._expanded_weights.expanded_weights_impl"
PLAIN: frozenset[type] = frozenset([Tensor, nn.Parameter])  # mostly, and may be asked anything


def are_per_sample(kinds: Iterable[type]) -> bool:
    """Whether one of these classes is that of such weights; nobody has one before its module is imported."""
    expanded = imported(_HOME, "ExpandedWeight")
    return expanded is not None and any(issubclass(kind, expanded) for kind in kinds)


def may_have_gradients(leaf: Tensor) -> bool:
    """Whether a leaf requires a gradient, or could; a class with `__torch_function__` is not asked."""
    with torch._C.DisableTorchFunctionSubclass():
        return leaf.requires_grad or leaf.is_floating_point() or leaf.is_complex()


def stand_in_for(leaf: Any) -> Tensor:
    """Return a leaf that may be asked about itself, and tied to a join: this one, or another for such a weight.

    Should a gradient flow there after all, the engine raises, since it has another shape.
    """
    kind = type(leaf)
    if kind in PLAIN or not are_per_sample([kind]):
        tensor: Tensor = leaf
        return tensor
    return torch.empty(0, requires_grad=True, device="cpu")
