"""One server: the RPCs as plain calls that raise our errors, on one connection (`link`).

This is the one edge of the client where gRPC's exceptions are translated. Every RPC has a deadline, which gRPC
carries to the server.

Threads: any number may call at once; they share the connection.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import grpc
from google.protobuf.message import Message

from moe_autograd._contexts import contextmanager
from moe_autograd._interrupts import uninterrupted
from moe_autograd.errors import CorruptDataError, DeadlineExceededError, RemoteError, ServerUnavailableError
from moe_autograd.remote.compression import Encodings
from moe_autograd.remote.deadline import Deadline
from moe_autograd.remote.ends import LeftStreams
from moe_autograd.remote.forking import GATE, KeptWaitingError, Passage
from moe_autograd.remote.interrupts import interrupts_held_back
from moe_autograd.remote.link import Link, Stubs
from moe_autograd.remote.operations import Operation, phase_of
from moe_autograd.remote.security import Certificates, Token
from moe_autograd.wire.addresses import is_local
from moe_autograd.wire.framing import seal
from moe_autograd.wire.status import error_of_rpc
from moe_autograd.wire.tensors import TensorLimits

_REFUSALS = (grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNAUTHENTICATED)
_LOST = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.DATA_LOSS)
_TELL_TIMEOUT_S = 5.0


class Channel:
    """The connection to one server.

    Args:
        address: `host:port`.
        authority: the name that the server is called by, `host:port`.
        token: sent with every RPC; shared, as what follows is, by all channels of a connection.
        certificates: None for a plain connection.
        server_name: that the server's certificate has; None: the host of the name that it is called by.
        encodings: of what travels.
        limits: of what the server sends.

    Attributes:
        is_local: whether the server is on this machine, as far as its address says.
        round_trip_s: of the fastest RPC that is one message each way, but for the first, which also had to connect.
    """

    def __init__(
        self,
        address: str,
        authority: str,
        *,
        token: Token,
        certificates: Certificates | None,
        server_name: str | None,
        encodings: Encodings,
        limits: TensorLimits,
    ) -> None:
        self.address = address
        self.token = token
        self.encodings = encodings
        self.limits = limits
        self.round_trip_s = math.inf
        self.is_local = is_local(address)
        self._has_answered = False
        self._link = Link(address, authority, certificates, server_name)
        self._told: set[Any] = set()  # calls of `tell` under way
        self._left = LeftStreams()

    @property
    def authority(self) -> str:
        """The name that the server is called by."""
        return self._link.authority

    def call_by(self, authority: str) -> None:
        """Call the server by another name from now on; RPCs under way go on under the one before."""
        self._link.call_by(authority)

    def note_failure(self, error: grpc.RpcError) -> None:
        """Learn from what failed: how long this link takes for a ping, what certificates there are now, what token."""
        call = cast(Any, error)  # in grpc the exception is also the call that failed
        if call.code() in _REFUSALS:
            self.token.note_refused()
        self._link.note_failure(call.details() or "")

    def _stubs_now(self) -> Stubs:
        self._check_open()
        return self._link.stubs()

    def _check_open(self, cause: BaseException | None = None) -> None:
        """Raise what says that it has been closed, if it has."""
        if not self._link.is_open:
            raise ServerUnavailableError(
                f"server at {self.address}: expected an open connection, got a closed one. "
                "Call experts within the block of `connect`."
            ) from cause

    def _check_threads(self, rpc: str, num_threads: int) -> None:
        """Refuse an RPC for which grpc needs threads that the system does not have.

        It would begin the call all the same and let nobody read its events: that channel never closes, and each later
        call that needs a thread waits there for ever. While the interpreter takes itself apart, whoever begins a thread
        waits for it for ever.
        """
        if sys.is_finalizing():
            raise RemoteError(
                f"server at {self.address}, {phase_of(rpc)}: expected a thread to send from, got an interpreter that "
                "takes itself apart. Nothing was sent. Call it earlier, as in a function of `atexit`."
            )
        probes: list[threading.Thread] = []
        are_all_there = threading.Lock()
        try:
            with uninterrupted(), are_all_there:  # `threading` makes a RuntimeError of Ctrl-C, too
                for _ in range(num_threads):
                    probe = threading.Thread(target=_pass, args=(are_all_there,), daemon=True)
                    probe.start()
                    probes.append(probe)
        except RuntimeError as error:
            raise RemoteError(
                f"server at {self.address}, {phase_of(rpc)}: expected a thread to send from, got {str(error)!r}. "
                "Nothing was sent. Raise the limit of threads of this process."
            ) from error
        finally:
            for probe in probes:
                probe.join()

    def note_round_trip(self, taken_s: float) -> None:
        """Learn how long an RPC took that is one message each way."""
        if self._has_answered:
            self.round_trip_s = min(self.round_trip_s, taken_s)
        self._has_answered = True

    @property
    def wants_round_trip(self) -> bool:
        """Whether `round_trip_s` has to be known, to tell the bandwidth of what travels, and is not yet."""
        is_measuring = self.encodings.is_measuring("Forward") or self.encodings.is_measuring("Backward")
        return is_measuring and math.isinf(self.round_trip_s)

    def tell(self, rpc: str, request: Message, if_lost: Callable[[], None] = lambda: None) -> None:
        """Send one message that nothing waits for; returns at once.

        Args:
            rpc: its name.
            request: the message.
            if_lost: called, from any thread, where it may not have arrived and could be sent again.
        """

        def end(call: Any) -> None:
            self._told.discard(call)
            if call.code() in _LOST:
                if_lost()

        # Ctrl-C could leave a lock of the channel locked, and every later call would wait for it
        with interrupts_held_back():
            try:
                with GATE.passage(may_interrupt=True) as passage:
                    begin, deadline = self._stubs_now().unary[rpc].future, Deadline(_TELL_TIMEOUT_S)
                    call = self._begin(rpc, begin, seal(request), deadline, passage, num_threads=1)
                    self._told.add(call)  # grpc cancels a call that nobody holds
                    call.add_done_callback(end)
            except (KeptWaitingError, RemoteError, ValueError):  # it is being closed, or there is no thread
                if_lost()

    def wait_until_told(self, until_s: float) -> None:
        """Wait until what was told has been answered, or until this time (`time.monotonic`); never fails."""
        for call in [*self._told]:
            with contextlib.suppress(grpc.RpcError, grpc.FutureTimeoutError, grpc.FutureCancelledError):
                call.result(max(0.0, until_s - time.monotonic()))

    def stream(
        self, rpc: str, first: bytes, rest: Iterator[bytes] | None, deadline: Deadline, passage: Passage
    ) -> Any:
        """Begin an RPC that is answered by a stream, and return gRPC's call: an iterator with `cancel()`.

        Args:
            rpc: its name.
            first: the first message.
            rest: those after it, taken by a thread of gRPC; None if there are none.
            deadline: of the whole stream.
            passage: that it is made in.
        """
        stubs = self._stubs_now()
        if rest is None:
            stream = self._begin(rpc, stubs.reply_stream[rpc], first, deadline, passage, num_threads=0)
        else:
            messages = itertools.chain([first], rest)
            stream = self._begin(rpc, stubs.both_stream[rpc], messages, deadline, passage, num_threads=2)
        self._left.end_all_but(1)  # the last: whoever has answered a later one has ended those before
        return stream

    def _begin(
        self,
        rpc: str,
        begin: Callable[..., Any],
        sent: bytes | Iterator[bytes],
        deadline: Deadline,
        passage: Passage,
        *,
        num_threads: int,
    ) -> Any:
        """Begin an RPC in a passage, and return gRPC's call; `num_threads` of gRPC serve it."""
        if num_threads:
            self._check_threads(rpc, num_threads)
        try:
            call = begin(sent, timeout=deadline.remaining_s, metadata=self.token.metadata)
        except ValueError as error:  # grpc's, where `close` comes in between
            self._check_open(error)
            raise
        passage.carry(call, has_thread=num_threads > 0)
        return call

    def leave(self, stream: Any) -> None:
        """Go on without waiting for the end of a stream that has brought all that it should."""
        self._left.add(stream)

    def end_left(self) -> None:
        """End the streams that were left."""
        self._left.end_all_but(0)  # each would keep its connection

    def error_of_call(self, error: grpc.RpcError, place: str) -> RemoteError:
        """Return our error for gRPC's; after `note_failure`."""
        call = cast(Any, error)  # in grpc the exception is also the call that failed
        if call.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
            late = f"{place}: expected an answer, got none in time. Is the server overloaded?"
            return DeadlineExceededError(late)
        ours = error_of_rpc(call.code(), call.details(), call.trailing_metadata(), place)
        certificates = self._link.certificates
        if certificates is not None and isinstance(ours, ServerUnavailableError):
            return type(ours)(f"{ours} {certificates.remarks(call.details() or '')}".rstrip())
        return ours

    def close(self) -> None:
        """Cancel what is under way and disconnect."""
        with interrupts_held_back():
            self._link.close()
            for call in [*self._told]:  # those on a gRPC channel that was replaced
                call.cancel()
            self.end_left()

    def __repr__(self) -> str:
        return f"Channel({self.address!r})"

    @contextmanager
    def our_errors(self, rpc: str, operation: Operation, *, may_interrupt: bool = False) -> Iterator[Passage]:
        """Make an RPC in this block; what it raises is raised as one of ours.

        Args:
            rpc: its name.
            operation: that it is a part of.
            may_interrupt: whether a fork of this process may end the block, without an error.
        """
        try:
            with GATE.passage(operation, may_interrupt=may_interrupt) as passage:
                yield passage
        except KeptWaitingError as error:
            raise error.at(operation.place(f"server at {self.address}", rpc)) from None
        except grpc.RpcError as error:
            if passage.is_interrupted:
                return
            error.with_traceback(None)  # whose frames know it: the exception must not hold itself
            self.note_failure(error)
            raise self.error_of_call(error, operation.place(f"server at {self.address}", rpc)) from error
        except CorruptDataError as error:
            place = operation.place(f"server at {self.address}", rpc)
            raise CorruptDataError(f"{place}: {error}") from error.__cause__ or error


def _pass(lock: threading.Lock) -> None:
    with lock:
        pass
