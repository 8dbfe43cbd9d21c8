"""RPCs that are answered by one message, as plain calls that are cancelled with their operation.

grpc's own blocking calls cannot be cancelled from another thread: a task that is cancelled would keep its thread until
the deadline, and longer where a stream's message is on its way. So they are begun as those that are answered by a
stream, which is the same to the server.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import TypeVar

from google.protobuf.message import Message

from moe_autograd.remote.channel import Channel
from moe_autograd.remote.forking import Passage
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
        reply = _answer(channel, rpc, seal(request), None, passage, operation.part(attempt_s))
        channel.note_round_trip(time.perf_counter() - began_s)
        return unseal(reply_class, reply)


def upload(
    channel: Channel, rpc: str, messages: Iterator[bytes], reply_class: type[ReplyT], operation: Operation
) -> ReplyT:
    """Send a stream of messages, one at least, and return the one answer; raises as `ask` does."""
    with channel.our_errors(rpc, operation) as passage:
        return unseal(reply_class, _answer(channel, rpc, next(messages), messages, passage, operation))


def _answer(
    channel: Channel,
    rpc: str,
    first: bytes,
    rest: Iterator[bytes] | None,
    passage: Passage,
    operation: Operation,
) -> bytes:
    with streaming(channel, rpc, first, rest, passage, operation) as stream:
        reply: bytes = next(stream, b"")  # damage can make grpc end well, without one
        channel.leave(stream)
    return reply
