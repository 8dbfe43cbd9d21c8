"""RPCs that are answered by one message, as plain calls that are cancelled with their operation.

grpc's own blocking call cannot be cancelled from another thread: a task that is cancelled would keep its thread until
the deadline. So they are begun as those that are answered by a stream, which is the same to the server.
"""

from __future__ import annotations

import math
import time
from typing import TypeVar

from google.protobuf.message import Message

from moe_autograd.remote.channel import Channel
from moe_autograd.remote.operations import Operation
from moe_autograd.remote.streaming import streaming
from moe_autograd.wire.framing import seal, unseal

ReplyT = TypeVar("ReplyT", bound=Message)


def ask(
    channel: Channel,
    rpc: str,
    request: Message,
    reply_class: type[ReplyT],
    operation: Operation,
    attempt_s: float = math.inf,
) -> ReplyT:
    """Send one message and return the answer.

    Args:
        channel: to the server.
        rpc: its name.
        request: the message.
        reply_class: of the answer.
        operation: that this is a part of.
        attempt_s: how long this attempt may take.

    Raises:
        RemoteError: one of its subclasses, with the address and how long it took.
    """
    with channel.our_errors(rpc, operation) as passage:
        began_s = time.perf_counter()
        with streaming(channel, rpc, seal(request), None, passage, operation.part(attempt_s)) as stream:
            reply = next(stream, b"")  # damage can make grpc end well, without one
            channel.leave(stream)
        channel.note_round_trip(time.perf_counter() - began_s)
        return unseal(reply_class, reply)
