"""A TCP proxy that does to a connection what networks do: delay, cut, swallow, damage, slow down.

It stands between a client and a real server, in threads of this process. Faults are attributes that can be changed
at any time and apply to bytes that pass from then on.
"""

from __future__ import annotations

import contextlib
import random
import socket
import threading
import time
from itertools import chain
from typing import Literal

_CHUNK = 16384
_BUFFER = (
    65536  # as much as a slow link holds; loopback would swallow megabytes and look fast until it is full
)


class Proxy:
    """Forwards connections to `target`; use it in a `with` statement.

    Args:
        target: `host:port` of the server.
        seed: of the random faults.
        is_encrypted: whether what passes is TLS, of which every byte may be damaged.

    Attributes:
        delay_s: each chunk is held for so long.
        bytes_per_s: of each direction of each connection; None: as fast as it goes.
        flip_chance: for each chunk, that one bit of what it carries (see `_Frames`) is flipped.
        cut_chance: for each chunk, that its connection is cut before it, or in the middle of it.
        repeat_chance: for each chunk, that a message in it (a whole DATA frame; under TLS all of it) comes twice.
        is_black_hole: everything is read and nothing forwarded.
        is_gone: connections that come are closed at once.
        num_flipped, num_cut, num_repeated: how often that has happened.
        num_accepted: connections.
    """

    def __init__(self, target: str, seed: int = 0, *, is_encrypted: bool = False) -> None:
        self.target = target
        self.is_encrypted = is_encrypted
        self.delay_s = 0.0
        self.bytes_per_s: float | None = None
        self.flip_chance = 0.0
        self.cut_chance = 0.0
        self.repeat_chance = 0.0
        self.is_black_hole = False
        self.is_gone = False
        self.num_flipped = 0
        self.num_cut = 0
        self.num_repeated = 0
        self.num_accepted = 0
        self._direction, self._num_until_cut = "", 0  # see `cut_after`
        self._random = random.Random(seed)
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._threads: list[threading.Thread] = []
        self._listener = socket.socket()
        # Its connections inherit it.
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)
        self._listener.bind(("127.0.0.1", 0))
        self._listener.listen()
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"

    def cut(self) -> None:
        """Cut all connections now."""
        with self._lock:
            sockets = tuple(self._sockets)
        for end in sockets:
            _close(end)

    def cut_after(self, direction: Literal["requests", "answers"], num_bytes: int) -> None:
        """Cut one connection, once so many more bytes have passed in one direction."""
        with self._lock:
            self._direction, self._num_until_cut = direction, num_bytes

    def __enter__(self) -> Proxy:
        self._start(self._accept)
        return self

    def __exit__(self, *_: object) -> None:
        _close(self._listener)
        self.cut()
        for thread in self._threads:
            thread.join(10)

    def _start(self, target, *args: object) -> None:
        thread = threading.Thread(target=target, args=args, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        host, _, port = self.target.rpartition(":")
        with contextlib.suppress(OSError):  # the listener is closed
            while True:
                client, _ = self._listener.accept()
                self.num_accepted += 1
                if self.is_gone:
                    _close(client)
                    continue
                try:
                    server = socket.socket()
                    server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, _BUFFER)
                    server.connect((host, int(port)))
                except OSError:
                    _close(server)
                    _close(client)
                    continue
                with self._lock:
                    self._sockets |= {client, server}
                self._start(self._pump, client, server, "requests")
                self._start(self._pump, server, client, "answers")

    def _pump(self, source: socket.socket, sink: socket.socket, direction: str) -> None:
        frames = None if self.is_encrypted else _Frames()
        with contextlib.suppress(OSError):
            while chunk := source.recv(_CHUNK):
                if self.is_black_hole:
                    continue
                if self._is_cut_within(chunk, direction):
                    sink.sendall(chunk[: self._num_until_cut])
                    break
                carried = [range(len(chunk))] if frames is None else frames.carried(chunk)
                whole = carried if frames is None else frames.messages
                sink.sendall(self._through(bytearray(chunk), carried, whole))
        _close(source)
        _close(sink)
        with self._lock:
            self._sockets -= {source, sink}

    def _is_cut_within(self, chunk: bytes, direction: str) -> bool:
        with self._lock:
            if direction != self._direction:
                return False
            if len(chunk) < self._num_until_cut:
                self._num_until_cut -= len(chunk)
                return False
            self._direction = ""
            self.num_cut += 1
            return True

    def _through(self, chunk: bytearray, carried: list[range], whole: list[range]) -> bytearray:
        """Apply the faults, damage only to the bytes at `carried`; raises `ConnectionAbortedError` to cut.

        One of `whole` may come twice: each is the place of a message that is complete within this chunk.
        """
        if self.delay_s:
            time.sleep(self.delay_s)
        if self.bytes_per_s:
            time.sleep(len(chunk) / self.bytes_per_s)
        with self._lock:
            flips = self._random.random() < self.flip_chance and len(carried) > 0
            cuts = self._random.random() < self.cut_chance
            repeats = self._random.random() < self.repeat_chance and len(whole) > 0
            self.num_flipped += flips
            self.num_cut += cuts
            self.num_repeated += repeats
            if flips:
                chunk[self._random.choice([*chain(*carried)])] ^= 1 << self._random.randrange(8)
            if repeats:
                again = self._random.choice(whole)
                chunk[again.stop : again.stop] = chunk[again.start : again.stop]
        if cuts:
            raise ConnectionAbortedError
        return chunk


class _Frames:
    """Finds in one direction of an HTTP/2 connection what its DATA frames carry: our messages, and grpc's 5 bytes each.

    Damage to all else is not for a test of ours: grpc 1.85 aborts its process when a flipped bit turns a PING into a
    GOAWAY (types 6 and 7), whose error code is then a random number ("UNREACHABLE CODE" in http2_status.h). Under TLS
    no such frame is ever seen.
    """

    _PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    _HEAD = 9  # bytes: length (3), type, flags, stream (4)
    _DATA = 0x0

    def __init__(self) -> None:
        self._head = b""
        self._num_left = 0  # bytes of the current frame's payload
        self._is_data = False
        self.messages: list[range] = []  # the DATA frames that began and ended within the last chunk

    def carried(self, chunk: bytes) -> list[range]:
        """The positions in `chunk`, the next bytes of the connection, of bytes that may be damaged."""
        positions: list[range] = []
        self.messages = []
        at = 0
        began: int | None = None  # where the current frame has begun, if that was in this chunk
        while at < len(chunk):
            if self._num_left:
                end = min(len(chunk), at + self._num_left)
                positions += [range(at, end)] if self._is_data else []
                self._num_left -= end - at
                if self._is_data and began is not None and self._num_left == 0:
                    self.messages.append(range(began, end))
            else:
                end = min(len(chunk), at + self._HEAD - len(self._head))
                began = None if self._head else at
                self._read_head(chunk[at:end])
            at = end
        return positions

    def _read_head(self, part: bytes) -> None:
        self._head += part
        if len(self._head) < self._HEAD:
            return
        if self._PREFACE.startswith(self._head):
            self._num_left, self._is_data = len(self._PREFACE) - self._HEAD, False
        else:
            self._num_left = int.from_bytes(self._head[:3], "big")
            self._is_data = self._head[3] == self._DATA
        self._head = b""


def _close(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
    end.close()
