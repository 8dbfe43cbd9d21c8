"""Our contexts do what those of `contextlib` do, whatever the block raises."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from moe_autograd._contexts import contextmanager


class RefusesAttributes(Exception):
    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(name)


def plain(events: list[str]) -> Iterator[str]:
    events.append("begin")
    try:
        yield "value"
    finally:
        events.append("end")


def suppressing(events: list[str]) -> Iterator[str]:
    with contextlib.suppress(BaseException):
        yield "value"
    events.append("suppressed")


def replacing(events: list[str]) -> Iterator[str]:
    try:
        yield "value"
    except BaseException as error:
        raise KeyError("another") from error


def raising_behind(events: list[str]) -> Iterator[str]:
    yield "value"
    raise KeyError("behind")


def yielding_again(events: list[str]) -> Iterator[str]:
    with contextlib.suppress(BaseException):
        yield "value"
    yield "again"


def came_of(decorate: Callable[..., Any], function: Callable[..., Any], error: BaseException | None) -> Any:
    events: list[str] = []
    came: BaseException | None = None
    try:
        with decorate(function)(events) as value:
            events.append(value)
            if error is not None:
                raise error
    except BaseException as raised:
        came = raised
    cause = came and came.__cause__
    lines = (
        [frame.name for frame in traceback.extract_tb(came.__traceback__)] if came is error and came else []
    )
    return type(came), came is error, cause is error, lines, events


ERRORS = [ValueError, StopIteration, RuntimeError, GeneratorExit, KeyboardInterrupt]


@pytest.mark.parametrize("kind", [None, *ERRORS])
@pytest.mark.parametrize("function", [plain, suppressing, replacing, raising_behind, yielding_again])
def test_a_context_does_as_that_of_contextlib(
    function: Callable[..., Any], kind: type[BaseException] | None
) -> None:
    expected = came_of(contextlib.contextmanager, function, kind and kind())
    assert came_of(contextmanager, function, kind and kind()) == expected


def test_what_refuses_attributes_leaves_a_block_as_it_was_raised() -> None:
    error = RefusesAttributes()
    assert came_of(contextmanager, plain, error) == (
        RefusesAttributes,
        True,
        False,
        ["came_of"],
        ["begin", "value", "end"],
    )
