"""One expert's part in a pass: what is known of it from its forward to its backward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from moe_autograd.wire import experts_pb2 as pb


@dataclass(slots=True)
class Freeze:
    """Whether an expert is frozen for this client.

    Apart from the module, as graphs hold it: a module may keep a result, and such a cycle would never be freed.
    """

    is_on: bool = False


@dataclass(slots=True)
class Call:
    """One expert's part in a pass, from its forward to its backward.

    Args:
        index: in the pass.
        expert: its name.
        call_id: our name for the forward.
        num_inputs, num_outputs: how many tensors it was given, and gave.
        evaluate: whether the module is in `eval()`.
        keep_graph: whether there may be a backward.
        is_trained: whether that gives the weights gradients, unless they are frozen then.
        freeze: whether they are.
        is_sequence: whether it gave a tuple.
        uses: pairs of tensors that it computed from another one, and that one.
        address: the server that ran the forward.
        random_seed: what its random numbers follow from; 0: it draws none.
        replica: which of several it is there; 0: there is one only.
        encoding: how its inputs travelled.
        is_kept: whether its server may keep it still, for its backward.
    """

    index: int
    expert: str
    call_id: int
    num_inputs: int
    evaluate: bool
    keep_graph: bool
    is_trained: bool
    freeze: Freeze
    num_outputs: int = 0
    is_sequence: bool = False
    uses: Sequence[int] = ()
    address: str = ""
    random_seed: int = 0
    replica: int = 0
    encoding: pb.Encoding = pb.RAW
    is_kept: bool = False


@dataclass(slots=True)
class BackwardPart:
    """What the backward of one call is given.

    Args:
        call: its forward.
        inputs: of the forward, for a server that has let go of them.
        grad_outputs: one for each output, None where there is none.
        wants_input_grads: for each input, whether anybody wants its gradient.
        wants_weight_grads: whether the server is to gather those of the weights.
    """

    call: Call
    inputs: Sequence[Tensor]
    grad_outputs: Sequence[Tensor | None]
    wants_input_grads: Sequence[bool]
    wants_weight_grads: bool = False
