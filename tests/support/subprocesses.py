"""Run a program in a Python process of its own: for signals, exits and forks.

Guarantees: the program sees the repository and the same interpreter; one that hangs is killed and fails the
test with what it printed so far.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run_python(program: str, *, limit_s: float = 250.0) -> subprocess.CompletedProcess[str]:
    """Run `program` (indented source) and return how it ended."""
    return subprocess.run(
        [sys.executable, "-X", "faulthandler", "-W", "error", "-c", textwrap.dedent(program)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=limit_s,
        check=False,
    )


def assert_prints(program: str, expected: str, *, limit_s: float = 250.0) -> None:
    """Assert that `program` exits 0, prints exactly `expected` and complains about nothing."""
    ended = run_python(program, limit_s=limit_s)
    told = f"exit {ended.returncode}\n--- stdout\n{ended.stdout}\n--- stderr\n{ended.stderr}"
    assert ended.returncode == 0, told
    assert ended.stdout.split() == expected.split(), told
    assert ended.stderr == "", told
