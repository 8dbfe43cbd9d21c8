"""Whether the tensors of an optimizer's state have memory of their own.

Their part gives each of them some. What shared it before, as a flat buffer of which they were views, would see no more
of what becomes of them, nor they what is written there.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from moe_autograd.autograd.offload.flat import is_made_of_others


def check_apart(name: str, state: Mapping[str, Tensor], others: Iterable[Tensor]) -> None:
    """Raise `TypeError` if a tensor of a state is sure to share memory with another one.

    Two that lie in each other's gaps, as columns do, share none: a tensor with gaps counts as its first element.

    Args:
        name: of the state.
        state: its tensors by name, each once.
        others: what else there is; a tensor of the state is here if it is in other places, too.
    """
    names = {id(tensor): full_name for full_name, tensor in state.items()}
    farthest, end = None, 0  # of those that begin before
    for tensor in sorted(filter(_has_memory, (*state.values(), *others)), key=Tensor.data_ptr):
        start = tensor.data_ptr()
        sharing = [names[id(one)] for one in (farthest, tensor) if id(one) in names]
        if start < end and sharing:
            raise TypeError(
                f"{name}: expected tensors of the state to share no memory with others, got {sharing[0]!r}, which "
                "shares some with another one in the state, in a group or in an attribute of the optimizer. Each would "
                "get memory of its own: clone() it, or keep the one, and make the other of it in each step."
            )
        reach = start + (tensor.nbytes if tensor.is_contiguous() else tensor.itemsize)
        if reach > end:
            farthest, end = tensor, reach


def _has_memory(tensor: Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.numel() > 0 and not is_made_of_others(tensor)
