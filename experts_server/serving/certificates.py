"""The files of TLS: read, looked at before grpc sees them, and again whenever they are renewed."""

from __future__ import annotations

import logging
import math
import ssl
import threading
import time
from pathlib import Path
from typing import Any, NamedTuple

import grpc

from experts_server.configuration.config import SecurityConfig
from experts_server.serving.followed import Looks, refuse_pipes
from experts_server.serving.key_kinds import TAKEN, kind_not_taken
from moe_autograd.errors import ConfigError
from moe_autograd.wire.x509 import certificates_in, chain_in, ends_at, lacks_now

logger = logging.getLogger(__name__)


def server_credentials(config: SecurityConfig) -> grpc.ServerCredentials | None:
    """Return the TLS credentials of `config`, or `None` for none; they follow the files.

    Raises:
        ConfigError: a file cannot be read, or is not what it should be.
    """
    if config.tls_cert is None or config.tls_key is None:
        return None
    certificates = _Certificates(config.tls_cert, config.tls_key, config.client_ca)
    first = certificates.take(certificates.read())
    renewed: Any = certificates.renewed  # grpc's stubs do not know of None
    return grpc.dynamic_ssl_server_credentials(first, renewed, config.client_ca is not None)


def check_credentials(config: SecurityConfig) -> None:
    """Check the files of TLS, and that there may be clients that trust them; a server serves all the same.

    Raises:
        ConfigError: a file cannot be read, is not what it should be, or not now.
    """
    if config.tls_cert is None or config.tls_key is None:
        return
    certificates = _Certificates(config.tls_cert, config.tls_key, config.client_ca)
    for trust in certificates.check(certificates.read()):
        if trust.lacks is not None:
            raise ConfigError(f"config, {trust.told(trust.lacks)}")


_Contents = tuple[bytes, bytes, bytes | None]  # of key, certificate and client_ca
_REPLACED = (
    "config, key 'security.tls_cert': expected files that stay as they are while they are read, got some that are "
    "replaced. Try again."
)


class _Certificates:
    """What is in the certificates' files, which are replaced before it expires.

    grpc asks for each new connection, on threads of its own, whether there is something new. What does not belong
    together (the new certificate and still the old key) is passed over: clients see what they saw before. It is looked
    at again for the next connection, and told of once. So is a certificate that has expired meanwhile.
    """

    def __init__(self, cert: Path, key: Path, client_ca: Path | None) -> None:
        self._cert, self._key, self._client_ca = cert, key, client_ca
        self._in_use: _Contents | None = None
        self._new: grpc.ServerCertificateConfiguration | None = None
        self._trusted: list[_Trust] = []  # what is in use, unless its end was told
        self._trouble = ""
        self._lock = threading.Lock()  # for `_new`
        self._looks = Looks(self._look)

    def read(self) -> _Contents:
        """Return what is in the files now; raises `ConfigError`."""
        refuse_pipes(self._cert, self._key, self._client_ca)
        client_ca = None if self._client_ca is None else read_file(self._client_ca, "client_ca")
        return read_file(self._key, "tls_key"), read_file(self._cert, "tls_cert"), client_ca

    def check(self, now: _Contents) -> list[_Trust]:
        """Check what was read, and return what clients, and grpc, will think of it; raises `ConfigError`.

        OpenSSL reads the files themselves, which may be others by then: so what was read has to be in them still.
        """
        try:
            _check_certificates(self._cert, self._key, self._client_ca)
            trusts = [_trust_in(self._cert, self._key, now[1])]
        except OSError as error:
            raise ConfigError(_REPLACED) from error
        if self.read() != now:
            raise ConfigError(_REPLACED)
        _check_kind(self._cert, now[1])
        if self._client_ca is not None and now[2] is not None:
            trusts.append(_trust_in_authorities(self._client_ca, now[2]))
        return trusts

    def take(self, now: _Contents) -> grpc.ServerCertificateConfiguration:
        """Use what was read, and return it in grpc's form; raises `ConfigError`."""
        trusts = self.check(now)
        for trust in trusts:
            if trust.lacks is not None:
                logger.error("%s", trust.told(trust.lacks))
        self._in_use, self._trouble = now, ""
        self._trusted = [trust for trust in trusts if trust.lacks is None]
        key, cert, client_ca = now
        return grpc.ssl_server_certificate_configuration([(key, cert)], root_certificates=client_ca)

    def renewed(self) -> grpc.ServerCertificateConfiguration | None:
        """Return what clients get to see from now on, or None for no change."""
        self._looks.now()
        with self._lock:
            new, self._new = self._new, None
        return new

    def _look(self) -> None:
        try:
            if (now := self.read()) != self._in_use:
                new = self.take(now)
                with self._lock:
                    self._new = new
        except ConfigError as error:
            if self._trouble != (told := str(error)):
                logger.warning("certificates stay as they were: %s", told)
            self._trouble = told
        for trust in [*self._trusted]:
            if time.time() > trust.ends_at:
                self._trusted.remove(trust)
                logger.error("%s", trust.told("certificate has expired"))


def _check_certificates(cert: Path, key: Path, client_ca: Path | None) -> None:
    """Let OpenSSL look at the files: what grpc says of one that is none is that it cannot bind its port."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(cert, key, password="")
    except ssl.SSLError as error:
        raise ConfigError(
            f"config, key 'security.tls_cert': expected a certificate and its key, unencrypted, as PEM, got "
            f"{str(cert)!r} and {str(key)!r} ({error.reason or error})."
        ) from error
    try:
        if client_ca is not None:
            context.load_verify_locations(client_ca)
    except ssl.SSLError as error:
        raise ConfigError(
            f"config, key 'security.client_ca': expected certificates as PEM, got {str(client_ca)!r} "
            f"({error.reason or error})."
        ) from error


def _check_kind(cert: Path, contents: bytes) -> None:
    if (kind := kind_not_taken(contents)) is not None:
        raise ConfigError(
            f"config, key 'security.tls_cert': expected a certificate with a key of a kind that gRPC's clients take "
            f"({TAKEN}), got {str(cert)!r} with {kind}. Make one for another key."
        )


class _Trust(NamedTuple):
    """What clients think of the certificate, or grpc of the authorities that sign clients'."""

    key: str
    expected: str
    file: Path
    ends_at: float = math.inf  # in seconds since the epoch
    lacks: str | None = None  # what, in words of OpenSSL

    def told(self, reason: str) -> str:
        return f"key 'security.{self.key}': expected {self.expected}, got {str(self.file)!r} ({reason}). Renew it."


def _trust_in(cert: Path, key: Path, contents: bytes) -> _Trust:
    """Have a client look at a certificate that trusts whoever signed it; OpenSSL says why it is not good now."""
    trust = _Trust("tls_cert", "a certificate that clients can trust", cert)
    server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    server.load_cert_chain(cert, key, password="")
    client.load_verify_locations(cert)
    client.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    client.check_hostname = False
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    sides = [client.wrap_bio(to_client, to_server), server.wrap_bio(to_server, to_client, server_side=True)]
    for _ in range(3):  # hello, what is said of the answer, and before TLS 1.3 once more
        for side in sides:
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLError as error:
                lacks = getattr(error, "verify_message", None) or error.reason or str(error)
                return trust._replace(lacks=lacks)
    # An authority in the file that is over by now is not needed: the client has just trusted another one.
    ends = [end for end in map(ends_at, chain_in(contents)) if end > time.time()]
    return trust._replace(ends_at=min(ends, default=math.inf))


def _trust_in_authorities(client_ca: Path, contents: bytes) -> _Trust:
    """Look whether any of them is valid now: of those that were renewed the old one may stay until it ends."""
    trust = _Trust("client_ca", "an authority whose clients can be trusted", client_ca)
    authorities = certificates_in(contents)
    lacking = [lacks_now(each) for each in authorities]
    if lacking and None not in lacking:
        return trust._replace(lacks=lacking[-1])
    return trust._replace(ends_at=max(map(ends_at, authorities), default=math.inf))


def read_file(file: Path, key: str) -> bytes:
    """Return what is in a file that a key of `[security]` names; raises `ConfigError`.

    That does not show the value of `tokens_file`, which may be a token instead.
    """
    try:
        return file.read_bytes()
    except OSError as error:
        got = "none" if key == "tokens_file" else repr(str(file))
        raise ConfigError(
            f"config, key 'security.{key}': expected a readable file, got {got} ({error.strerror}). "
            "Check the path and its permissions."
        ) from error
