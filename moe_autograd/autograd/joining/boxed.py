"""The gradients that a node gets, in a list that can be emptied: a call's are to go when that call is done.

In a tuple they would be in memory until the node returns, since PyTorch and every frame on the way hold it.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import torch
from torch import Tensor

# What PyTorch says if it could not ask a node for `boxed_grads_call`, since Ctrl-C came just then.
INTERRUPTED = "autograd.Function is missing boxed_grads_call attribute"

Grads: TypeAlias = list[Tensor | None]  # whoever splits it empties it


class UnlessCompiled:
    """The `boxed_grads_call` of a node: `True` for PyTorch, `False` for compiled autograd, which refuses `True`.

    PyTorch asks when the node is made, and compiled autograd in a backward: that tells who asks.
    """

    def __get__(self, *_: object) -> bool:
        return torch._C._current_graph_task_id() == -1


def boxed(grad_outputs: tuple[Any, ...]) -> Grads:
    """Return the list that a node's backward was given, or the gradients that it was given instead."""
    if len(grad_outputs) == 1 and type(grad_outputs[0]) is list:
        return grad_outputs[0]
    return list(grad_outputs)
