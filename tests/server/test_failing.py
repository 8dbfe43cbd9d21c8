"""What operators read of an expert whose module raises: where, once a minute, and nothing of what it says.

And of a client that goes away: nothing.
"""

from __future__ import annotations

import logging
import sys
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from experts_server import ExpertsServer
from experts_server.hosting.failing import REST_S, FailureLog
from moe_autograd.errors import CorruptDataError, ExpertFailedError
from moe_autograd.remote import connect
from tests.support.servers import WireClient, wait_until

SECRET = "1234.5678"
LOGGER = "experts_server.hosting.failing"


class Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise LookupError(SECRET)


class Raises(nn.Module):
    def __init__(self, where: str) -> None:
        super().__init__()
        self.where = where

    def forward(self, x: Tensor) -> Any:
        if self.where == "forward":
            self.look_up()
        if self.where == "exit":
            sys.exit(SECRET)
        return Backward.apply(x) if self.where == "backward" else "a text"

    def look_up(self) -> None:
        try:
            raise KeyError(SECRET)
        except KeyError as error:
            raise LookupError(SECRET) from error


def failed(error: Exception) -> ExpertFailedError:
    failure = ExpertFailedError("expert 'e', forward: its module raised")
    failure.__cause__ = error
    return failure


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_the_log_tells_once_where_a_module_raised_and_not_what_it_said(
    where: str, caplog: pytest.LogCaptureFixture
) -> None:
    with ExpertsServer({"e": Raises(where)}) as server, WireClient(server.address) as client:
        for call_id in range(3):
            answer = client.forward("e", torch.ones(2, 3), call_id=call_id)
            if where == "backward":
                answer = client.backward("e", torch.ones(2, 3), call_id=call_id)
            assert answer.code == "EXPERT_FAILED"
            assert SECRET in answer.text
    (record,) = [record for record in caplog.records if record.name == LOGGER]
    assert record.levelno == logging.WARNING
    assert record.getMessage() == "expert 'e': a call failed: LookupError"
    text = logging.Formatter().format(record)
    assert __file__ in text
    assert "in look_up" in text if where == "forward" else "in backward" in text
    assert ("KeyError" in text) is (where == "forward")
    assert SECRET not in text.replace("SECRET", "")


def test_what_a_module_may_not_return_is_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    with ExpertsServer({"e": Raises("result")}) as server, WireClient(server.address) as client:
        for _ in range(2):
            assert client.forward("e", torch.ones(2, 3)).code == "EXPERT_FAILED"
    (record,) = [record for record in caplog.records if record.name == LOGGER]
    assert "expected a tensor or a sequence of tensors from its module, got str" in record.getMessage()
    assert record.exc_info is None


def test_a_module_that_exits_has_failed_as_one_that_raises(caplog: pytest.LogCaptureFixture) -> None:
    with ExpertsServer({"e": Raises("exit")}) as server, WireClient(server.address) as client:
        for _ in range(2):
            answer = client.forward("e", torch.ones(2, 3))
            assert (answer.code, f"SystemExit: {SECRET}" in answer.text) == ("EXPERT_FAILED", True)
    (record,) = [record for record in caplog.records if record.name == LOGGER]
    assert record.getMessage() == "expert 'e': a call failed: SystemExit"
    assert SECRET not in logging.Formatter().format(record)


def test_a_call_that_is_wrong_leaves_the_log_alone(caplog: pytest.LogCaptureFixture) -> None:
    with ExpertsServer({"e": nn.Linear(3, 3)}) as server, WireClient(server.address) as client:
        assert client.forward("e", torch.ones(2, 4)).code == "INVALID_CALL"
    assert LOGGER not in [record.name for record in caplog.records]


def raised(kind: type[Exception]) -> ExpertFailedError:
    try:
        raise kind(SECRET)
    except kind as error:
        return failed(error)


def test_a_failure_that_goes_on_is_told_again_after_a_minute_with_how_often_it_was(
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = Clock()
    log = FailureLog(clock)
    for _ in range(5):
        log.note("a", raised(LookupError))
    log.note("a", raised(ArithmeticError))  # another one
    clock.now += REST_S
    log.note("a", raised(LookupError))
    assert [record.getMessage() for record in caplog.records] == [
        "expert 'a': a call failed: LookupError",
        "expert 'a': a call failed: ArithmeticError",
        "expert 'a': a call failed: LookupError (4 times more since that was told last)",
    ]
    assert all(record.exc_info for record in caplog.records)


def test_each_thing_that_fails_is_told_by_itself(caplog: pytest.LogCaptureFixture) -> None:
    log, error = FailureLog(), raised(LookupError)
    for what in ("a call failed", "gradients were refused") * 2:
        log.warn("a", what, error)
    assert [record.getMessage() for record in caplog.records] == [
        "expert 'a': a call failed: LookupError",
        "expert 'a': gradients were refused: LookupError",
    ]
    assert [bool(record.exc_info) for record in caplog.records] == [True, False]


def test_a_kind_of_error_that_is_made_anew_each_time_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    log = FailureLog()
    for _ in range(3):
        log.note("a", raised(type("Odd", (Exception,), {})))
    assert [record.getMessage() for record in caplog.records] == ["expert 'a': a call failed: Odd"]


def test_many_experts_that_fail_alike_are_named_and_show_once_where(caplog: pytest.LogCaptureFixture) -> None:
    log = FailureLog()
    for index in range(5):
        log.note(f"e.{index}", raised(LookupError))
    assert [record.getMessage()[:12] for record in caplog.records] == [f"expert 'e.{i}'" for i in range(5)]
    assert [bool(record.exc_info) for record in caplog.records] == [True] + [False] * 4


def test_a_long_chain_of_causes_is_shown_once(caplog: pytest.LogCaptureFixture) -> None:
    """Each cause is the context as well: followed both ways, fifty are more than can be counted."""

    def call(depth: int) -> None:
        try:
            if depth:
                call(depth - 1)
            raise KeyError(SECRET)
        except LookupError as error:
            raise LookupError(SECRET) from error

    with pytest.raises(LookupError) as caught:
        call(25)
    FailureLog().note("a", failed(caught.value))
    (record,) = caplog.records
    text = logging.Formatter().format(record)
    assert text.count("The above exception was the direct cause") == 26
    assert SECRET not in text.replace("SECRET", "")


class Remembers(nn.Module):
    """Raises, and knows what it was given last."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.raises = Raises(where)

    def forward(self, x: Tensor) -> Any:
        self.given = weakref.ref(x)
        return self.raises(x)


@pytest.mark.usefixtures("no_gc")
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_what_a_failing_call_was_given_goes_without_the_garbage_collector(where: str) -> None:
    module = Remembers(where)
    with ExpertsServer({"e": module}) as server, WireClient(server.address) as client:
        for call_id in (1, 2):  # what is logged of the first, pytest keeps
            client.forward("e", torch.ones(1, 4), call_id=call_id)
            if where == "backward":
                client.backward("e", torch.ones(1, 4), call_id=call_id, wants_weight_grads=False)
                client.forget(e=call_id)
        wait_until(lambda: module.given() is None, 20.0)


class Wide(nn.Module):
    """Has an answer of many messages."""

    def forward(self, x: Tensor) -> Tensor:
        return x.repeat(1, 2_000_000)


def test_a_client_that_goes_away_in_the_midst_of_an_answer_is_no_failure_of_the_server(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with ExpertsServer({"e": Wide()}) as server:
        for _ in range(40):  # grpc tells of it in the write or by a cancellation: of 60 in the write 19 times
            with (
                connect(server.address, max_tensor_bytes=1000) as experts,
                pytest.raises(CorruptDataError, match="got shape"),
            ):
                experts["e"](torch.ones(1, 1))
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
