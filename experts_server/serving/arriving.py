"""Calls out of the parcels that arrive."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

from torch import Tensor

from experts_server.hosting.calls import BackwardCall, Call, ForwardCall, num_rows
from moe_autograd.errors import InvalidCallError
from moe_autograd.wire import experts_pb2 as pb
from moe_autograd.wire.heads import BackwardHead, ForwardHead
from moe_autograd.wire.parcels import Tensors


def forward_call(
    head: pb.ForwardCall | ForwardHead, tensors: Tensors, reply: Callable[[Call, Any], None], may_train: bool
) -> ForwardCall:
    """Return the forward that a parcel asks for; of a client that may not train, it has no backward to be kept for.

    Raises:
        InvalidCallError: a tensor is missing.
    """
    for tensor in tensors:
        if tensor is None:
            raise InvalidCallError(
                "forward: expected tensors as inputs, got None among them. Send tensors only."
            )
    inputs = cast("tuple[Tensor, ...]", tensors)
    keep_graph, evaluate, seed = head.keep_graph and may_train, head.evaluate, head.random_seed
    requires_grad = tuple(head.input_requires_grad)
    call = ForwardCall(head.client_id, reply, head.call_id, inputs, requires_grad, keep_graph, evaluate, seed)
    call.expert = head.expert
    call.may_train = may_train
    call.reply_encoding = head.reply_encoding
    call.num_tokens = num_rows(inputs[0]) if inputs else 1
    return call


def backward_call(
    head: pb.BackwardCall | BackwardHead, tensors: Tensors, reply: Callable[[Call, Any], None]
) -> BackwardCall:
    """Return the backward that a parcel asks for.

    Raises:
        InvalidCallError: not so many tensors as its head says.
    """
    num_grads = head.num_grad_outputs
    inputs = tuple([t for t in tensors[num_grads:] if t is not None])
    if num_grads > len(tensors) or len(inputs) != len(tensors) - num_grads:
        raise InvalidCallError(
            f"backward: expected {num_grads} grad_outputs and then inputs, got {len(tensors)} tensors "
            f"with {sum(t is None for t in tensors)} None. The client is broken."
        )
    call = BackwardCall(
        head.client_id,
        reply,
        head.call_id,
        head.sequence,
        head.settled_below,
        tensors[:num_grads],
        tuple(head.wants_input_grads),
        head.wants_weight_grads,
        head.keep_graph,
        inputs if head.has_inputs else None,
        head.evaluate,
        head.random_seed,
        head.replica,
    )
    call.expert = head.expert
    call.reply_encoding = head.reply_encoding
    call.num_tokens = 1
    for grad in call.grad_outputs:
        if grad is not None and grad.dim():
            call.num_tokens = num_rows(grad)
            break
    return call
