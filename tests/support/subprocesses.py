"""Run a program in a Python process of its own: for signals, exits and forks.

Guarantees: the program sees the repository and the same interpreter, where torch is imported already (see `warm`); one
that hangs is killed and fails the test with what it printed so far.
"""

from __future__ import annotations

import subprocess
import tempfile
import textwrap
from typing import IO

from tests.support.warm import ROOT, WarmProcess

__all__ = ["ROOT", "assert_prints", "run_python"]


def run_python(program: str, *, limit_s: float = 250.0) -> subprocess.CompletedProcess[str]:
    """Run `program` (indented source) and return how it ended."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
        process = WarmProcess(
            textwrap.dedent(program), stdout=out.fileno(), stderr=err.fileno(), raises_warnings=True
        )
        try:
            status = process.wait(limit_s)
        except TimeoutError as error:
            error.add_note(_told(out, err))
            raise
        finally:
            process.kill()
        return subprocess.CompletedProcess(program, status, _whole(out), _whole(err))


def assert_prints(program: str, expected: str, *, limit_s: float = 250.0) -> None:
    """Assert that `program` exits 0, prints exactly `expected` and complains about nothing."""
    ended = run_python(program, limit_s=limit_s)
    told = f"exit {ended.returncode}\n--- stdout\n{ended.stdout}\n--- stderr\n{ended.stderr}"
    assert ended.returncode == 0, told
    assert ended.stdout.split() == expected.split(), told
    assert ended.stderr == "", told


def _told(out: IO[str], err: IO[str]) -> str:
    return f"--- stdout\n{_whole(out)}\n--- stderr\n{_whole(err)}"


def _whole(file: IO[str]) -> str:
    file.seek(0)
    return file.read()
