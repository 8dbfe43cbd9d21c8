"""Leaves that stand for weights which are elsewhere: those of experts on a server, or offloaded.

A call of such an expert leads to one, while the expert is trained. So its results require a gradient though no input
may, and the call can ask the engine whether a backward wants the weights' gradients. The leaf itself never gets any:
whoever asks for the gradients of some tensors alone gets none of these weights, and no error either.

A call of frozen ones leads to a leaf of its own, if to any. It stands for weights once the call has thawed some.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from moe_autograd.autograd.grouping import has_group
from moe_autograd.autograd.joining.joined import ACCUMULATE_GRAD
from moe_autograd.autograd.walks import Edge, walk


def new_anchor() -> Tensor:
    """Return a leaf that stands for weights."""
    anchor: Any = torch.empty(0, requires_grad=True, device="cpu")
    anchor.stands_for_weights = True
    leaf: Tensor = anchor
    return leaf


def anchor_of_call(anchor: Tensor | None, is_trained: bool) -> Tensor | None:
    """Return what a call leads to: the anchor of its weights, or one of its own in case it thaws some."""
    if anchor is None or is_trained:
        return anchor
    own: Any = new_anchor()
    own.stands_for_weights = False
    of_call: Tensor = own
    return of_call


def stand_for_weights(anchor: Any) -> None:
    """Let an anchor stand for weights from now on."""
    anchor.stands_for_weights = True


def stands_for_none(leaf: Tensor) -> bool:
    """Whether a leaf is an anchor that stands for no weights: nobody misses its gradient."""
    return not getattr(leaf, "stands_for_weights", True)


def lead_to_anchors(results: Iterable[Edge]) -> bool:
    """Whether a backward from there comes to weights that are elsewhere."""
    return any(
        type(node) is ACCUMULATE_GRAD and getattr(node.variable, "stands_for_weights", False)  # type: ignore[attr-defined]
        for node, _ in walk(results)
    )


def trained_elsewhere(module: nn.Module) -> Iterator[str]:
    """Yield the names of those parts, or "" for the module itself, whose weights are elsewhere and trained there."""
    for name, part in module.named_modules():
        if has_group(part) and getattr(part, "is_trained", False):
            yield name
