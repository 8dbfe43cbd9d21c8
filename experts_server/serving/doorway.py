"""Where RPCs come in and errors go out: counts them, turns them away while draining, asks who calls, and speaks gRPC's
statuses.

A server that is told to stop keeps its port open while it drains: calls that come too late get a clean UNAVAILABLE
("nothing was done"), where a closing gRPC server would cancel some of them half way.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from functools import partial
from types import TracebackType

import grpc

from experts_server.budget import Budget
from experts_server.serving.security import Gate, Permission
from moe_autograd.errors import MoeAutogradError, ServerUnavailableError
from moe_autograd.wire.status import rpc_status_of

logger = logging.getLogger(__name__)

LINGER_S = 0.2  # so that those on their way still find a door that answers

Context = grpc.aio.ServicerContext[bytes, bytes]


class Doorway:
    """What every RPC passes through.

    Args:
        max_concurrent_rpcs: more are turned away with a hint when to come back.
        gate: who may do what; by default everybody everything.

    Threads: the event loop's.
    """

    def __init__(self, max_concurrent_rpcs: int, gate: Gate | None = None) -> None:
        self._inside = Budget(max_concurrent_rpcs, "RPCs at once")
        self._gate = gate or Gate()
        self._is_closed = False
        self._is_empty = asyncio.Event()
        self.num_entered = 0  # since it is open

    def __repr__(self) -> str:
        return f"<Doorway {'closed' if self._is_closed else 'open'}, {self._inside.in_use} inside>"

    @property
    def num_inside(self) -> int:
        """How many RPCs are under way."""
        return self._inside.in_use

    def passing(self, context: Context, permission: Permission) -> Passing:
        """Around the handling of one RPC, which needs `permission`; an error ends it with the status that says so.

        It has left when its answer is written, which is after its handling: who waits for the last one to leave, to
        close the connections behind it, cuts off no answer.
        """
        return Passing(context, partial(self._let_in, context, permission))

    def _let_in(self, context: Context, permission: Permission) -> None:
        self._enter()
        context.add_done_callback(self._leave)  # type: ignore[arg-type]  # the stub wants a class of its own
        self._gate.check(context.invocation_metadata(), permission)

    async def close(self, timeout_s: float) -> bool:
        """Let nobody in any more and wait for those inside; return whether all have left."""
        self._is_closed = True
        if self._inside.in_use == 0:
            self._is_empty.set()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._is_empty.wait(), timeout_s)
        await asyncio.sleep(LINGER_S)
        return self._is_empty.is_set()

    def _enter(self) -> None:
        if self._is_closed:
            raise ServerUnavailableError(
                "server: expected to be ready, got draining: it is about to stop. Nothing was done; call another one."
            )
        self._inside.take(1)
        self.num_entered += 1

    def _leave(self, context: Context) -> None:
        self._inside.give_back(1)
        if self._is_closed and self._inside.in_use == 0:
            self._is_empty.set()


async def only_message(context: Context) -> bytes:
    """Return the one message of an RPC; empty where none has come whole, since a bit of its length was flipped.

    Then grpc's own handlers of one message end without an answer, and the client would wait until its deadline. And
    they wait for it outside of any doorway: who never sends it, and needs no token for that, took the place of others.
    """
    return await context.read() or b""


class Passing:
    """The handling of one RPC, from its entry on; see `Doorway.passing`."""

    __slots__ = ("_context", "_enter")

    def __init__(self, context: Context, enter: Callable[[], None]) -> None:
        self._context, self._enter = context, enter

    async def __aenter__(self) -> None:
        try:
            self._enter()
        except BaseException as error:
            await self._end(error)

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool:
        del traceback  # as in `_end`
        if error is not None and not isinstance(error, (asyncio.CancelledError, grpc.aio.AbortError)):
            await self._end(error)
        return False

    async def _end(self, error: BaseException) -> None:
        """End the RPC with the status that says what went wrong, which raises grpc's own error for that."""
        if isinstance(error, grpc.aio.InternalError):  # of a write or read, where grpc may tell of it first
            logger.debug("a client has gone in the midst of a call: %s", error)
            raise asyncio.CancelledError  # there is nobody to tell, and grpc would log that as our failure
        if not isinstance(error, MoeAutogradError):
            logger.error("a call failed in the server itself", exc_info=error)
        # The traceback knows what has come; grpc keeps the error until the garbage collector comes by.
        error.with_traceback(None)
        await self._context.abort(*rpc_status_of(error))
