"""Many calls of one server in one stream: send them all, take each result as it comes.

::

    exchange(channel, "Forward", requests)                     server
       │ writer.add(...) for each call                            │
       │ ── message: calls 0, 1, 2, part of 3 ──────────────────> │ begins 0, 1, 2
       │ ── message: rest of 3 ─────────────────────────────────> │ begins 3
       │ <────────────────────────── message: results of 1, 0 ─── │
       │ <──────────────── message: INPUTS_NEEDED for 2, 3 ok ─── │
       │ ── (a second stream) call 2 again, with its inputs ────> │
       │ <─────────────────────────────── message: result of 2 ── │

A call that fails has an error as its outcome, and the others have theirs. What fails with the connection fails
for all calls that have no outcome yet.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import grpc
import torch

from moe_autograd.errors import CorruptDataError, InputsNeededError, RemoteError, StragglerError
from moe_autograd.remote.channel import Channel
from moe_autograd.remote.compression import MEASURED_BYTES
from moe_autograd.remote.forking import GATE, KeptWaitingError, Passage
from moe_autograd.remote.operations import Operation
from moe_autograd.remote.streaming import streaming
from moe_autograd.timeline import add_span, is_recording
from moe_autograd.wire import experts_pb2 as pb
from moe_autograd.wire.heads import RESULT, BackwardHead, ForwardHead, ResultHead
from moe_autograd.wire.parcels import Parcel, ParcelReader, ParcelWriter, Tensors
from moe_autograd.wire.status import error_of


@dataclass(slots=True)
class Request:
    """A call to be made.

    Args:
        expert: its name.
        head: what is asked.
        tensors: what goes along.
        encoding: how the tensors travel; one for all, or for each.
        inputs: of a backward, for a server that no longer has them; None where there are none to send.
        input_encoding: how these travel: as in the forward.
        random_seed: of the forward; goes with them.
        replica: the same; which made the forward; 0: there is one only.
        on_settled: called with whether it was answered or failed for good, as soon as that is known; from any thread.
        asked: further addresses that may have got it; shared by the requests of a hedged forward.
    """

    expert: str
    head: ForwardHead | BackwardHead
    tensors: Sequence[torch.Tensor | None]
    encoding: pb.Encoding | Sequence[pb.Encoding] = pb.RAW
    inputs: Sequence[torch.Tensor] | None = None
    input_encoding: pb.Encoding = pb.RAW
    random_seed: int = 0
    replica: int = 0
    on_settled: Callable[[bool], None] = lambda is_answered: None
    asked: set[str] = field(default_factory=set)


@dataclass(slots=True)
class Outcome:
    """What became of a call.

    Args:
        tensors: of the result.
        is_sequence: whether the expert returned a tuple.
        error: None where it went well.
        was_answered: whether the server answered this very call.
        server_s: how long the server had it, in its queue and computing, as it says.
        has_drawn: of a forward with a random seed: whether it drew random numbers.
        wants_no_step: of a backward: whether its gradients of weights are applied without a step.
        server: which one answered, as it was started; 0: it does not say.
        uses: of a forward: pairs of tensors that were computed from another one, and that one.
    """

    tensors: Tensors = ()
    is_sequence: bool = False
    error: RemoteError | None = None
    was_answered: bool = True
    server_s: float = 0.0
    has_drawn: bool = False
    wants_no_step: bool = False
    server: int = 0
    uses: Sequence[int] = ()


def exchange(
    channel: Channel,
    rpc: str,
    requests: Sequence[Request],
    operation: Operation,
    outcomes_by_index: dict[int, Outcome] | None = None,
) -> list[Outcome]:
    """Make all calls in one stream and return their outcomes, in order.

    Args:
        channel: to the server.
        rpc: `Forward` or `Backward`.
        requests: the calls.
        operation: that they are a part of.
        outcomes_by_index: filled with the outcomes as they come, before `on_settled` is called.

    Raises:
        ServerUnavailableError: the channel has been closed.
        KeyboardInterrupt: Ctrl-C; the stream is cancelled first.
    """
    line = _Line(channel, rpc, operation)
    outcomes = line.settle(requests, {} if outcomes_by_index is None else outcomes_by_index)
    again = [
        index
        for index, outcome in enumerate(outcomes)
        if isinstance(outcome.error, InputsNeededError) and requests[index].inputs is not None
    ]
    if again:
        results = line.settle([_with_inputs(requests[index]) for index in again], {})
        for index, outcome in zip(again, results, strict=True):
            outcomes[index] = outcome
    return outcomes


def _with_inputs(request: Request) -> Request:
    assert request.inputs is not None
    assert isinstance(request.head, BackwardHead)
    assert isinstance(request.encoding, int)
    head = dataclasses.replace(
        request.head, has_inputs=True, random_seed=request.random_seed, replica=request.replica
    )
    tensors = [*request.tensors, *request.inputs]
    of_inputs = [request.input_encoding] * len(request.inputs)
    encodings = [request.encoding] * len(request.tensors) + of_inputs
    return Request(request.expert, head, tensors, encodings, on_settled=request.on_settled)


@dataclass(frozen=True, slots=True)
class _Line:
    """To whom calls go, what is asked, and as a part of what."""

    channel: Channel
    rpc: str
    operation: Operation

    def settle(self, requests: Sequence[Request], outcomes: dict[int, Outcome]) -> list[Outcome]:
        """Make the calls in one stream; what a fork of this process interrupts, in another."""
        for may_interrupt in (True, False):
            if len(outcomes) < len(requests):
                stream = _Stream(self, requests, outcomes)
                try:
                    with GATE.passage(self.operation, may_interrupt=may_interrupt) as passage:
                        stream.run(passage)
                except KeptWaitingError as error:
                    stream.fail_the_rest(error.at)
        return [outcomes[index] for index in range(len(requests))]


class _Stream:
    """One stream with the calls that have no outcome yet.

    What it fails with goes on without a traceback, whose frames know the error, and the results of the whole pass.
    """

    def __init__(self, line: _Line, requests: Sequence[Request], outcomes: dict[int, Outcome]) -> None:
        self._line, self._requests, self._outcomes = line, requests, outcomes
        self._started_s = time.perf_counter()
        self._taken_s: dict[int, float] = {}  # when each result was here, while somebody measures
        self._is_measuring = line.channel.encodings.is_measuring(line.rpc)
        self._writer = ParcelWriter()
        self._index_of = {
            self._writer.add(request.head, request.tensors, request.encoding): index
            for index, request in enumerate(requests)
            if index not in outcomes
        }
        self._writer.is_complete = True

    def run(self, passage: Passage) -> None:
        """Make the calls; afterwards all have an outcome, unless a fork interrupted it."""
        channel = self._line.channel
        try:
            self._send_and_take(passage)
            self.fail_the_rest(
                lambda where: RemoteError(f"{where}: expected a result, got none. The server is broken.")
            )
        except grpc.RpcError as error:
            if passage.is_interrupted:
                return
            broken = error.with_traceback(None)
            channel.note_failure(broken)
            if reason := self._line.operation.cancellation.reason:
                self.fail_the_rest(lambda where: StragglerError(f"{where}: {reason}"))
            self.fail_the_rest(lambda where: _caused(channel.error_of_call(broken, where), broken))
        except CorruptDataError as error:
            damaged = error.with_traceback(None)
            self.fail_the_rest(lambda where: _caused(CorruptDataError(f"{where}: {damaged}"), damaged))

    def _send_and_take(self, passage: Passage) -> None:
        """Send the calls and take their results; the stream is over when this returns or raises."""
        channel, rpc, operation = self._line.channel, self._line.rpc, self._line.operation
        first = self._writer.next_message()
        assert first is not None, "there is a call to make"
        rest = iter(self._writer.next_message, None) if self._writer else None
        with streaming(channel, rpc, first, rest, passage, operation) as stream:
            reader = ParcelReader(channel.limits)
            for message in stream:
                for parcel in reader.feed(message):
                    self._take(parcel)
                if self._is_settled() and not self._writer:
                    channel.leave(stream)
                    break
            reader.finish()
        if self._is_measuring:
            self._measure()

    def _take(self, parcel: Parcel) -> None:
        """Take what became of one call."""
        index, result = _result_of(parcel, self._index_of)
        if index in self._outcomes:
            raise CorruptDataError(f"call {result.call}: expected one result, got a second.")
        request = self._requests[index]
        if parcel.error is None and result.status.code == pb.OK:
            server_s = result.queue_s + result.compute_s
            self._outcomes[index] = Outcome(
                parcel.tensors,
                result.is_sequence,
                None,
                True,
                server_s,
                result.has_drawn,
                result.wants_no_step,
                result.server,
                tuple(result.uses) if len(parcel.tensors) > 1 else (),
            )
            if self._is_measuring:
                self._taken_s[index] = time.perf_counter() - self._started_s
            request.on_settled(True)
        else:
            error = _error_in(parcel, result, request.expert, self._place(index))
            self._outcomes[index] = Outcome(error=error, server=result.server)
        if is_recording():
            add_span(request.expert, self._line.rpc.lower(), self._started_s, time.perf_counter())

    def _measure(self) -> None:
        """Note how fast bytes travelled, as the fastest call tells it.

        Until a result was here it took the time that the server had the call for, a round trip, and that of the bytes:
        of the call and all that were sent before it, of the result, and of those that had come before the server's
        time. What travelled meanwhile is not counted: an expert that computes makes no link fast.
        """
        channel, outcomes = self._line.channel, self._outcomes
        times_s = list(self._taken_s.values())
        came = [0, *itertools.accumulate(_num_bytes(outcomes[index].tensors) for index in self._taken_s)]
        fastest, num_sent = (0, 1.0), 0
        for index in self._index_of.values():  # in this order they are sent
            num_sent += _num_bytes(self._requests[index].tensors)
            if index in self._taken_s:
                travelled_s = self._taken_s[index] - outcomes[index].server_s
                num_came = came[bisect.bisect_left(times_s, travelled_s)]
                num_bytes = num_sent + num_came + _num_bytes(outcomes[index].tensors)
                # all are estimates
                moving_s = max(travelled_s - channel.round_trip_s, 0.1 * travelled_s, 1e-6)
                if num_bytes >= MEASURED_BYTES and num_bytes * fastest[1] > fastest[0] * moving_s:
                    fastest = num_bytes, moving_s
        channel.encodings.note_transfer(self._line.rpc, *fastest)

    def _is_settled(self) -> bool:
        return len(self._outcomes) == len(self._requests)

    def _place(self, index: int) -> str:
        line, name = self._line, self._requests[index].expert
        return line.operation.place(f"expert {name!r} at {line.channel.address}", line.rpc)

    def fail_the_rest(self, error_at: Callable[[str], RemoteError]) -> None:
        """Let calls without an outcome fail, with the error that `error_at` returns for the place of each."""
        for index in range(len(self._requests)):
            if index not in self._outcomes:
                self._outcomes[index] = Outcome(error=error_at(self._place(index)), was_answered=False)


def _num_bytes(tensors: Sequence[torch.Tensor | None]) -> int:
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def _caused(error: RemoteError, cause: BaseException) -> RemoteError:
    error.__cause__ = cause
    return error


def _result_of(parcel: Parcel, index_of: dict[int, int]) -> tuple[int, pb.CallResult | ResultHead]:
    head = parcel.head
    if not isinstance(head, RESULT) or head.call not in index_of:
        got = f"that of call {head.call}" if isinstance(head, RESULT) else type(head).__name__
        raise CorruptDataError(f"result: expected that of a call we made, got {got}. The server is broken.")
    return index_of[head.call], head


def _error_in(parcel: Parcel, result: pb.CallResult | ResultHead, expert: str, place: str) -> RemoteError:
    if parcel.error is not None:
        return _caused(CorruptDataError(f"{place}: {parcel.error}"), parcel.error)
    status = result.status
    status.message = without_name(status.message, expert)
    return error_of(status, place)


def without_name(message: str, expert: str) -> str:
    """Return a server's message without the expert's name at its beginning: the place has it already."""
    return message.removeprefix(f"expert {expert!r}").lstrip(":, ")
