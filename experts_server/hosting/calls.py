"""What can be asked of an expert, once it has been decoded: plain records, without grpc or messages."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from moe_autograd.wire import experts_pb2 as pb
from moe_autograd.wire.tensors import plain, travelling_form


@dataclass(slots=True)
class Call:
    """One thing asked of one expert.

    Args:
        client_id: who asks.
        reply: given this call and its result, or the exception; called once, from any thread, never blocks.
        expert: the name of whom it asks.
        is_cancelled: set by anyone when nobody waits for the answer any more; looked at before it begins.
        deadline: on `time.monotonic`'s clock, or `None`.
        arrived_at, started_at: on the same clock.
        tag: the asker's own.
        num_tokens: rows of its inputs, or of the gradients of its outputs.
        num_bytes: of its tensors, when it came.
        is_finite: whether all their values are known to be.
        reply_encoding: how the tensors of the answer will travel.

    Attributes:
        takes_room: whether it counts among the calls that may wait.
    """

    takes_room: ClassVar[bool] = True

    client_id: bytes
    reply: Callable[[Call, Any], None]
    _: KW_ONLY
    expert: str = ""
    is_cancelled: bool = False
    deadline: float | None = None
    arrived_at: float = 0.0
    started_at: float = 0.0
    tag: Any = None
    num_tokens: int = 0
    num_bytes: int = 0
    is_finite: bool = False
    reply_encoding: pb.Encoding = pb.RAW

    def let_go(self) -> None:
        """Keep no tensors any more: it has its result, which may wait for long until its client takes it."""


@dataclass(slots=True)
class ForwardCall(Call):
    """Compute outputs. The inputs are the call's own: nobody else reads or writes them."""

    call_id: int
    inputs: tuple[Tensor, ...]
    input_requires_grad: tuple[bool, ...] = ()
    keep_graph: bool = False
    evaluate: bool = False
    random_seed: int = 0  # what its random numbers follow from; 0: from the expert's own stream
    may_train: bool = True  # else it leaves the expert's buffers as they were

    def let_go(self) -> None:
        """See `Call`."""
        self.inputs = ()


@dataclass(slots=True)
class BackwardCall(Call):
    """Compute the gradients of the inputs, and take in those of the weights."""

    call_id: int
    sequence: int
    settled_below: int
    grad_outputs: tuple[Tensor | None, ...]
    wants_input_grads: tuple[bool, ...]
    wants_weight_grads: bool = True
    keep_graph: bool = False
    inputs: tuple[Tensor, ...] | None = None
    evaluate: bool = False
    random_seed: int = 0  # with inputs: that of the forward
    replica: int = 0  # with inputs: that made the forward; 0: whichever
    wants_no_step: bool = False  # set when its gradients are taken in: they are applied without a step

    def let_go(self) -> None:
        """See `Call`."""
        self.grad_outputs, self.inputs = (), None

    @property
    def wants_nothing(self) -> bool:
        """Whether it only lets go of its forward, kept or not: that of a request that lost to another server's."""
        return not (self.wants_weight_grads or self.keep_graph or any(self.wants_input_grads))


class Expected(NamedTuple):
    """Which backwards a client knows of: how many, and the digest and the numbers that `wire.gathered` tells of."""

    at_least: int
    at_most: int
    digest: int
    unsure: tuple[int, ...]


@dataclass(slots=True)
class UpdateCall(Call):
    """Step with the gradients that this client gave, or forget them.

    Args:
        gathered: which backwards must have given them; `None`: any.
    """

    kind: Literal["step", "zero_grad"]
    sequence: int
    settled_below: int
    gathered: Expected | None = None


@dataclass(slots=True)
class InspectCall(Call):
    """Run a function on the expert between its other calls: nothing else touches it meanwhile.

    It takes no room, since there are few: a server that is full has to save as well.
    """

    takes_room: ClassVar[bool] = False

    function: Callable[[Any], Any]


@dataclass(slots=True)
class Outputs:
    """The result of a forward.

    Args:
        tensors: of it.
        is_sequence: whether they are those of a tuple or list.
        has_drawn: whether its random seed was used.
        uses: pairs of those that were computed from another one, and that one.
    """

    tensors: tuple[Tensor, ...]
    is_sequence: bool
    has_drawn: bool = False
    uses: tuple[int, ...] = ()

    @property
    def shapes(self) -> tuple[torch.Size, ...]:
        """The shapes of all of them."""
        return tuple([tensor.shape for tensor in self.tensors])

    def detached(self) -> Outputs:
        """Return the same values without their graph, as memory that can be sent."""
        loose = [tensor.detach() if tensor.requires_grad else tensor for tensor in self.tensors]
        return Outputs(tuple([plain(tensor) for tensor in loose]), self.is_sequence)


def num_rows(tensor: Tensor) -> int:
    """Return the size of the first dimension."""
    shape = tensor.shape  # `len` of a tensor takes four times as long
    return shape[0] if shape else 1


def on_cpu(tensor: Tensor) -> Tensor:
    """Return a result on the CPU. Call it in the turn that computes it: whoever sends it has others to serve."""
    return tensor if tensor.is_cpu else tensor.cpu()


def encoded(result: Any, encoding: pb.Encoding) -> Any:
    """Return a call's result with its tensors as they will travel; what goes wrong is a result, too."""
    if isinstance(result, BaseException):
        return result
    is_forward = isinstance(result, Outputs)
    try:
        forms: Any = tuple([travelling_form(t, encoding) for t in (result.tensors if is_forward else result)])
    except Exception as error:
        return error
    return replace(result, tensors=forms) if is_forward else forms
