"""Run a program in Python processes of its own: for signals, exits and forks, and for ranks that talk to each other.

Guarantees: the program sees the repository and the same interpreter, where torch is imported already (see `warm`), but
for ranks; one that hangs, or waits for another that has failed, is killed and fails the test with what it printed so
far.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import IO

from tests.support.warm import COMMAND, ROOT, WarmProcess

__all__ = ["ROOT", "assert_prints", "run_command", "run_python", "run_ranks", "talk_to"]


def run_python(
    program: str, *arguments: str, limit_s: float = 250.0, raises_warnings: bool = True
) -> subprocess.CompletedProcess[str]:
    """Run `program` (indented source) and return how it ended; warnings are errors there, unless told otherwise."""
    ended = _run(program, [arguments], limit_s, raises_warnings=raises_warnings)[0]
    out, err = ended.stdout.decode(), ended.stderr.decode()
    return subprocess.CompletedProcess(ended.args, ended.returncode, out, err)


def assert_prints(program: str, expected: str, *, limit_s: float = 250.0) -> None:
    """Assert that `program` exits 0, prints exactly `expected` and complains about nothing."""
    ended = run_python(program, limit_s=limit_s)
    told = f"exit {ended.returncode}\n--- stdout\n{ended.stdout}\n--- stderr\n{ended.stderr}"
    assert ended.returncode == 0, told
    assert ended.stdout.split() == expected.split(), told
    assert ended.stderr == "", told


@contextlib.contextmanager
def talk_to(program: str, *arguments: str) -> Iterator[tuple[WarmProcess, IO[str], IO[str]]]:
    """Start `program` (indented source); yield it, its stdin and its stdout, and kill it if it has not ended by then.

    Warnings are errors there.
    """
    (given, writing), (reading, said) = os.pipe(), os.pipe()
    with open(writing, "w") as stdin, open(reading) as stdout:
        process = WarmProcess(
            textwrap.dedent(program), *arguments, stdin=given, stdout=said, stderr=2, raises_warnings=True
        )
        os.close(given)
        os.close(said)
        try:
            yield process, stdin, stdout
        finally:
            process.kill()
            process.wait()


def run_ranks(program: str, *arguments: object, num_ranks: int = 2, limit_s: float = 250.0) -> list[str]:
    """Run `program` side by side, with a rank and these as arguments; all have to exit 0. Return what they printed.

    Each starts Python itself: of forked ranks one hung now and then as it left its group.
    """
    given = [tuple(map(str, (rank, *arguments))) for rank in range(num_ranks)]
    ended = _run(program, given, limit_s, start=_started)
    assert not any(rank.returncode for rank in ended), "\n".join(map(_told, ended))
    return [rank.stdout.decode() for rank in ended]


def run_command(
    *arguments: str, stdin: bytes = b"", stdout: int | None = None
) -> subprocess.CompletedProcess[bytes]:
    """Run `experts-server` with these arguments; return how it ended.

    Args:
        stdin: what it reads.
        stdout: a file to write to; `None`: what it writes is returned.
    """
    with tempfile.TemporaryFile() as given:
        given.write(stdin)
        given.seek(0)
        return _run(COMMAND, [arguments], 250.0, stdin=given.fileno(), stdout=stdout)[0]


def _run(
    program: str,
    arguments: Sequence[tuple[str, ...]],
    limit_s: float,
    *,
    stdin: int | None = None,
    stdout: int | None = None,
    raises_warnings: bool = False,
    start: Callable[..., WarmProcess | subprocess.Popen[bytes]] = WarmProcess,
) -> list[subprocess.CompletedProcess[bytes]]:
    """Run it side by side, once for each of `arguments`."""
    until, program = time.monotonic() + limit_s, textwrap.dedent(program)
    with contextlib.ExitStack() as stack:
        started: list[tuple[WarmProcess | subprocess.Popen[bytes], IO[bytes], IO[bytes]]] = []
        for given in arguments:
            out, err = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(2))
            process = start(
                program,
                *given,
                stdin=stdin,
                stdout=out.fileno() if stdout is None else stdout,
                stderr=err.fileno(),
                raises_warnings=raises_warnings,
            )
            stack.callback(process.wait)
            stack.callback(process.kill)
            started.append((process, out, err))
        pause, statuses = threading.Event(), [None]
        while not _are_over(statuses) and time.monotonic() < until:
            pause.wait(0.01)
            statuses = [process.poll() for process, _, _ in started]
        ended = [
            subprocess.CompletedProcess(program, status, _whole(out), _whole(err))
            for status, (_, out, err) in zip(statuses, started, strict=True)
        ]
    if not _are_over(statuses):
        raise TimeoutError(f"expected an end within {limit_s} s, got\n" + "\n".join(map(_told, ended)))
    return ended


def _are_over(statuses: Sequence[int | None]) -> bool:
    """Whether all have ended, or one has failed: those that wait for it would not end."""
    return None not in statuses or any(statuses)


def _started(
    program: str, *arguments: str, stdout: int, stderr: int, stdin: int | None, raises_warnings: bool
) -> subprocess.Popen[bytes]:
    """Start Python itself, as a `WarmProcess` is started."""
    warned = ["-W", "error"] if raises_warnings else []
    return subprocess.Popen(
        [sys.executable, *warned, "-c", program, *arguments],
        cwd=ROOT,
        stdin=subprocess.DEVNULL if stdin is None else stdin,
        stdout=stdout,
        stderr=stderr,
    )


def _told(ended: subprocess.CompletedProcess[bytes]) -> str:
    out, err = ended.stdout.decode(), ended.stderr.decode()
    return f"exit {ended.returncode}\n--- stdout\n{out}\n--- stderr\n{err}"


def _whole(file: IO[bytes]) -> bytes:
    file.seek(0)
    return file.read()
