"""Run a program in Python processes of its own: for signals, exits and forks, and for ranks that talk to each other.

Guarantees: the program sees the repository and the same interpreter, where torch is imported already (see `warm`); one
that hangs is killed and fails the test with what it printed so far.
"""

from __future__ import annotations

import contextlib
import subprocess
import tempfile
import textwrap
import time
from collections.abc import Sequence
from typing import IO

from tests.support.warm import ROOT, WarmProcess

__all__ = ["ROOT", "assert_prints", "run_python", "run_ranks"]


def run_python(program: str, *, limit_s: float = 250.0) -> subprocess.CompletedProcess[str]:
    """Run `program` (indented source) and return how it ended; warnings are errors there."""
    return _run(program, [()], limit_s, raises_warnings=True)[0]


def assert_prints(program: str, expected: str, *, limit_s: float = 250.0) -> None:
    """Assert that `program` exits 0, prints exactly `expected` and complains about nothing."""
    ended = run_python(program, limit_s=limit_s)
    told = _told(ended)
    assert ended.returncode == 0, told
    assert ended.stdout.split() == expected.split(), told
    assert ended.stderr == "", told


def run_ranks(program: str, *arguments: object, num_ranks: int = 2, limit_s: float = 250.0) -> list[str]:
    """Run `program` side by side, with a rank and these as arguments; all have to exit 0. Return what they printed."""
    given = [tuple(map(str, (rank, *arguments))) for rank in range(num_ranks)]
    ended = _run(program, given, limit_s, raises_warnings=False)
    assert not any(rank.returncode for rank in ended), "\n".join(map(_told, ended))
    return [rank.stdout for rank in ended]


def _run(
    program: str, arguments: Sequence[tuple[str, ...]], limit_s: float, *, raises_warnings: bool
) -> list[subprocess.CompletedProcess[str]]:
    until, program = time.monotonic() + limit_s, textwrap.dedent(program)
    with contextlib.ExitStack() as stack:
        started: list[tuple[WarmProcess, IO[str], IO[str]]] = []
        for given in arguments:
            out, err = (stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(2))
            files = {"stdout": out.fileno(), "stderr": err.fileno()}
            process = WarmProcess(program, *given, **files, raises_warnings=raises_warnings)
            stack.callback(process.kill)
            started.append((process, out, err))
        with contextlib.suppress(TimeoutError):  # told below, with what all have printed
            for process, _, _ in started:
                process.wait(max(0.0, until - time.monotonic()))
        ended = [
            subprocess.CompletedProcess(program, process.poll(), _whole(out), _whole(err))
            for process, out, err in started
        ]
    if any(process.returncode is None for process in ended):
        raise TimeoutError(f"expected an end within {limit_s} s, got\n" + "\n".join(map(_told, ended)))
    return ended


def _told(ended: subprocess.CompletedProcess[str]) -> str:
    return f"exit {ended.returncode}\n--- stdout\n{ended.stdout}\n--- stderr\n{ended.stderr}"


def _whole(file: IO[str]) -> str:
    file.seek(0)
    return file.read()
