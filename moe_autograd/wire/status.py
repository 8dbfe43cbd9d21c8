"""Errors <-> status, at the one edge where they cross the network.

A call in a stream carries a `Status`; a whole RPC ends with a gRPC code, its details, and, where the server
knows when to come back, `retry-after-ms` in the trailing metadata. `_CODES` has both for each class of error.

Anything else that a server raises is its own fault: it becomes INTERNAL, with type and text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

import grpc

from moe_autograd.errors import (
    CorruptDataError,
    DeadlineExceededError,
    ExpertFailedError,
    ExpertNotFoundError,
    GradientsLostError,
    InputsNeededError,
    InvalidCallError,
    PermissionDeniedError,
    RemoteError,
    ServerBusyError,
    ServerUnavailableError,
    UntrustedServerError,
)
from moe_autograd.wire import experts_pb2 as pb

RETRY_AFTER_KEY = "retry-after-ms"
MAX_HINT_DIGITS = 15  # Python reads no number of thousands of them, and no float holds one of hundreds
MAX_TEXT_BYTES = 2048  # thrice as much in a trailer, of which grpc refuses more than 8 KiB

_CODES: dict[type[RemoteError], tuple[pb.Code, grpc.StatusCode]] = {
    ExpertNotFoundError: (pb.EXPERT_NOT_FOUND, grpc.StatusCode.NOT_FOUND),
    InvalidCallError: (pb.INVALID_CALL, grpc.StatusCode.INVALID_ARGUMENT),
    PermissionDeniedError: (pb.PERMISSION_DENIED, grpc.StatusCode.PERMISSION_DENIED),
    ServerUnavailableError: (pb.UNAVAILABLE, grpc.StatusCode.UNAVAILABLE),
    ServerBusyError: (pb.BUSY, grpc.StatusCode.RESOURCE_EXHAUSTED),
    DeadlineExceededError: (pb.DEADLINE_EXCEEDED, grpc.StatusCode.DEADLINE_EXCEEDED),
    CorruptDataError: (pb.CORRUPT_DATA, grpc.StatusCode.DATA_LOSS),
    ExpertFailedError: (pb.EXPERT_FAILED, grpc.StatusCode.ABORTED),
    GradientsLostError: (pb.GRADIENTS_LOST, grpc.StatusCode.OUT_OF_RANGE),
    InputsNeededError: (pb.INPUTS_NEEDED, grpc.StatusCode.FAILED_PRECONDITION),
    RemoteError: (pb.INTERNAL, grpc.StatusCode.INTERNAL),
}
_ERROR_OF_CODE: dict[int, type[RemoteError]] = {code: error for error, (code, _) in _CODES.items()}
_ERROR_OF_GRPC: dict[grpc.StatusCode, type[RemoteError]] = {
    code: error for error, (_, code) in _CODES.items()
}
_ERROR_OF_GRPC[grpc.StatusCode.UNAUTHENTICATED] = PermissionDeniedError
# Our servers never end an RPC so: grpc itself does, when a connection breaks or a server stops in the middle.
_ERROR_OF_GRPC[grpc.StatusCode.CANCELLED] = ServerUnavailableError
_ERROR_OF_GRPC[grpc.StatusCode.UNKNOWN] = ServerUnavailableError
_ERROR_OF_GRPC[grpc.StatusCode.UNIMPLEMENTED] = ServerUnavailableError  # it is at this address no longer
_NOT_CONNECTED = re.compile(
    r"(?:failed to connect to all addresses; last error: \w+: (?:\S+: )?(?:Failed to connect to remote host: )?"
    r"|errors resolving .*: )(.*?)\.?\]?",
    re.DOTALL,
)
_BROKEN_OFF = re.compile(r"Stream removed \((.*)\)|(ping timeout)", re.DOTALL)
_CUT_OFF = ("CANCELLED", "Cancelling all calls")  # by grpc in a server that stops, or by something on the way
CLOSED_HERE = ("Locally cancelled by application!", "Channel closed!")
_TLS_FAILURES = (
    (
        r"CERTIFICATE_VERIFY_FAILED: (.*?)(?:: OK)?$",
        "expected a certificate that can be trusted, got one with {0!r}. Check its dates, and that ca_file is of the "
        "authority that signed it.",
    ),
    (
        r"Hostname Verification Check failed",
        "expected a certificate of the host in the address, got one of another name. Call the server by the name in "
        "its certificate, or set TLS(server_name=...).",
    ),
    (
        r"WRONG_VERSION_NUMBER",
        "expected TLS, got something else. If the server there has no TLS, connect without.",
    ),
)


# ---- errors -> status, on the server


def status_of(error: BaseException) -> pb.Status:
    """Return the status that tells a client of `error`."""
    code, _ = _codes_of(error)
    return pb.Status(code=code, message=_text(error), retry_after_s=_retry_after_s(error))


def rpc_status_of(error: BaseException) -> tuple[grpc.StatusCode, str, tuple[tuple[str, str], ...]]:
    """Return code, details and trailing metadata for `context.abort(*rpc_status_of(error))`."""
    _, code = _codes_of(error)
    retry_after_s = _retry_after_s(error)
    trailing = () if retry_after_s is None else ((RETRY_AFTER_KEY, str(round(retry_after_s * 1000))),)
    return code, _text(error), trailing


def _codes_of(error: BaseException) -> tuple[pb.Code, grpc.StatusCode]:
    return next((codes for known, codes in _CODES.items() if isinstance(error, known)), _CODES[RemoteError])


def _text(error: BaseException) -> str:
    """Return what fits into a message whatever a user's module raised; of a long text, its beginning and its end."""
    text = str(error) if isinstance(error, RemoteError) else told(error)
    raw = text.encode("utf-8", "backslashreplace")
    if len(raw) > MAX_TEXT_BYTES:
        raw = raw[: MAX_TEXT_BYTES * 3 // 4] + b" [...] " + raw[-MAX_TEXT_BYTES // 4 :]
    return raw.decode("utf-8", "ignore")


def told(error: BaseException) -> str:
    """Return type and text of an exception, whatever a user's module raised."""
    kind = type(error).__name__
    try:
        return f"{kind}: {error}"
    except Exception as mute:
        return f"{kind}, whose text cannot be had ({type(mute).__name__})"


def _retry_after_s(error: BaseException) -> float | None:
    return error.retry_after_s if isinstance(error, ServerBusyError) else None


# ---- status -> errors, on the client


def error_of(status: pb.Status, place: str = "") -> RemoteError:
    """Return the error that a call's status tells of (which is not OK).

    Args:
        status: from a `CallResult` or an `ExpertUpdate`.
        place: where it happened, such as "expert 'ffn.3' at host:port, backward, after 2.0 s"; comes first.
    """
    retry_after_s = status.retry_after_s if status.HasField("retry_after_s") else None
    return _error(_ERROR_OF_CODE.get(status.code, RemoteError), status.message, retry_after_s, place)


def error_of_rpc(
    code: grpc.StatusCode,
    details: str | None,
    trailing: Iterable[tuple[str, str | bytes]] | None,
    place: str = "",
) -> RemoteError:
    """Return the error that the end of a whole RPC tells of (`call.code()`, `.details()`, `.trailing_metadata()`)."""
    hint = dict(trailing or ()).get(RETRY_AFTER_KEY)
    details = details or code.name
    if (untrusted := _certificate_trouble(details)) is not None:
        return _error(UntrustedServerError, untrusted, None, place)
    if code is grpc.StatusCode.UNIMPLEMENTED:
        details = f"expected a server of experts, got another one ({details!r}). Is this its address?"
    return _error(_ERROR_OF_GRPC.get(code, RemoteError), _in_our_words(details), _seconds(hint), place)


def _certificate_trouble(details: str) -> str | None:
    failed = _NOT_CONNECTED.fullmatch(details)
    for pattern, text in _TLS_FAILURES:
        if failed is not None and (found := re.search(pattern, failed[1])) is not None:
            return text.format(*found.groups())
    return None


def _in_our_words(details: str) -> str:
    """Return what to say of a connection that grpc could not make, or lost; other details are a server's, and ours."""
    if details in CLOSED_HERE:
        return "expected to be waited for, got cancelled here. Was the connection closed meanwhile?"
    if details in _CUT_OFF:
        return (
            f"expected an answer, got a call that was cut off ({details!r}), as by a server that stops. Whether it "
            "was done is not known. Is the server still there?"
        )
    if (broken := _BROKEN_OFF.fullmatch(details)) is not None:
        reason = broken[1] or broken[2]
        return f"expected an answer, got a connection that broke off ({reason!r}). Is the server still there?"
    failed = _NOT_CONNECTED.fullmatch(details)
    if failed is None:
        return details
    # Of a socket that could not be made grpc adds the bytes of its address.
    got = failed[1].partition("\0")[0].rstrip()
    if "Too many open files" in got:
        return f"expected a connection, got {got!r}. Raise the limit of open files of this process."
    return (
        f"expected a connection, got {got!r}. Is the server started, is this its address, do both use TLS or "
        "neither, does it want a certificate of yours?"
    )


def _error(error: type[RemoteError], text: str, retry_after_s: float | None, place: str) -> RemoteError:
    for word in ("server", "forward", "backward"):
        if word in place:  # which says it already
            text = text.removeprefix(f"{word}: ")
    message = f"{place}: {text}" if place else text
    return ServerBusyError(message, retry_after_s) if error is ServerBusyError else error(message)


def _seconds(milliseconds: str | bytes | None) -> float | None:
    text = milliseconds.decode("ascii", "replace") if isinstance(milliseconds, bytes) else milliseconds
    return (
        int(text) / 1000 if text is not None and text.isdecimal() and len(text) <= MAX_HINT_DIGITS else None
    )
