"""A stream for as long as a block lasts: however that ends, it is over, or cancelled."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc

from moe_autograd._contexts import contextmanager
from moe_autograd._intraop import end_team
from moe_autograd.errors import RemoteError
from moe_autograd.remote.channel import Channel
from moe_autograd.remote.ends import NotBegunError, end
from moe_autograd.remote.forking import Passage
from moe_autograd.remote.interrupts import interrupts_held_back
from moe_autograd.remote.operations import Operation

# With less, an answer comes about as fast as a team is ended and made anew, on a busy machine faster: a pass of 4 rows
# of width 8 after an operator with a team took 1.05 to 1.6 times as long.
_WORTH_ITS_TEAM_BYTES = 1 << 14


@contextmanager
def streaming(
    channel: Channel,
    rpc: str,
    first: bytes,
    rest: Iterator[bytes] | None,
    passage: Passage,
    operation: Operation,
) -> Iterator[Any]:
    """Begin an RPC that is answered by a stream; see `Channel.stream`.

    Args:
        channel: to the server.
        rpc: its name.
        first: the first message.
        rest: those after it; None if there are none.
        passage: that it is made in.
        operation: that it is a part of, and which it does not outlast.

    Returns:
        Yields gRPC's call. A block that ends well leaves it as it is.
    """
    with interrupts_held_back() as held:
        if operation.cancellation.is_cancelled:
            raise NotBegunError
        stream = channel.stream(rpc, first, rest, operation.deadline, passage)
        try:
            held.cancel_with(stream.cancel)
            operation.cancellation.add(stream.cancel)
            if channel.is_local and len(first) >= _WORTH_ITS_TEAM_BYTES:
                end_team()  # its members would spin for milliseconds, on cores that the server computes with
            yield stream
        except (grpc.RpcError, RemoteError):
            end(stream)
            raise
        except BaseException:  # such as what the handler of another signal than Ctrl-C raises
            stream.cancel()
            raise
        finally:
            operation.cancellation.remove(stream.cancel)
