"""Certificates of a client: read, and looked at before grpc sees them.

What grpc says of a file that is no certificate is that a handshake failed, with lines of its own on stderr.
"""

from __future__ import annotations

import ssl
from collections.abc import Iterable
from pathlib import Path

import grpc

from moe_autograd.wire.x509 import certificates_in, chain_in, lacks_now

File = str | Path


def channel_credentials(
    ca_file: File | None, cert_file: File | None, key_file: File | None
) -> grpc.ChannelCredentials:
    """Return the credentials that PEM files hold.

    Args:
        ca_file: who may have signed the server's certificate; `None`: the authorities that gRPC ships.
        cert_file: the client's own certificate, for servers that ask.
        key_file: its key; both or neither.

    Raises:
        OSError: a file cannot be read.
        ValueError: one is not what it should be.
    """
    files = (ca_file, key_file, cert_file)
    read = _contents(files)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    try:
        if ca_file is not None:
            context.load_verify_locations(ca_file)
    except OSError as error:  # of OpenSSL, or a file has gone since
        raise ValueError(
            f"TLS: expected certificates as PEM, got {str(ca_file)!r} ({getattr(error, 'reason', None) or error}). "
            "Take the file of the authority that signed the server's."
        ) from error
    try:
        if cert_file is not None:
            context.load_cert_chain(cert_file, key_file, password="")
    except OSError as error:  # of OpenSSL, or a file has gone since
        raise ValueError(
            f"TLS: expected a certificate and its key, unencrypted, as PEM, got {str(cert_file)!r} and "
            f"{str(key_file)!r} ({getattr(error, 'reason', None) or error}). Check that they belong together."
        ) from error
    if _contents(files) != read:  # OpenSSL has seen others
        raise ValueError(
            "TLS: expected files that stay as they are while they are read, got some that are replaced. Try again."
        )
    return grpc.ssl_channel_credentials(*read)


def remarks(
    details: str, ca_file: File | None, ca: bytes | None, cert_file: File | None, cert: bytes | None
) -> str:
    """Return what certificates may have to do with a connection that failed; clocks may differ from one to the other.

    Args:
        details: what gRPC says of it.
        ca_file: as in `channel_credentials`.
        ca: what is in it.
        cert_file: as in `channel_credentials`.
        cert: what is in it.
    """
    lacking = [lacks_now(each) for each in chain_in(cert or b"")]
    said = []
    if any(lacking[:1]):
        said.append(f"By the clock here this client's {lacking[0]} ({str(cert_file)!r}). Renew it.")
    elif others := [lacks for lacks in lacking if lacks is not None]:
        told = f"By the clock here an authority's {others[0]} in {str(cert_file)!r}, on which this client's hangs"
        said.append(f"{told}: a server that has no other one refuses it.")
    if "CERTIFICATE_VERIFY_FAILED" in details:
        lacking = [lacks_now(each) for each in certificates_in(ca or b"")]
        why = f", of which by the clock here each {lacking[0]}" if lacking and None not in lacking else ""
        said.append(
            "There is no ca_file: only the authorities that gRPC ships are trusted."
            if ca_file is None
            else f"The ca_file is {str(ca_file)!r}{why}."
        )
    return " ".join(said)


def _contents(files: Iterable[File | None]) -> list[bytes | None]:
    return [None if file is None else read_certificate(file) for file in files]


def read_certificate(file: File) -> bytes:
    """Return what is in a file.

    Raises:
        OSError: it cannot be read; of the class that the system's error has.
        ValueError: no file has such a name.
    """
    expected = f"TLS: expected a readable file, got {str(file)!r}"
    advice = "Check the path and its permissions."
    try:
        return Path(file).read_bytes()
    except OSError as error:
        raise type(error)(f"{expected} ({error.strerror}). {advice}") from error
    except ValueError as error:  # a null byte
        raise ValueError(f"{expected} ({error}). {advice}") from error
