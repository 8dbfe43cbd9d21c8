"""How a client proves who it is and knows whom it talks to."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import grpc

from moe_autograd.wire.certificates import channel_credentials, read_certificate, remarks
from moe_autograd.wire.tokens import read_token


@dataclass(frozen=True)
class TLS:
    """Certificates of an encrypted connection; the files are PEM, and are read again where a connection fails.

    Args:
        ca_file: who may have signed the server's certificate; None: the authorities that gRPC ships.
        cert_file: this client's own certificate, for servers that ask (mutual TLS).
        key_file: its private key.
        server_name: the name in the server's certificate, where that is not the host of its address.

    Raises:
        TypeError: an argument is of another type.
        ValueError: a certificate without its key, or a key without its certificate; a name that no host has.
    """

    ca_file: str | Path | None = None
    cert_file: str | Path | None = None
    key_file: str | Path | None = None
    server_name: str | None = None

    def __post_init__(self) -> None:
        for name, file in (
            ("ca_file", self.ca_file),
            ("cert_file", self.cert_file),
            ("key_file", self.key_file),
        ):
            if not isinstance(file, str | Path | None):
                raise TypeError(
                    f"TLS: expected {name} to be a text, a Path or None, got a {type(file).__name__}. "
                    "Name a file that holds PEM."
                )
        if not isinstance(self.server_name, str | None):
            raise TypeError(
                f"TLS: expected server_name to be a text or None, got {self.server_name!r}. "
                "Leave it out to take the host of the address."
            )
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError(
                f"TLS: expected cert_file and key_file together, got cert_file={self.cert_file!r}, "
                f"key_file={self.key_file!r}. Give both, or neither."
            )
        if self.server_name == "":
            raise ValueError(
                "TLS: expected a server_name, got an empty one. Leave it out to take the host of the address."
            )
        if self.server_name is not None and (
            "\0" in self.server_name or self.server_name.split() != [self.server_name]
        ):
            raise ValueError(
                f"TLS: expected a server_name without blanks, got {self.server_name!r}. "
                "Take one of those in the server's certificate."
            )

    def credentials(self) -> grpc.ChannelCredentials:
        """Read the files; raises `OSError` where one cannot be read, and `ValueError` where it is no PEM."""
        return channel_credentials(self.ca_file, self.cert_file, self.key_file)

    def contents(self) -> tuple[bytes | None, ...]:
        """Return what is in the files now; raises `OSError` where one cannot be read."""
        files = (self.ca_file, self.cert_file, self.key_file)
        return tuple(None if file is None else read_certificate(file) for file in files)


class Certificates:
    """What the files of a `TLS` hold, for all channels of a connection.

    They are replaced before they expire, one after the other: for a moment some are absent, cut short, or do not belong
    to the others. Then what was read before is used on.

    Args:
        tls: names the files.

    Attributes:
        trouble: why the files could not be used when they were last looked at; empty if they could.

    Raises:
        OSError: a file cannot be read now.
        ValueError: or is not what it should be.

    Threads: any; one lock.
    """

    def __init__(self, tls: TLS) -> None:
        # the same ones, whatever folder the process is in by then
        ca_file, cert_file, key_file = (
            None if file is None else Path(file).absolute()
            for file in (tls.ca_file, tls.cert_file, tls.key_file)
        )
        self._tls = dataclasses.replace(tls, ca_file=ca_file, cert_file=cert_file, key_file=key_file)
        self._lock = threading.RLock()  # a handler of a signal that makes calls takes it again
        self._contents = tls.contents()
        self._credentials = tls.credentials()
        self.trouble = ""

    def now(self) -> grpc.ChannelCredentials:
        """Look at the files; return the same object as before unless they hold something else that can be used."""
        with self._lock:
            self.trouble = ""
            try:
                if (contents := self._tls.contents()) != self._contents:
                    self._credentials, self._contents = self._tls.credentials(), contents
            except (OSError, ValueError) as error:
                self.trouble = f"The certificates in use are those of before: {error}"
            return self._credentials

    def remarks(self, details: str) -> str:
        """Return what these files may have to do with a connection that failed, of which gRPC says this."""
        ca, cert, _ = self._contents
        said = remarks(details, self._tls.ca_file, ca, self._tls.cert_file, cert)
        return f"{said} {self.trouble}".strip()

    def __repr__(self) -> str:
        return f"Certificates({self._tls!r})"


class Token:
    """What a client shows to servers, on all channels of a connection. One in a file is read again when it is refused.

    Args:
        given: the token, or the file that holds it; None: there is none.

    Attributes:
        metadata: that goes with every RPC.

    Raises:
        ValueError: the file holds none.

    Threads: any; what changes does so by one assignment.
    """

    def __init__(self, given: str | Path | None) -> None:
        # the same one, whatever folder the process is in by then
        self._file = given.absolute() if isinstance(given, Path) else None
        self._renewed_at = -math.inf
        self._show(read_token(given) if isinstance(given, Path) else given)

    def note_refused(self) -> None:
        """Look whether there is another one in the file by now; while that is being replaced, there is none."""
        if self._file is not None:
            with contextlib.suppress(ValueError):
                before = self.metadata
                self._show(read_token(self._file))
                if self.metadata != before:
                    self._renewed_at = time.monotonic()

    def is_renewed_since(self, moment: float) -> bool:
        """Whether what was refused at this moment, of the monotonic clock, may be accepted now."""
        return self._renewed_at >= moment

    def _show(self, token: str | None) -> None:
        self.metadata = () if token is None else (("authorization", f"Bearer {token}"),)

    def __repr__(self) -> str:
        return f"Token({'given' if self._file is None else self._file})"
