"""HTTP/2 as no grpc client speaks it, written by hand: any path, and a window into which nothing fits."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _SETTINGS, _PING = 0, 1, 4, 6
_ACK, _END_STREAM, _END_HEADERS = 1, 1, 4
_NO_WINDOW = struct.pack(">HI", 4, 0)
_HEAD = struct.Struct(">xHBBI")  # of a frame: its length (here below 64 KiB), kind, flags and stream


class NeverReading:
    """A client into whose streams a server cannot write a byte; it answers pings. Use it in a `with` statement.

    Args:
        address: the server's.

    Attributes:
        has_begun: set when the server has begun to answer.
    """

    def __init__(self, address: str) -> None:
        host, port = address.rsplit(":", 1)
        self.has_begun = threading.Event()
        self._socket = socket.create_connection((host, int(port)))
        self._socket.sendall(_PREFACE + _frame(_SETTINGS, 0, 0, _NO_WINDOW))
        self._num_streams = 0
        self._reader = threading.Thread(target=self._answer_pings)
        self._reader.start()

    def __enter__(self) -> NeverReading:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):  # the server has closed it
            self._socket.shutdown(socket.SHUT_RDWR)
        self._reader.join()
        self._socket.close()

    def call(self, path: bytes, message: bytes = b"") -> None:
        """Begin an RPC with one message."""
        stream = self.begin(path)
        data = struct.pack(">BI", 0, len(message)) + message
        self._socket.sendall(_frame(_DATA, _END_STREAM, stream, data))

    def begin(self, path: bytes) -> int:
        """Begin an RPC, and send nothing; return its stream."""
        stream = 2 * self._num_streams + 1
        self._num_streams += 1
        fields = {b":method": b"POST", b":scheme": b"http", b":path": path, b":authority": b"x"}
        fields |= {b"te": b"trailers", b"content-type": b"application/grpc"}
        headers = b"".join(b"\0" + _text(name) + _text(value) for name, value in fields.items())
        self._socket.sendall(_frame(_HEADERS, _END_HEADERS, stream, headers))
        return stream

    def _answer_pings(self) -> None:
        with contextlib.suppress(OSError), self._socket.makefile("rb") as received:
            while len(head := received.read(9)) == 9:
                length, kind, flags, _ = _HEAD.unpack(head)
                payload = received.read(length)
                if kind == _PING and not flags & _ACK:
                    self._socket.sendall(_frame(_PING, _ACK, 0, payload))
                if kind == _SETTINGS and not flags & _ACK:
                    self._socket.sendall(_frame(_SETTINGS, _ACK, 0, b""))
                if kind == _HEADERS:
                    self.has_begun.set()


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return _HEAD.pack(len(payload), kind, flags, stream) + payload


def _text(text: bytes) -> bytes:
    assert len(text) < 127, "longer ones have a length of several bytes"
    return bytes([len(text)]) + text
