"""How a client proves who it is and knows whom it talks to."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import grpc

from moe_autograd.wire.certificates import channel_credentials
from moe_autograd.wire.options import ChannelOption


@dataclass(frozen=True)
class TLS:
    """Certificates of an encrypted connection; the files are PEM, and are read again where a connection fails.

    Args:
        ca_file: who may have signed the server's certificate; None: the authorities that gRPC ships.
        cert_file: this client's own certificate, for servers that ask (mutual TLS).
        key_file: its private key.
        server_name: the name in the server's certificate, where that is not the host of its address.

    Raises:
        ValueError: a certificate without its key, or a key without its certificate; a name that is empty.
    """

    ca_file: str | Path | None = None
    cert_file: str | Path | None = None
    key_file: str | Path | None = None
    server_name: str | None = None

    def __post_init__(self) -> None:
        if (self.cert_file is None) != (self.key_file is None):
            raise ValueError(
                f"TLS: expected cert_file and key_file together, got cert_file={self.cert_file!r}, "
                f"key_file={self.key_file!r}. Give both, or neither."
            )
        if self.server_name == "":
            raise ValueError(
                "TLS: expected a server_name, got an empty one. Leave it out to take the host of the address."
            )

    def credentials(self) -> grpc.ChannelCredentials:
        """Read the files; raises `OSError` where one cannot be read, and `ValueError` where it is no PEM."""
        return channel_credentials(self.ca_file, self.cert_file, self.key_file)

    def contents(self) -> tuple[bytes | None, ...]:
        """Return what is in the files now; raises `OSError` where one cannot be read."""
        files = (self.ca_file, self.cert_file, self.key_file)
        return tuple(None if file is None else Path(file).read_bytes() for file in files)

    def options(self) -> tuple[ChannelOption, ...]:
        """Return the channel options that belong to it."""
        return () if self.server_name is None else (("grpc.ssl_target_name_override", self.server_name),)


_MAX_TOKEN_LENGTH = 4096  # grpc refuses headers of more than 8 KiB


def check_token(token: str) -> None:
    """Refuse a token that no header can carry; the token is not shown.

    Raises:
        ValueError: it is empty or too long, or has other characters than printable ones of ASCII.
    """
    expected = f"token: expected 1 to {_MAX_TOKEN_LENGTH} printable characters of ASCII without blanks"
    if not 0 < len(token) <= _MAX_TOKEN_LENGTH:
        raise ValueError(f"{expected}, got {len(token)} characters. Take a line of the server's tokens_file.")
    for position, character in enumerate(token):
        if not "!" <= character <= "~":
            raise ValueError(
                f"{expected}, got {character!r} at position {position} of {len(token)}. "
                "If it was read from a file, strip its line end."
            )
