"""Opening the port that a server listens on, with errors that say what is in the way."""

from __future__ import annotations

import errno
import socket

import grpc

from experts_server.configuration.config import ServingConfig
from experts_server.serving.certificates import server_credentials
from moe_autograd.errors import ConfigError
from moe_autograd.wire.addresses import joined_address, split_address


def open_port(server: grpc.aio.Server, config: ServingConfig) -> str:
    """Let `server` listen where `config` says; return the real address.

    Raises:
        ConfigError: the address is taken or not this machine's, or a certificate cannot be read.
    """
    host, port = split_address(config.listen)
    _check_is_free(host, port)
    credentials = server_credentials(config.security)
    try:
        if credentials is None:
            bound = server.add_insecure_port(config.listen)
        else:
            bound = server.add_secure_port(config.listen, credentials)
    except RuntimeError as error:
        certificate = "" if credentials is None else f" with {str(config.security.tls_cert)!r}"
        wanted = "an address" if credentials is None else "an address and a certificate"
        raise ConfigError(
            f"server: expected {wanted} that grpc can listen with, got {config.listen!r}{certificate} ({error})."
        ) from error
    return joined_address(host, bound)


def _check_is_free(host: str, port: int) -> None:
    """Ask the system whether the address can be had: its answer is clearer than grpc's."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"server: {describe_refusal(joined_address(host, port), error)}") from error


def describe_refusal(address: str, error: OSError | UnicodeError) -> str:
    """Return what to say of an address that the system does not let this process listen on, or that is none."""
    reason = error.strerror if isinstance(error, OSError) else error
    match getattr(error, "errno", None):
        case errno.EADDRINUSE:
            wanted = "an address that is free"
            advice = "Stop what listens there, or choose another port; port 0 takes any free one."
        case errno.EACCES:
            wanted, advice = "a port that this user may open", "Choose one from 1024 on."
        case _:
            wanted = "an address of this machine"
            advice = (
                "Choose one that it has; 127.0.0.1 is for itself alone, and 0.0.0.0 stands for all of them."
            )
    return f"expected {wanted}, got {address} ({reason}). {advice}"
