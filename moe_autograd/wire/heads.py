"""What a parcel is made of, for the files that write and read it.

A head is a message of `experts.proto`, or the plain record of the same attributes: small calls travel in runs (see
`runs`), of which protobuf makes no message each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Generic, NamedTuple, TypeVar

import torch

from moe_autograd.errors import InvalidCallError, ServerBusyError
from moe_autograd.wire import experts_pb2 as pb

Tensors = tuple[torch.Tensor | None, ...]
MessageT = TypeVar("MessageT", pb.ForwardCall, pb.BackwardCall, pb.CallResult)


class _Plain(Generic[MessageT]):
    """The attributes of one of protobuf's messages."""

    __slots__: tuple[str, ...] = ()
    message_class: type[MessageT]

    def message(self) -> MessageT:
        """Return it as protobuf's."""
        # what is zero or empty protobuf has so by itself
        given = {name: value for name in self.__slots__ if (value := getattr(self, name))}
        return self.message_class(**given)


@dataclass(slots=True)
class ForwardHead(_Plain[pb.ForwardCall]):
    """A `ForwardCall`."""

    message_class = pb.ForwardCall

    client_id: bytes
    call_id: int
    expert: str
    keep_graph: bool
    input_requires_grad: tuple[bool, ...]
    evaluate: bool = False
    reply_encoding: pb.Encoding = pb.RAW
    random_seed: int = 0


@dataclass(slots=True)
class BackwardHead(_Plain[pb.BackwardCall]):
    """A `BackwardCall`."""

    message_class = pb.BackwardCall

    client_id: bytes
    sequence: int
    settled_below: int
    call_id: int
    expert: str
    wants_weight_grads: bool
    wants_input_grads: tuple[bool, ...]
    keep_graph: bool = False
    num_grad_outputs: int = 1
    has_inputs: bool = False
    evaluate: bool = False
    reply_encoding: pb.Encoding = pb.RAW
    random_seed: int = 0
    replica: int = 0


@dataclass(slots=True)
class ResultHead(_Plain[pb.CallResult]):
    """A `CallResult` of a call that went well."""

    message_class = pb.CallResult
    status: ClassVar[pb.Status] = pb.Status()

    call: int
    is_sequence: bool = False
    queue_s: float = 0.0
    compute_s: float = 0.0
    has_drawn: bool = False
    wants_no_step: bool = False
    server: int = 0
    uses: tuple[int, ...] = ()


PlainHead = ForwardHead | BackwardHead | ResultHead
WrittenHead = pb.ForwardCall | pb.BackwardCall | pb.CallResult | pb.StateUpdate | pb.StateEntry
Head = WrittenHead | PlainHead

# A call or a result, in either shape; for `isinstance`.
FORWARD = (pb.ForwardCall, ForwardHead)
BACKWARD = (pb.BackwardCall, BackwardHead)
RESULT = (pb.CallResult, ResultHead)


class Parcel(NamedTuple):
    """What a reader returns.

    Args:
        number: the sender's number for it, once in a stream; a `CallResult` names it in `call`.
        head: which of the messages it is; tell by `isinstance`. None only where `error` is set.
        tensors: its tensors, writable and nobody else's, on the CPU; None where the sender had None. Empty
            where `error` is set.
        error: why this parcel is refused (it lies about a size, or asks for too much, or for too much now). The stream
            goes on.
    """

    number: int
    head: Head | None
    tensors: Tensors = ()
    error: InvalidCallError | ServerBusyError | None = None
