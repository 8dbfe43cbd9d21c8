"""Where tensors enter the graph of a call that is one node of the caller's graph, as that of an offloaded expert is.

Such a call gets leaves. An inlet is to one of them what an entry is to an input of a map's call: a backward comes there
if it has begun at what left the call otherwise than as its result (`escaped`). The call's own backward does not come
there: it is `torch.autograd.grad`, which accumulates nothing.
"""

from __future__ import annotations

import weakref
from typing import Any, cast

from torch import Tensor
from torch.autograd.graph import Node

from moe_autograd.autograd.contents.in_objects import notes_on, put_on
from moe_autograd.autograd.contents.per_sample import stand_in_for
from moe_autograd.autograd.entry import ESCAPED
from moe_autograd.autograd.grad_dtypes import grad_dtype_of
from moe_autograd.autograd.joining.joined import ACCUMULATE_GRAD
from moe_autograd.autograd.walks import Edge
from moe_autograd.autograd.wrapped_hooks import innermost


class Inlet:
    """A hook of a leaf for after the accumulation of its gradient.

    Args:
        node: of the call in the caller's graph.
        place: of the caller's tensor among those that the node leads to.
    """

    def __init__(self, node: weakref.ref[Node], place: int) -> None:
        self._node, self._place = node, place

    def __call__(self, leaf: Tensor) -> None:
        """Raise: nobody would see the gradient."""
        leaf.grad = None
        raise RuntimeError(ESCAPED)

    def before(self) -> Edge | None:
        """Return where the gradient of the caller's tensor goes; `None` if the caller's graph is gone."""
        node = self._node()
        return None if node is None else node.next_functions[self._place]


def let_in(piece: Tensor, tensor: Tensor, inlet: Inlet) -> Tensor:
    """Return a leaf that shows a piece of a tensor, and whose gradient has the dtype of the tensor's."""
    leaf = piece.detach()
    put_on(leaf, notes_on(tensor))
    if piece.requires_grad:
        leaf.requires_grad_().register_post_accumulate_grad_hook(inlet)
        grad_dtype = grad_dtype_of(tensor)
        if grad_dtype is not tensor.dtype:
            leaf.grad_dtype = grad_dtype
    return leaf


def inlet_at(node: Node | None) -> Inlet | None:
    """Return that of the leaf whose gradient a node accumulates, if it has one."""
    if type(node) is not ACCUMULATE_GRAD:
        return None
    hooks: Any = stand_in_for(cast(Any, node).variable)._post_accumulate_grad_hooks or {}
    return next((own for hook in hooks.values() if isinstance(own := innermost(hook), Inlet)), None)
