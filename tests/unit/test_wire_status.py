"""Every error of ours crosses the network both ways, in a call's status and as the end of an RPC."""

from __future__ import annotations

import grpc
import pytest

from moe_autograd import errors
from moe_autograd.wire import experts_pb2 as pb
from moe_autograd.wire.status import error_of, error_of_rpc, rpc_status_of, status_of

REMOTE_ERRORS = [errors.RemoteError, *errors.RemoteError.__subclasses__()]


@pytest.mark.parametrize("error", REMOTE_ERRORS)
def test_an_error_arrives_as_itself_in_a_call(error):
    received = error_of(status_of(error("the queue is full")))
    assert type(received) is error
    assert str(received) == "the queue is full"


@pytest.mark.parametrize("error", REMOTE_ERRORS)
def test_an_error_arrives_as_itself_at_the_end_of_an_rpc(error):
    code, details, trailing = rpc_status_of(error("the queue is full"))
    received = error_of_rpc(code, details, trailing)
    assert type(received) is error
    assert str(received) == "the queue is full"


def test_every_code_has_its_error():
    errors_of_codes = {type(error_of(pb.Status(code=code))) for code in pb.Code.values() if code != pb.OK}
    assert errors_of_codes == set(REMOTE_ERRORS)


def test_the_retry_hint_arrives():
    busy = errors.ServerBusyError("full", retry_after_s=0.25)
    in_call = error_of(status_of(busy))
    of_rpc = error_of_rpc(*rpc_status_of(busy))
    assert isinstance(in_call, errors.ServerBusyError)
    assert isinstance(of_rpc, errors.ServerBusyError)
    assert (in_call.retry_after_s, of_rpc.retry_after_s) == (0.25, 0.25)
    no_hint = error_of(status_of(errors.ServerBusyError("full")))
    assert isinstance(no_hint, errors.ServerBusyError)
    assert no_hint.retry_after_s is None


@pytest.mark.parametrize("hint", ["soon", "-3", "", b"\xff", "1e9", "9" * 400, "9" * 5000])
def test_a_hint_that_is_no_number_is_left_out(hint):
    error = error_of_rpc(grpc.StatusCode.RESOURCE_EXHAUSTED, "full", (("retry-after-ms", hint),))
    assert isinstance(error, errors.ServerBusyError)
    assert error.retry_after_s is None


def test_a_fault_of_the_server_itself_tells_its_type():
    assert status_of(ZeroDivisionError("by zero")) == pb.Status(
        code=pb.INTERNAL, message="ZeroDivisionError: by zero"
    )
    assert rpc_status_of(ZeroDivisionError("by zero"))[0] == grpc.StatusCode.INTERNAL


def test_the_place_comes_first():
    status = pb.Status(code=pb.INVALID_CALL, message="expected width 8, got 9.")
    place = "expert 'ffn.3' at localhost:1, forward"
    assert str(error_of(status, place)) == "expert 'ffn.3' at localhost:1, forward: expected width 8, got 9."


@pytest.mark.parametrize(
    ("place", "text", "told"),
    [
        ("server at a:1, forward", "server: expected one of 2", "server at a:1, forward: expected one of 2"),
        (
            "expert 'e' at a:1, forward",
            "forward: its module raised",
            "expert 'e' at a:1, forward: its module raised",
        ),
        (
            "expert 'e' at a:1, forward",
            "backward: expected 1",
            "expert 'e' at a:1, forward: backward: expected 1",
        ),
    ],
)
def test_what_the_place_says_is_not_said_again(place, text, told):
    assert str(error_of(status_of(errors.InvalidCallError(text)), place)) == told


def test_codes_of_grpc_itself_are_understood():
    assert isinstance(error_of_rpc(grpc.StatusCode.UNAUTHENTICATED, None, None), errors.PermissionDeniedError)
    for broken in (grpc.StatusCode.CANCELLED, grpc.StatusCode.UNKNOWN):
        assert isinstance(error_of_rpc(broken, "the server stops", None), errors.ServerUnavailableError)
    unknown = error_of_rpc(grpc.StatusCode.ALREADY_EXISTS, None, None)
    assert (type(unknown), str(unknown)) == (errors.RemoteError, "ALREADY_EXISTS")


def test_a_server_of_something_else_is_none_of_experts():
    error = error_of_rpc(grpc.StatusCode.UNIMPLEMENTED, "Method not found!", None, "server at h:1")
    assert type(error) is errors.ServerUnavailableError
    told = "expected a server of experts, got another one ('Method not found!'). Is this its address?"
    assert str(error) == f"server at h:1: {told}"


@pytest.mark.parametrize(
    ("details", "got"),
    [
        (
            "failed to connect to all addresses; last error: UNKNOWN: ipv4:10.0.0.1:3: "
            "Failed to connect to remote host: Connection refused",
            "Connection refused",
        ),
        (
            "failed to connect to all addresses; last error: UNAVAILABLE: ipv4:10.0.0.1:3: "
            "Failed parsing HTTP/2 (a: b)",
            "Failed parsing HTTP/2 (a: b)",
        ),
        (
            "errors resolving a.b:3: [field:hostname lookup error:address lookup failed for a.b:3: "
            "Domain name not found]",
            "Domain name not found",
        ),
    ],
)
def test_a_connection_that_grpc_could_not_make_is_told_with_its_reason_and_what_to_look_at(details, got):
    error = error_of_rpc(grpc.StatusCode.UNAVAILABLE, details, None, "server at a.b:3")
    assert isinstance(error, errors.ServerUnavailableError)
    assert str(error).startswith(
        f"server at a.b:3: expected a connection, got {got!r}. Is the server started"
    )


def test_a_connection_for_which_this_process_has_no_descriptor_is_told_with_what_to_raise():
    details = (
        "failed to connect to all addresses; last error: UNKNOWN: ipv4:10.0.0.1:3: "
        "socket: Too many open files\n\0\x81\x13\0\0\0\0\0\xff\xff\x7f\0\0\x01"
    )
    error = error_of_rpc(grpc.StatusCode.UNAVAILABLE, details, None, "server at a.b:3")
    told = "expected a connection, got 'socket: Too many open files'. Raise the limit of open files of this process."
    assert isinstance(error, errors.ServerUnavailableError)
    assert str(error) == f"server at a.b:3: {told}"


@pytest.mark.parametrize(
    ("details", "reason"),
    [
        ("Stream removed (recvmsg:Connection reset by peer (104))", "recvmsg:Connection reset by peer (104)"),
        ("Stream removed (Socket closed)", "Socket closed"),
        ("Stream removed (ping timeout)", "ping timeout"),
        ("ping timeout", "ping timeout"),
    ],
)
def test_a_connection_that_broke_off_is_told_with_its_reason(details, reason):
    error = error_of_rpc(grpc.StatusCode.UNAVAILABLE, details, None, "server at a.b:3")
    assert isinstance(error, errors.ServerUnavailableError)
    told = f"expected an answer, got a connection that broke off ({reason!r}). Is the server still there?"
    assert str(error) == f"server at a.b:3: {told}"


@pytest.mark.parametrize("details", ["Locally cancelled by application!", "Channel closed!"])
def test_a_call_that_was_cancelled_here_says_so(details):
    error = error_of_rpc(grpc.StatusCode.CANCELLED, details, None, "server at a.b:3")
    assert isinstance(error, errors.ServerUnavailableError)
    assert "got cancelled here. Was the connection closed" in str(error)


@pytest.mark.parametrize(
    ("code", "details", "reason"),
    [
        (grpc.StatusCode.CANCELLED, "CANCELLED", "CANCELLED"),
        (grpc.StatusCode.CANCELLED, "", "CANCELLED"),
        (grpc.StatusCode.UNAVAILABLE, "Cancelling all calls", "Cancelling all calls"),
    ],
    ids=["its name", "no words", "all calls"],
)
def test_a_call_that_a_server_cut_off_as_it_stopped_says_so(code, details, reason):
    """A save beside a stop ended with the bare word."""
    error = error_of_rpc(code, details, None, "server at a.b:3")
    assert isinstance(error, errors.ServerUnavailableError)
    told = f"expected an answer, got a call that was cut off ({reason!r}), as by a server that stops. "
    assert (
        str(error) == f"server at a.b:3: {told}Whether it was done is not known. Is the server still there?"
    )


def test_a_code_of_a_newer_server_is_a_remote_error():
    assert type(error_of(pb.Status(code=99, message="new"))) is errors.RemoteError


@pytest.mark.parametrize("character", ["x", "\u8a9e", "\ud800"])
def test_a_long_text_arrives_with_its_beginning_and_its_end(character):
    text = f"expected it all, got {character * 100_000}. Say less."
    _, details, _ = rpc_status_of(errors.InvalidCallError(text))
    for told in (status_of(errors.InvalidCallError(text)).message, details):
        assert told.startswith("expected it all")
        assert told.endswith("Say less.")
        assert len(told.encode()) < 2100


def test_an_error_that_cannot_tell_its_text_tells_its_type():
    class Mute(Exception):
        def __str__(self):
            raise RuntimeError

    assert status_of(Mute()).message == "Mute, whose text cannot be had (RuntimeError)"
