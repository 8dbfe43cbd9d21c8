"""Standard output that cannot be written to: an error of ours, and none of Python's when it ends."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Iterator
from typing import BinaryIO, TextIO

from moe_autograd._contexts import contextmanager
from moe_autograd.errors import ConfigError, MoeAutogradError


@contextmanager
def to_stdout() -> Iterator[None]:
    """Write to stdout within. What its encoding does not have, as the dots of a name that was cut, is a question mark.

    Raises:
        ConfigError: it takes nothing: a disk is full, for one. A reader that has gone is no mistake: click ends then.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    try:
        yield
    except (BrokenPipeError, MoeAutogradError):  # some of ours are an OSError, too
        raise
    except OSError as error:
        forget_stdout()
        raise ConfigError(
            f"stdout: expected to be written to, got {error.strerror!r}. Look at where it goes, and try again."
        ) from error


def open_stream(name: str, stream: TextIO | None) -> BinaryIO:
    """Return the bytes behind stdin or stdout.

    Raises:
        ConfigError: it is closed.
    """
    if stream is None:
        raise ConfigError(f"{name}: expected an open one, got a closed one. Name a file, or leave it open.")
    return stream.buffer


def fill_closed_descriptors() -> None:
    """Let 0, 1 and 2 go nowhere where they are closed: else files and connections of ours get these numbers.

    And what a library of C writes to stdout or stderr would go into them. For Python they stay closed.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # takes the lowest number that is free


def forget_stdout() -> None:
    """Let what is written from now on, and what is still in the buffer, go nowhere: Python writes that at its end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
