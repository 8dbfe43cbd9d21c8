"""What a call gets from a connection that has been closed, or is closed at this moment."""

from __future__ import annotations

from moe_autograd.errors import ServerUnavailableError


def closed(address: str, cause: BaseException | None = None) -> ServerUnavailableError:
    """Return the error of an operation at this server."""
    error = ServerUnavailableError(
        f"server at {address}: expected an open connection, got a closed one. "
        "Call experts within the block of `connect`."
    )
    error.__cause__ = cause
    return error
