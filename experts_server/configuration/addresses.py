"""Where a server listens: `HOST:PORT`."""

from __future__ import annotations


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of `HOST:PORT`; an IPv6 host stands in brackets.

    Raises:
        ValueError: if it is not an address, or the port is not within 0 to 65535.

    >>> split_address("[::1]:8080")
    ('::1', 8080)
    """
    host, colon, port = address.rpartition(":")
    is_bracketed = host.startswith("[") and host.endswith("]")
    is_port = port.isascii() and port.isdecimal()
    if not colon or not host or not is_port or (":" in host) != is_bracketed or host.split() != [host]:
        raise ValueError("expected HOST:PORT, such as 127.0.0.1:31415 or [::1]:0")
    if len(port.lstrip("0")) > 5 or int(port) > 65535:
        raise ValueError("expected a port from 0 to 65535")
    return host.strip("[]"), int(port)


def joined_address(host: str, port: int) -> str:
    """Return `HOST:PORT`; an IPv6 host stands in brackets.

    >>> joined_address("::1", 8080)
    '[::1]:8080'
    """
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
