"""The gRPC channel to one server, replaced where it has to be another: under a new name, or on a slow link.

A server that does not answer a ping for 0.9 s counts as frozen. But on a slow link the ping waits behind
megabytes in the system's buffers: from here both look alike. So each time this happens the next connection waits some
four times as long, up to 16 s, and after `_CALM_S` without it we are quick again.

Mutable state: the stubs and what goes with them, replaced under `_lock` and out of the reach of Ctrl-C; an RPC keeps
those it began with.

Threads: any number may call at once.
"""

from __future__ import annotations

import math
import threading
import time
from typing import Any, cast

import grpc
from grpc.experimental import ChannelOptions

from moe_autograd._interrupts import uninterrupted
from moe_autograd.remote.security import Certificates
from moe_autograd.wire.addresses import host_of, in_certificate
from moe_autograd.wire.methods import BOTH_STREAM, REPLY_STREAM, REQUEST_STREAM, UNARY, path
from moe_autograd.wire.options import CHANNEL_OPTIONS

_PING_TIMEOUTS_MS = (900, 4_000, 16_000)
_CALM_S = 60.0


class Stubs:
    """What begins RPCs on one gRPC channel."""

    def __init__(self, channel: grpc.Channel) -> None:
        self.channel = channel
        begin = cast(Any, channel)  # grpc's stubs want serializers; bytes go in and bytes come out
        self.unary = {rpc: begin.unary_unary(path(rpc)) for rpc in UNARY}
        # To the server a stream of one message is the same, whichever way the client began it.
        self.both_stream = {rpc: begin.stream_stream(path(rpc)) for rpc in REQUEST_STREAM + BOTH_STREAM}
        # this way costs no thread that feeds the stream
        self.reply_stream = {rpc: begin.unary_stream(path(rpc)) for rpc in UNARY + REPLY_STREAM + BOTH_STREAM}


class Link:
    """The connection to one address; it connects again by itself.

    Args:
        address: `host:port`.
        authority: the name that the server is called by, `host:port`.
        certificates: None for a plain connection.
        server_name: that the server's certificate has; None: the host of the name that it is called by.

    Attributes:
        authority: the name that the server is called by.
        is_open: whether it has not been closed.
    """

    def __init__(
        self, address: str, authority: str, certificates: Certificates | None, server_name: str | None
    ) -> None:
        self.authority = authority
        self.certificates = certificates
        self.is_open = True
        self._address = address
        self._credentials = None if certificates is None else certificates.now()
        self._server_name = server_name
        self._lock = threading.RLock()  # a handler of a signal that makes calls takes it again
        self._ping_timeout_ms = _PING_TIMEOUTS_MS[0]
        self._slow_at = -math.inf
        self._stubs = self._connect()

    def _connect(self) -> Stubs:
        own = (
            ("grpc.http2.ping_timeout_ms", self._ping_timeout_ms),
            (ChannelOptions.SingleThreadedUnaryStream, 1),
            # Else channels to one address share their connection, also a forked child's with its parent's.
            ("grpc.use_local_subchannel_pool", 1),
        )
        options = (*(option for option in CHANNEL_OPTIONS if option[0] != own[0][0]), *own)
        if self._credentials is None:
            authority = ("grpc.default_authority", self.authority)
            return Stubs(grpc.insecure_channel(self._address, (*options, authority)))
        server_name = in_certificate(self._server_name or host_of(self.authority))
        if server_name != host_of(self._address):
            options = (*options, ("grpc.ssl_target_name_override", server_name))
        return Stubs(grpc.secure_channel(self._address, self._credentials, options))

    def stubs(self) -> Stubs:
        """Return what begins RPCs now."""
        if self._slow_at + _CALM_S < time.monotonic() and self._ping_timeout_ms != _PING_TIMEOUTS_MS[0]:
            with uninterrupted(), self._lock:
                self._reconnect(_PING_TIMEOUTS_MS[0])
        return self._stubs

    def call_by(self, authority: str) -> None:
        """Call the server by another name from now on; RPCs under way go on under the one before."""
        with uninterrupted(), self._lock:
            if self.is_open and authority != self.authority:
                self.authority = authority
                self._stubs = self._connect()

    def note_failure(self, details: str) -> None:
        """Learn from what gRPC says of an RPC that failed: how long this link takes, what certificates there are."""
        with uninterrupted(), self._lock:
            credentials = None if self.certificates is None else self.certificates.now()
            if self.is_open and credentials is not self._credentials:
                self._credentials = credentials
                self._stubs = self._connect()
            now = time.monotonic()
            if "ping timeout" not in details or now - self._slow_at < self._ping_timeout_ms / 1000:
                return  # or other calls on the same connection have said so already
            self._slow_at = now
            level = _PING_TIMEOUTS_MS.index(self._ping_timeout_ms)
            self._reconnect(_PING_TIMEOUTS_MS[min(level + 1, len(_PING_TIMEOUTS_MS) - 1)])

    def _reconnect(self, ping_timeout_ms: int) -> None:
        """Take a new gRPC channel; RPCs under way keep the old one until they end."""
        if ping_timeout_ms != self._ping_timeout_ms and self.is_open:
            self._ping_timeout_ms = ping_timeout_ms
            self._stubs = self._connect()

    def close(self) -> None:
        """Cancel what is under way and disconnect."""
        with self._lock:
            self.is_open = False
            self._stubs.channel.close()
