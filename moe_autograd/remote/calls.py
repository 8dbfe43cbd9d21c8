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

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import grpc
import torch

from moe_autograd.errors import CorruptDataError, InputsNeededError, RemoteError, StragglerError
from moe_autograd.remote.channel import Channel, error_of_call
from moe_autograd.remote.deadline import Deadline
from moe_autograd.remote.fanout import Cancellation
from moe_autograd.timeline import add_span, is_recording
from moe_autograd.wire import experts_pb2 as pb
from moe_autograd.wire.heads import RESULT, BackwardHead, ForwardHead, ResultHead
from moe_autograd.wire.parcels import Parcel, ParcelReader, ParcelWriter, Tensors
from moe_autograd.wire.status import error_of
from moe_autograd.wire.tensors import TensorLimits


@dataclass(slots=True)
class Request:
    """A call to be made.

    Args:
        expert: its name.
        head: what is asked.
        tensors: what goes along.
        with_inputs: makes the head and the tensors for a server that no longer has the inputs; None where that
            cannot be.
        on_settled: called with whether it was answered or failed for good, as soon as that is known; from any thread.
    """

    expert: str
    head: ForwardHead | BackwardHead
    tensors: Sequence[torch.Tensor | None]
    encoding: pb.Encoding = pb.RAW
    with_inputs: Callable[[], tuple[BackwardHead, Sequence[torch.Tensor | None]]] | None = None
    on_settled: Callable[[bool], None] = lambda is_answered: None


@dataclass(slots=True)
class Outcome:
    """What became of a call.

    Args:
        tensors: of the result.
        is_sequence: whether the expert returned a tuple.
        error: None where it went well.
        was_answered: whether the server answered this very call.
        server_s: how long the server had it, in its queue and computing, as it says.
    """

    tensors: Tensors = ()
    is_sequence: bool = False
    error: RemoteError | None = None
    was_answered: bool = True
    server_s: float = 0.0


def exchange(
    channel: Channel,
    rpc: str,
    requests: Sequence[Request],
    deadline: Deadline,
    limits: TensorLimits,
    cancellation: Cancellation,
    outcomes_by_index: dict[int, Outcome] | None = None,
) -> list[Outcome]:
    """Make all calls in one stream and return their outcomes, in order.

    Args:
        channel: to the server.
        rpc: `Forward` or `Backward`.
        requests: the calls.
        deadline: of the operation.
        limits: of what the server sends.
        cancellation: of the operation.
        outcomes_by_index: filled with the outcomes as they come, before `on_settled` is called.

    Raises:
        ServerUnavailableError: the channel has been closed.
        KeyboardInterrupt: Ctrl-C; the stream is cancelled first.
    """
    filled = {} if outcomes_by_index is None else outcomes_by_index
    outcomes = _one_stream(channel, rpc, requests, deadline, limits, cancellation, filled)
    again = [
        index
        for index, outcome in enumerate(outcomes)
        if isinstance(outcome.error, InputsNeededError) and requests[index].with_inputs is not None
    ]
    if again:
        repeated = [_with_inputs(requests[index]) for index in again]
        results = _one_stream(channel, rpc, repeated, deadline, limits, cancellation, {})
        for index, outcome in zip(again, results, strict=True):
            outcomes[index] = outcome
    return outcomes


def _with_inputs(request: Request) -> Request:
    assert request.with_inputs is not None
    head, tensors = request.with_inputs()
    return Request(request.expert, head, tensors, request.encoding, on_settled=request.on_settled)


def _one_stream(
    channel: Channel,
    rpc: str,
    requests: Sequence[Request],
    deadline: Deadline,
    limits: TensorLimits,
    cancellation: Cancellation,
    outcomes: dict[int, Outcome],
) -> list[Outcome]:
    started_s = time.perf_counter()
    writer = ParcelWriter()
    index_of = {
        writer.add(request.head, request.tensors, request.encoding): index
        for index, request in enumerate(requests)
    }
    first = writer.next_message()
    assert first is not None, "there is a call to make"
    stream = channel.stream(rpc, first, iter(writer.next_message, None) if writer else None, deadline)
    cancellation.add(stream.cancel)

    def place(index: int) -> str:
        return f"expert {requests[index].expert!r} at {channel.address}, {rpc.lower()}, {deadline}"

    def fail_the_rest(error_at: Callable[[str], RemoteError]) -> None:
        for index in range(len(requests)):
            if index not in outcomes:
                outcomes[index] = Outcome(error=error_at(place(index)), was_answered=False)

    reader = ParcelReader(limits)
    try:
        for message in stream:
            for parcel in reader.feed(message):
                index, result = _result_of(parcel, index_of)
                if index in outcomes:
                    raise CorruptDataError(f"call {result.call}: expected one result, got a second.")
                request = requests[index]
                if parcel.error is None and result.status.code == pb.OK:
                    server_s = result.queue_s + result.compute_s
                    outcomes[index] = Outcome(parcel.tensors, result.is_sequence, server_s=server_s)
                    request.on_settled(True)
                else:
                    outcomes[index] = Outcome(error=_error_in(parcel, result, request.expert, place(index)))
                if is_recording():
                    add_span(request.expert, rpc.lower(), started_s, time.perf_counter())
        reader.finish()
        if channel.encodings.is_measuring(rpc) and len(outcomes) == len(requests):
            _measure(channel, rpc, requests, outcomes.values(), time.perf_counter() - started_s)
        fail_the_rest(
            lambda where: RemoteError(f"{where}: expected a result, got none. The server is broken.")
        )
    except grpc.RpcError as error:
        broken: grpc.RpcError = error
        channel.note_failure(broken)
        if cancellation.reason:
            fail_the_rest(lambda where: StragglerError(f"{where}: {cancellation.reason}"))
        fail_the_rest(lambda where: _caused(error_of_call(broken, where), broken))
    except CorruptDataError as error:
        damaged: CorruptDataError = error
        fail_the_rest(lambda where: _caused(CorruptDataError(f"{where}: {damaged}"), damaged))
    finally:
        stream.cancel()  # if it is still under way: Ctrl-C, or damage
        cancellation.remove(stream.cancel)
    return [outcomes[index] for index in range(len(requests))]


def _measure(
    channel: Channel, rpc: str, requests: Sequence[Request], outcomes: Collection[Outcome], taken_s: float
) -> None:
    """Note how long a stream took for its bytes, beyond what the server did and one round trip."""
    travelled = [*(request.tensors for request in requests), *(outcome.tensors for outcome in outcomes)]
    num_bytes = sum(tensor.nbytes for tensors in travelled for tensor in tensors if tensor is not None)
    elsewhere_s = max(outcome.server_s for outcome in outcomes) + channel.round_trip_s
    moving_s = max(taken_s - elsewhere_s, 0.1 * taken_s)  # both are estimates
    channel.encodings.note_transfer(rpc, num_bytes, moving_s)


def _caused(error: RemoteError, cause: BaseException) -> RemoteError:
    error.__cause__ = cause
    return error


def _result_of(parcel: Parcel, index_of: dict[int, int]) -> tuple[int, pb.CallResult | ResultHead]:
    if not isinstance(parcel.head, RESULT) or parcel.head.call not in index_of:
        raise CorruptDataError(f"result: expected that of a call we made, got {parcel.head!r}.")
    return index_of[parcel.head.call], parcel.head


def _error_in(parcel: Parcel, result: pb.CallResult | ResultHead, expert: str, place: str) -> RemoteError:
    if parcel.error is not None:
        return _caused(CorruptDataError(f"{place}: {parcel.error}"), parcel.error)
    status = result.status
    status.message = without_name(status.message, expert)
    return error_of(status, place)


def without_name(message: str, expert: str) -> str:
    """Return a server's message without the expert's name at its beginning: the place has it already."""
    return message.removeprefix(f"expert {expert!r}").lstrip(":, ")
