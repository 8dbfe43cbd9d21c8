"""What is asked of a server for a forward and for a backward."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from moe_autograd.remote.calls import Request
from moe_autograd.remote.parts import BackwardPart, Call
from moe_autograd.wire import experts_pb2 as pb
from moe_autograd.wire.heads import BackwardHead, ForwardHead


def forward_request(client_id: bytes, call: Call, inputs: Sequence[Tensor], encoding: pb.Encoding) -> Request:
    """Return what is asked for a forward; its answer is to come in the same encoding."""
    head = ForwardHead(
        client_id,
        call.call_id,
        call.expert,
        call.keep_graph,
        tuple([call.keep_graph and x.requires_grad for x in inputs]),
        call.evaluate,
        encoding,
        call.random_seed,
    )
    return Request(call.expert, head, inputs, encoding)


def backward_request(
    update: tuple[bytes, int, int], part: BackwardPart, keep_graph: bool, encoding: pb.Encoding
) -> Request:
    """Return what is asked for a backward; with the inputs, should its server no longer have the forward.

    Args:
        update: the client, the number of this backward, and below which number all are settled (`numbering`).
        part: the call, its gradients, and which ones are wanted.
        keep_graph: whether there may be another backward.
        encoding: how gradients travel, there and back.
    """
    client_id, sequence, settled_below = update
    call = part.call
    head = BackwardHead(
        client_id,
        sequence,
        settled_below,
        call.call_id,
        call.expert,
        part.wants_weight_grads,
        tuple(part.wants_input_grads),
        keep_graph,
        len(part.grad_outputs),
        evaluate=call.evaluate,
        reply_encoding=encoding,
    )
    again = part.inputs, call.encoding, call.random_seed, call.replica
    return Request(call.expert, head, part.grad_outputs, encoding, *again)
