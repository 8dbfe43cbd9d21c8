"""What a parcel is made of, for the two files that write and read it."""

from __future__ import annotations

from typing import NamedTuple

import torch

from moe_autograd.errors import InvalidCallError
from moe_autograd.wire import experts_pb2 as pb

Head = pb.ForwardCall | pb.BackwardCall | pb.CallResult | pb.StateUpdate | pb.StateEntry
Tensors = tuple[torch.Tensor | None, ...]


class Parcel(NamedTuple):
    """What a reader returns.

    Args:
        number: the sender's number for it, once in a stream; a `CallResult` names it in `call`.
        head: which of the messages it is; tell by `isinstance`. None only where `error` is set.
        tensors: its tensors, writable and nobody else's, on the CPU; None where the sender had None. Empty
            where `error` is set.
        error: why this parcel is refused (it lies about a size, or asks for too much). The stream goes on.
    """

    number: int
    head: Head | None
    tensors: Tensors = ()
    error: InvalidCallError | None = None
