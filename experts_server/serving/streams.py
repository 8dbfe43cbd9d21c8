"""One Forward or Backward stream: messages in, calls to the experts, results out as they come.

    event loop                                    workers
    ----------                                    -------
    message -> reader -> calls -> registry ────▶  compute
    stream  <- writer <- results <── one wake-up ──┘

What is guaranteed: each parcel that arrives whole is answered once, whatever becomes of its siblings; a damaged
message ends the stream with DATA_LOSS; when the client goes away, or its deadline passes, calls that have not
begun are never begun. A client that is frozen or unplugged while it sends a call keeps the room of that call no longer
than `STALLED_S`, if somebody else is refused for want of it.

Small results are gathered: they leave when all calls that have come are done, when for `GATHER_S` none was added, or
when the first has waited for `LONGEST_GATHER_S`, and not one by one: a message costs the loop more than ten results,
and each time it wakes it takes the interpreter from the workers. Large ones leave at the first look.
Threads: everything runs on the event loop, except `take_result`, which workers call, and what encodes and decodes.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import threading
import time
from collections import deque
from typing import Any, Protocol

from experts_server.budget import Budget
from experts_server.hosting.calls import BackwardCall, Call, Outputs, encoded
from experts_server.queues.registry import Registry
from experts_server.serving.arriving import backward_call, forward_call
from experts_server.serving.doorway import EOF, Passing
from experts_server.serving.unanswered import Unanswered
from moe_autograd.errors import CorruptDataError, InvalidCallError, RemoteError, ServerBusyError
from moe_autograd.wire import experts_pb2 as pb
from moe_autograd.wire.heads import BACKWARD, FORWARD, Head, ResultHead
from moe_autograd.wire.options import PARCEL_BYTES
from moe_autograd.wire.parcels import Parcel, ParcelReader, ParcelWriter
from moe_autograd.wire.status import status_of
from moe_autograd.wire.tensors import TensorLimits, Travelling

logger = logging.getLogger(__name__)

GATHER_S = 0.002
LONGEST_GATHER_S = 0.01
LARGE_BYTES = 1 << 20
STALLED_S = 3.0
UNTAKEN_BYTES = 64 << 20  # of answers: while a client leaves more of them, no more of its calls are taken


class PassSettings(Protocol):
    """What a stream has to know of its server."""

    registry: Registry
    limits: TensorLimits
    max_calls_per_pass: int
    latency_s: float
    mark: int
    received: Budget
    unanswered: Unanswered


class PassStream:
    """One stream.

    Args:
        settings: the server's.
        kind: the head that its parcels must have: `FORWARD` or `BACKWARD`.
        rpc: it.
    """

    def __init__(
        self,
        settings: PassSettings,
        kind: tuple[type[Any], ...],
        rpc: Passing,
    ) -> None:
        self._settings = settings
        self._kind = kind
        self._rpc = rpc
        most = min(settings.limits.max_unfinished_bytes, settings.received.limit)
        self._reader = ParcelReader(dataclasses.replace(settings.limits, max_unfinished_bytes=most))
        self._writer = ParcelWriter()
        self._loop, self._thread_id = asyncio.get_running_loop(), threading.get_ident()
        self._outstanding: dict[int, Call] = {}
        rpc.at_work = self._outstanding
        self._num_calls = 0
        self._num_held = 0
        self._num_messages = 0
        self._reads_since: float | None = None  # when it began to wait for the next message, if it does
        self._is_watched = False  # whether somebody will look if it stalls
        self._num_call_bytes = 0  # of those that are outstanding, when they came
        self._num_leaving_bytes = 0  # of the message that is being written
        self._has_all = False
        self._is_over = False
        self._failure: BaseException | None = None
        self._wake = asyncio.Event()
        self._may_have_room = asyncio.Event()
        self._results: deque[tuple[Call, Any]] = deque()
        self._is_look_due = False  # guarded by the GIL: somebody will look for results
        self._num_seen = 0  # results at the last look
        self._gathers_since = 0.0
        remaining_s = rpc.time_remaining()
        self._deadline = None if remaining_s is None else time.monotonic() + remaining_s

    async def run(self) -> None:
        """Serve the stream to its end.

        Raises:
            CorruptDataError: a message was damaged.
        """
        receiver: asyncio.Future[None] | None = None
        try:
            await self._receive_one()  # before anything else is set up: mostly it is the only one
            if not self._has_all:
                receiver = asyncio.ensure_future(self._receive())
            await self._send()
        finally:
            if receiver is not None:
                receiver.cancel()
            # Its traceback leads back here, and the cycle collector rarely comes by beside torch.
            self._failure = None
            self._hold(0)
            for call in self._outstanding.values():
                call.is_cancelled = True
            self._is_over = True
            self._settings.unanswered.note(self, 0)
            self._outstanding.clear()  # calls know the stream, by their `reply`
            self._results.clear()

    # ---- in

    async def _receive(self) -> None:
        try:
            while not self._has_all:
                while self._leaves_too_much():
                    self._may_have_room.clear()
                    await self._may_have_room.wait()
                await self._receive_one()
        except BaseException as error:
            if not self._is_over:  # else nobody takes it from here, and its traceback leads back
                self._failure = error
                self._wake.set()

    def _leaves_too_much(self) -> bool:
        """Tell whether more calls of this client have to wait until it has taken answers."""
        has_some = self._note_unanswered() > 0
        return (has_some and self._settings.unanswered.are_many) or self._num_untaken_bytes() > UNTAKEN_BYTES

    def look_again(self) -> None:
        """See `Leaving`."""
        self._may_have_room.set()

    def _note_unanswered(self) -> int:
        """Let the other streams know how many bytes the calls and answers of this one have; return how many."""
        done = [call.num_bytes for call, _ in list(self._results)]  # which have let go of their tensors
        unanswered = self._num_untaken_bytes() + self._num_call_bytes - sum(done)
        if not self._is_over:
            self._settings.unanswered.note(self, unanswered)
        return unanswered

    def _num_untaken_bytes(self) -> int:
        """Return about how much memory the answers have that are on their way, or wait for it."""
        results = [result for _, result in list(self._results)]  # in one go, as below
        return self._num_leaving_bytes + self._writer.num_bytes + sum(map(_num_bytes, results))

    async def _receive_one(self) -> None:
        """Take the next message, or note that all have come."""
        self._reads_since = time.monotonic()
        message: Any = await self._rpc.read()
        self._reads_since = None
        if message is not EOF:
            self._num_messages += 1
            await self._take_message(message)
        if message is EOF or self._reader.has_last:
            self._reader.finish()
            self._has_all = True
            if len(self._results) >= len(self._outstanding):
                self._wake.set()

    async def _take_message(self, message: bytes) -> None:
        feed, takes_long = self._reader.feed, self._reader.num_encoded > 0
        parcels = await asyncio.to_thread(feed, message) if takes_long else feed(message)
        are_finite = len(parcels) > 1 and self._reader.prove_finite()
        self._hold(self._reader.num_unfinished_bytes)  # memory is taken for all that is announced
        calls = []
        for parcel in parcels:
            if (call := self._accept(parcel)) is not None:
                call.is_finite = are_finite
                calls.append(call)
        if not calls:
            return
        if self._settings.latency_s > 0:
            self._loop.call_later(self._settings.latency_s, self._submit, calls)
        else:
            self._submit(calls)

    def _submit(self, calls: list[Call]) -> None:
        gathers = not self._is_look_due and len(self._outstanding) > 1  # one alone leaves when it is done
        self._is_look_due |= gathers
        self._settings.registry.submit(calls)
        if gathers and len(self._results) < len(self._outstanding):
            self._look_later()
        elif gathers:  # small ones, computed already
            self._is_look_due = False

    def _hold(self, num_bytes: int) -> None:
        """Hold so much of what all streams together may."""
        if num_bytes > self._num_held:
            self._settings.received.take(num_bytes - self._num_held, num_bytes)
        else:
            self._settings.received.give_back(self._num_held - num_bytes)
        self._num_held = num_bytes
        if num_bytes and not self._is_watched:
            self._is_watched = True
            self._look_later_if_it_stalls()

    def _look_later_if_it_stalls(self) -> None:
        now = self._num_messages, self._settings.received.num_refused
        self._loop.call_later(STALLED_S, self._look_if_it_stalls, *now)

    def _look_if_it_stalls(self, num_messages: int, num_refused: int) -> None:
        """End the stream if it has got no further since, and others were refused for want of what it holds."""
        self._is_watched = self._num_held > 0 and not self._is_over
        if not self._is_watched:
            return
        # Where it is the server that takes no message (`_leaves_too_much`), the client does nothing wrong.
        since = self._reads_since
        waits = since is not None and time.monotonic() - since > STALLED_S / 2
        if (
            self._num_messages > num_messages
            or not waits
            or self._settings.received.num_refused == num_refused
        ):
            self._look_later_if_it_stalls()
            return
        self._failure = ServerBusyError(
            f"stream: expected more of a call within {STALLED_S:g} s, as others wait for its room "
            f"({self._settings.received.what}), got nothing. Send it again.",
            retry_after_s=self._settings.received.retry_after_s,
        )
        self._wake.set()

    def _accept(self, parcel: Parcel) -> Call | None:
        """Make a call of a parcel; one that cannot be is answered with what is wrong with it."""
        self._num_calls += 1
        try:
            call = self._call_of(parcel)
        except RemoteError as refusal:
            if isinstance(parcel.head, self._kind):
                self._settings.registry.note_refused(parcel.head.expert)
            refusal.with_traceback(None)  # which may lead to the parcel, and that back to it
            self._answer(parcel.number, status_of(refusal), None)
            return None
        call.tag = parcel.number
        call.arrived_at = time.monotonic()
        call.deadline = self._deadline
        for tensor in parcel.tensors:
            if tensor is not None:
                call.num_bytes += tensor.nbytes
        self._num_call_bytes += call.num_bytes
        self._outstanding[parcel.number] = call
        return call

    def _call_of(self, parcel: Parcel) -> Call:
        if parcel.error is not None:
            raise parcel.error
        limit = self._settings.max_calls_per_pass
        if self._num_calls > limit:
            raise InvalidCallError(f"stream: expected at most {limit} calls, got more. Open another one.")
        head = parcel.head
        if isinstance(head, self._kind):
            if isinstance(head, FORWARD):
                return forward_call(head, parcel.tensors, self.take_result, self._rpc.may_train)
            if isinstance(head, BACKWARD):
                return backward_call(head, parcel.tensors, self.take_result)
        expected, got = self._kind[0].__name__, type(head).__name__
        raise CorruptDataError(f"stream: expected {expected} parcels, got {got}. Send it again.")

    # ---- out

    def take_result(self, call: Call, result: Any) -> None:
        """Take the result of a call, or its exception; on a worker, or on the loop itself."""
        if self._is_over:
            return
        if call.reply_encoding != pb.RAW:  # encoded here, which takes long: the loop has others to serve
            result = encoded(result, call.reply_encoding)
        if isinstance(result, BaseException):
            result = status_of(result)  # an error's traceback knows the tensors of the call that failed
        call.let_go()
        self._results.append((call, result))
        has_all = len(self._results) >= len(self._outstanding)
        if has_all and threading.get_ident() == self._thread_id:
            self._wake.set()
        elif has_all or not self._is_look_due:
            self._is_look_due = True
            try:
                self._loop.call_soon_threadsafe(self._look_for_results)
            except RuntimeError:  # the loop is closed: the server has stopped, and nobody waits for this
                logger.debug("a result came after its server had stopped")

    def _look_later(self) -> None:
        self._is_look_due = True
        self._loop.call_later(GATHER_S, self._look_for_results)

    def _look_for_results(self) -> None:
        """Send what has come, unless more is just coming; if nothing has, the next result calls for a look."""
        self._is_look_due = False  # before the look: a worker adds its result, and looks here afterwards
        if not self._results:
            return
        self._note_unanswered()
        if self._num_seen == 0:
            self._gathers_since = time.monotonic()
        if self._are_enough():
            self._num_seen = 0
            self._wake.set()
        else:
            self._num_seen = len(self._results)
            self._look_later()

    def _are_enough(self) -> bool:
        results = list(self._results)  # in one go: workers add to them
        return (
            len(results) >= len(self._outstanding)
            or len(results) == self._num_seen
            or time.monotonic() - self._gathers_since > LONGEST_GATHER_S
            or sum([call.num_bytes for call, _ in results]) > LARGE_BYTES
        )

    async def _send(self) -> None:
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._results:
                call, result = self._results.popleft()
                self._outstanding.pop(call.tag, None)
                self._num_call_bytes -= call.num_bytes
                self._answer(call.tag, result, call)
            while (message := self._writer.next_message()) is not None:
                self._num_leaving_bytes = len(message)
                self._note_unanswered()
                await self._rpc.write(message)
                self._num_leaving_bytes = 0
                self._may_have_room.set()
            self._note_unanswered()
            if self._failure is not None:
                raise self._failure
            if self._has_all and not self._outstanding:
                return

    def _answer(self, number: int, result: Any, call: Call | None) -> None:
        plain = ResultHead(number, server=self._settings.mark)
        if call is not None and (started_at := call.started_at):
            plain.queue_s = started_at - call.arrived_at
            plain.compute_s = time.monotonic() - started_at
        head: Head = plain
        tensors: Any = ()
        if isinstance(result, Outputs):
            tensors = result.tensors
            plain.is_sequence, plain.has_drawn, plain.uses = result.is_sequence, result.has_drawn, result.uses
        elif isinstance(result, pb.Status):
            head = plain.message()
            head.status.CopyFrom(result)
        else:
            tensors = result
            plain.wants_no_step = isinstance(call, BackwardCall) and call.wants_no_step
        try:
            self._writer.add(head, tensors)  # in their encoding already
        except TypeError as error:  # the module returned something that cannot travel
            self._answer(number, status_of(error), call)
        if call is None:
            self._wake.set()


def _num_bytes(result: Any) -> int:
    """Return about how much memory an answer has: tensors, as they are or as they travel, or a status."""
    tensors = result.tensors if isinstance(result, Outputs) else result
    if isinstance(tensors, pb.Status):
        return PARCEL_BYTES
    forms = [tensor.plain if isinstance(tensor, Travelling) else tensor for tensor in tensors]
    return PARCEL_BYTES + sum([form.nbytes for form in forms if form is not None])
