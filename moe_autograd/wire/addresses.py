"""Addresses of servers as users write them: `host:port`, where an IPv6 host stands in brackets."""

from __future__ import annotations

import contextlib
import ipaddress
import socket


def split_address(address: str) -> tuple[str, int]:
    """Return host, without brackets, and port.

    Raises:
        ValueError: if it is not an address, or the port is not within 0 to 65535.

    >>> split_address("[::1]:8080")
    ('::1', 8080)
    """
    host, _, port = address.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        is_host = ":" in host and not is_name(address)
    else:
        is_host = bool(host) and not set(host) & set(":[]/,@") and not any(map(str.isspace, host))
    if not is_host or not (port.isascii() and port.isdecimal()):
        raise ValueError("expected HOST:PORT, such as 127.0.0.1:31415 or [::1]:0")
    if len(port.lstrip("0")) > 5 or int(port) > 65535:
        raise ValueError("expected a port from 0 to 65535")
    return host_of(address), int(port)


def joined_address(host: str, port: int) -> str:
    """Return `host:port`.

    >>> joined_address("::1", 8080)
    '[::1]:8080'
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_host_and_port(address: str) -> bool:
    """Tell whether a server may be there.

    >>> is_host_and_port("[::1]:80"), is_host_and_port("::1:80"), is_host_and_port("experts.example:0")
    (True, False, False)
    """
    with contextlib.suppress(ValueError):
        return split_address(address)[1] > 0
    return False


def host_of(address: str) -> str:
    """Return the host of `host:port`, without brackets."""
    return address.rpartition(":")[0].strip("[]")


def is_name(address: str) -> bool:
    """Tell whether the host is a name and not a number.

    >>> is_name("localhost:80"), is_name("127.0.0.1:80"), is_name("[::1]:80")
    (True, False, False)
    """
    try:
        ipaddress.ip_address(host_of(address))
    except ValueError:
        return True
    return False


def in_certificate(host: str) -> str:
    """Return a host as certificates have it: names in ASCII without a dot at their end, numbers short.

    >>> in_certificate("bücher.example."), in_certificate("FD00:0::2"), in_certificate("::ffff:10.0.0.1")
    ('xn--bcher-kva.example', 'fd00::2', '::ffff:10.0.0.1')
    """
    try:
        number = ipaddress.ip_address(host).packed
    except ValueError:
        with contextlib.suppress(UnicodeError):  # which no name server knows either
            host = host.encode("idna").decode("ascii")
        return host.removesuffix(".")
    return socket.inet_ntop(socket.AF_INET if len(number) == 4 else socket.AF_INET6, number)


def is_local(address: str) -> bool:
    """Tell whether the host is this machine, as far as its address says.

    >>> is_local("localhost:80"), is_local("127.0.0.1:80"), is_local("[::1]:80"), is_local("10.0.0.1:80")
    (True, True, True, False)
    """
    host = host_of(address)
    return host == "localhost" if is_name(address) else ipaddress.ip_address(host).is_loopback
