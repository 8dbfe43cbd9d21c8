"""What calls have saved that no backward has reached, kept for the one that will.

After a backward without `retain_graph` a node forgets what it has saved. In a loop every call is a node of its own, and
one that the backward does not come to forgets nothing: `for loss in losses: loss.backward()` takes one call after the
other. The node of a map stands for all of its calls. So what it is about to forget of those that a backward has not
reached stays with it in another way, until a backward comes to them or the graph goes.

Rule 1. A call is reached if it gets a gradient, and this backward wants one of its inputs'.
Rule 2. A tensor that was changed in place since is refused, in PyTorch's words; so is a call that was reached before.
Rule 3. A result of the node itself is kept without its history, which would lead back here. Only a backward with
        `create_graph=True` would need it, and raises; not that of a module's call, which computes with its own graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from moe_autograd.autograd.emulated import BACKWARD_TWICE
from moe_autograd.autograd.joining.accumulating import Wanted
from moe_autograd.autograd.joining.joined import Joined, has_missing
from moe_autograd.autograd.this_backward import keeps_graph
from moe_autograd.autograd.uncompiled import is_backward_compiled


class _Kept(NamedTuple):
    """A saved tensor.

    Args:
        tensor: as it was unpacked, or without its history (Rule 3).
        version: that it had.
        is_own: whether it is a result of the node.
    """

    tensor: Tensor
    version: int
    is_own: bool


def take_saved(
    node: Any, joined: Joined, grad_outputs: Sequence[Tensor | None], wanted: Sequence[Wanted]
) -> dict[int, Sequence[Tensor | None]]:
    """Return what the reached calls saved, by call; let the node forget it.

    Args:
        node: of the calls.
        joined: all of them.
        grad_outputs: one for each result of all calls.
        wanted: one for each input of all calls; empty if all are.

    Raises:
        RuntimeError: in PyTorch's words: one of them was reached before; or what it saved was changed in place.

    Threads: any; one after the other, as a node must not forget what another thread unpacks.
    """
    with joined.taking:
        left: dict[int, list[_Kept | None]] | None = getattr(node, "left", None)
        if left is not None:  # an earlier backward has let the node forget
            return {
                i: _taken(left, i, joined.saved_parts.counts[i], joined.reads_saved)
                for i in _reached(joined, grad_outputs, wanted)
            }
        if not joined.saved_parts.total:
            return {}  # it forgets nothing, however often it runs
        unpacked = [*node.saved_tensors]
        if len(unpacked) != joined.saved_parts.total:  # compiled code asks no node whether it is freed
            raise RuntimeError(BACKWARD_TWICE)
        saved = joined.saved_parts
        reached = _reached(joined, grad_outputs, wanted)
        if not keeps_graph() and not is_backward_compiled():
            node.left = {}
            if wanted or has_missing(grad_outputs):
                unreached = {*range(len(joined.calls))}.difference(reached)
                node.left = {i: [_keep(tensor, node) for tensor in saved.of(unpacked, i)] for i in unreached}
        node.maybe_clear_saved_tensors()  # not under `retain_graph`
        return saved.of_some(unpacked, reached)


def _reached(
    joined: Joined, grad_outputs: Sequence[Tensor | None], wanted: Sequence[Wanted]
) -> Sequence[int]:
    """Return which calls a backward comes to (Rule 1)."""
    reached = joined.reached(grad_outputs)
    return [i for i in reached if any(joined.input_parts.of(wanted, i))] if wanted else reached


def _keep(tensor: Tensor | None, node: Any) -> _Kept | None:
    if tensor is None:
        return None
    is_own = tensor.grad_fn is node
    return _Kept(tensor.detach() if is_own else tensor, tensor._version, is_own)


def _taken(
    left: dict[int, list[_Kept | None]], call: int, num_saved: int, reads_saved: bool
) -> list[Tensor | None]:
    if call not in left:
        if num_saved:
            raise RuntimeError(BACKWARD_TWICE)
        return []
    kept = left[call] if keeps_graph() else left.pop(call)
    return [None if one is None else _checked(one, reads_saved) for one in kept]


def _checked(kept: _Kept, reads_saved: bool) -> Tensor:
    tensor = kept.tensor
    if tensor._version != kept.version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"[{tensor.type()} {list(tensor.shape)}] is at version {tensor._version}; expected version {kept.version} "
            "instead. Hint: enable anomaly detection to find the operation that failed to compute its gradient, with "
            "torch.autograd.set_detect_anomaly(True)."
        )
    if kept.is_own and reads_saved and torch.is_grad_enabled():
        raise RuntimeError(
            "map_with_parallel_backward: expected retain_graph=True in an earlier backward through other results, for "
            "one with create_graph=True through this one, which its call has saved; got none. Pass it there."
        )
    return tensor
