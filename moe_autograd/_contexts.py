"""Contexts that are made of generators, for blocks in which users' code runs.

`contextlib` has them too, and sets `__traceback__` of what a block raises. An exception may refuse that, as a frozen
dataclass does, and then its refusal comes out in its place.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator, Iterator
from types import TracebackType
from typing import ParamSpec, TypeVar, cast

P = ParamSpec("P")
T = TypeVar("T")


class GeneratorContext(contextlib.AbstractContextManager[T]):
    """The context of one generator, which yields once."""

    def __init__(self, generator: Iterator[T]) -> None:
        self.generator = cast(Generator[T, None, None], generator)

    def __enter__(self) -> T:
        return next(self.generator)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> bool | None:
        try:
            if error is None:
                next(self.generator)
            else:
                self.generator.throw(error)
        except StopIteration:
            return error is not None  # that it has suppressed
        except BaseException as raised:
            if error is None or not (raised is error or _is_made_of(error, raised)):
                raise
            BaseException.with_traceback(error, traceback)  # without the generator's frames
            return False
        raise RuntimeError(f"{self.generator!r}: expected a generator that yields once, got a second time.")


def _is_made_of(error: BaseException, raised: BaseException) -> bool:
    """Whether Python has made `raised` of a `StopIteration` that left a generator."""
    return isinstance(error, StopIteration) and isinstance(raised, RuntimeError) and raised.__cause__ is error


def contextmanager(function: Callable[P, Iterator[T]]) -> Callable[P, contextlib.AbstractContextManager[T]]:
    """Do as `contextlib.contextmanager`, and raise what the block raises whatever that is."""

    @functools.wraps(function)
    def enter(*args: P.args, **kwargs: P.kwargs) -> GeneratorContext[T]:
        return GeneratorContext(function(*args, **kwargs))

    return enter
