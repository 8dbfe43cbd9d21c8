"""Where RPCs come in and errors go out: counts them, turns them away while draining, asks who calls, and speaks gRPC's
statuses.

A server that is told to stop keeps its port open while it drains: calls that come too late get a clean UNAVAILABLE
("nothing was done"), where a closing gRPC server would cancel some of them half way.

Who is inside has a place, of which there are so many. A client that does not send what its RPC still lacks would keep
it as long as it answers pings, so in the end that is ended. (An answer that nobody takes cannot be: a status waits
behind it. Such an RPC has its place until its client goes, or until its deadline.)
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import AsyncIterable, AsyncIterator, Sized
from types import TracebackType
from typing import Any

import grpc

from experts_server.budget import Budget
from experts_server.serving.security import Gate, Permission
from moe_autograd.errors import DeadlineExceededError, MoeAutogradError, ServerUnavailableError
from moe_autograd.wire.status import rpc_status_of

logger = logging.getLogger(__name__)

LINGER_S = 0.2  # so that those on their way still find a door that answers
PATIENCE_S = 600.0  # a large message may be on its way for long
STALLED_S = 10.0

Context = grpc.aio.ServicerContext[bytes, bytes]
Metadata = tuple[tuple[str, str | bytes], ...]
EOF: Any = grpc.aio.EOF  # type: ignore[attr-defined]  # which the stub leaves out


class Doorway:
    """What every RPC passes through.

    Args:
        max_concurrent_rpcs: more are turned away with a hint when to come back.
        gate: who may do what; by default everybody everything.

    Threads: the event loop's.
    """

    def __init__(self, max_concurrent_rpcs: int, gate: Gate | None = None) -> None:
        self._inside = Budget(max_concurrent_rpcs, "RPCs at once")
        self.gate = gate or Gate()
        self._is_closed = False
        self._is_empty = asyncio.Event()
        self.passing_now: set[Passing] = set()
        self._looked_at_s = time.monotonic()
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
        return Passing(context, permission, self)

    def end_silent(self) -> None:
        """End the RPCs whose clients have kept them waiting for too long; to be called from time to time."""
        before_s, self._looked_at_s = self._looked_at_s, time.monotonic()
        if self._looked_at_s - before_s > STALLED_S:
            return  # the loop has stood still, and what has come meanwhile is yet to be read
        for one in [one for one in self.passing_now if one.has_waited_too_long(self._looked_at_s)]:
            one.end_silent()

    async def let_in(self, context: Context, permission: Permission) -> Permission:
        """Give an RPC a place and return what it may do, or raise what is to end it."""
        self._take_place()
        # not the context's own callbacks, which hold it: a cycle, and in it the server, until the collector comes by
        _current_task().add_done_callback(self._leave)
        return await self.gate.check(context.invocation_metadata(), permission)

    async def close(self, timeout_s: float) -> bool:
        """Let nobody in any more and wait for those inside; return whether all have left."""
        self._is_closed = True
        if self._inside.in_use == 0:
            self._is_empty.set()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._is_empty.wait(), timeout_s)
        await asyncio.sleep(LINGER_S)
        return self._is_empty.is_set()

    def _take_place(self) -> None:
        if self._is_closed:
            raise ServerUnavailableError(
                "server: expected to be ready, got draining: it is about to stop. Nothing was done; call another one."
            )
        self._inside.take(1)
        self.num_entered += 1

    def _leave(self, task: asyncio.Task[Any]) -> None:
        self._inside.give_back(1)
        if self._is_closed and self._inside.in_use == 0:
            self._is_empty.set()


async def only_message(rpc: Passing) -> bytes:
    """Return the one message of an RPC; empty where none has come whole, since a bit of its length was flipped.

    Then grpc's own handlers of one message end without an answer, and the client would wait until its deadline. And
    they wait for it outside of any doorway: who never sends it would take the place of others, and needs no token.
    """
    return await rpc.read() or b""


class Passing:
    """One RPC, and around its handling, from its entry on; see `Doorway.passing`.

    Args:
        context: grpc's.
        permission: that it needs.
        doorway: that it passes through.

    Attributes:
        at_work: what it has asked for and is not computed yet; while there is some, it may send more or not.
        may_train: whether it may do more than read, whatever it needs.
        patience_s: how long its client may keep it waiting.
    """

    __slots__ = (
        *("_context", "_doorway", "_edition", "_is_ended", "_permission", "_reads_since", "_task"),
        *("_watches_writes", "_writes_since", "at_work", "may_train", "patience_s"),
    )

    def __init__(self, context: Context, permission: Permission, doorway: Doorway) -> None:
        self._context, self._permission, self._doorway = context, permission, doorway
        self._edition = doorway.gate.edition  # of the tokens, when its own was last asked for
        self._task: asyncio.Task[Any] | None = None
        self._reads_since: float | None = None
        self._writes_since: float | None = None
        self._is_ended = self._watches_writes = self.may_train = False
        self.at_work: Sized = ()
        self.patience_s = PATIENCE_S

    async def read(self) -> Any:
        """Return the next message, or `EOF`.

        Raises:
            PermissionDeniedError: its token has been taken back meanwhile.
        """
        self._reads_since = time.monotonic()
        try:
            message = await self._context.read()
        finally:
            self._reads_since = None
        await self.ask_again()
        return message

    async def ask_again(self) -> None:
        """Raise what a new RPC would end with, if tokens have changed since it was let in; cheap if not."""
        edition = await self._doorway.gate.edition_now()
        if edition != self._edition:
            granted = await self._doorway.gate.check(self._context.invocation_metadata(), self._permission)
            self._edition, self.may_train = edition, granted == "train"

    async def read_all(self, requests: AsyncIterable[Any]) -> AsyncIterator[Any]:
        """Return the messages that grpc has decoded."""
        messages = aiter(requests)
        while True:
            self._reads_since = time.monotonic()
            try:
                request = await anext(messages)
            except StopAsyncIteration:
                return
            finally:
                self._reads_since = None
            yield request

    async def write(self, message: bytes) -> None:
        """Send one, when there is room for it on its way."""
        self._writes_since = time.monotonic()
        try:
            await self._context.write(message)
        finally:
            self._writes_since = None
            if self._reads_since is not None:  # meanwhile, for what comes after this answer
                self._reads_since = time.monotonic()

    async def watch_writes(self) -> None:
        """Let writes count, too: where the client takes nothing of them, its handling is over, and the status waits.

        To be called before the first; grpc could not send the status of an RPC whose first write was interrupted.
        """
        await self._context.send_initial_metadata(())
        self._watches_writes = True

    def time_remaining(self) -> float | None:
        """Return the seconds until the client's deadline; `None`: it has none."""
        return self._context.time_remaining()

    def peer(self) -> str:
        """Return whom it comes from, as grpc names connections."""
        return self._context.peer()

    async def abort(self, code: grpc.StatusCode, details: str = "", trailing: Metadata = ()) -> None:
        """End it with a status, by grpc's own error.

        grpc keeps that with the RPC. So it is to forget where it has been, and what it came of, when it has arrived:
        their frames hold the RPC, which would stay until the garbage collector comes by, and its server with it.
        """
        try:
            await self._context.abort(code, details, trailing)
        except grpc.aio.AbortError as error:
            _current_task().add_done_callback(functools.partial(_forget_way, error))
            raise

    def has_waited_too_long(self, now_s: float) -> bool:
        """Whether its client has kept it waiting for longer than it may."""
        if self._writes_since is not None:
            return self._watches_writes and now_s - self._writes_since > self.patience_s
        if self._reads_since is None or self.at_work:
            return False
        return now_s - self._reads_since > self.patience_s

    def end_silent(self) -> None:
        """Interrupt its handling."""
        if self._task is not None:
            self._is_ended = True
            self._task.cancel()

    async def __aenter__(self) -> Passing:
        try:
            self.may_train = await self._doorway.let_in(self._context, self._permission) == "train"
        except asyncio.CancelledError:
            raise  # its client has gone
        except BaseException as error:
            await self._end(error)
        self._task = asyncio.current_task()
        self._doorway.passing_now.add(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        del traceback  # as in `_end`
        self._doorway.passing_now.discard(self)
        self._task = None
        if self._is_ended and isinstance(error, asyncio.CancelledError):
            error.with_traceback(None)
            error = DeadlineExceededError(
                f"server: expected its client to keep it waiting for at most {self.patience_s:g} s, got nothing for "
                "longer. Call again."
            )
        if error is not None and not isinstance(error, (asyncio.CancelledError, grpc.aio.AbortError)):
            await self._end(error)

    async def _end(self, error: BaseException) -> None:
        """End the RPC with the status that says what went wrong, which raises grpc's own error for that."""
        if isinstance(error, grpc.aio.InternalError):  # of a write or read, where grpc may tell of it first
            logger.debug("a client has gone in the midst of a call: %s", error)
            raise asyncio.CancelledError  # there is nobody to tell, and grpc would log that as our failure
        if not isinstance(error, MoeAutogradError):
            logger.error("a call failed in the server itself", exc_info=error)
        error.with_traceback(None)  # which knows what has come, and is of no use any more
        await self.abort(*rpc_status_of(error))


def _current_task() -> asyncio.Task[Any]:
    """Return that of the RPC: grpc awaits its handler in it, and writes its answer or status."""
    task = asyncio.current_task()
    assert task is not None, "handlers run in tasks"
    return task


def _forget_way(error: BaseException, _: asyncio.Task[Any]) -> None:
    error.__context__ = None
    error.with_traceback(None)
