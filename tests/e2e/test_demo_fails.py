"""What the demo says where it cannot run."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from tests.support.subprocesses import run_python

EXAMPLES = Path(__file__).parents[2] / "examples"


@pytest.fixture
def server_process(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(EXAMPLES)
    return importlib.import_module("server_process").ServerProcess


def test_what_failed_is_told_and_not_that_the_server_did_not_end_well_after_it(server_process: Any) -> None:
    with (
        pytest.raises(SystemExit, match=r"ended with code 2 before it served"),
        server_process("--bad") as server,
    ):
        server.wait_until_it_serves()


def test_that_the_server_did_not_end_well_is_told_where_nothing_else_failed(server_process: Any) -> None:
    with pytest.raises(SystemExit, match="to end with code 0, got 2"), server_process("--bad") as server:
        server._process.wait()


@pytest.mark.parametrize("seed", ["-1", str(1 << 62)])
def test_a_seed_that_a_server_does_not_take_is_refused_before_one_is_started(
    seed: str, tmp_path: Path
) -> None:
    script = str(EXAMPLES / "demo.py")
    program = f"""
        import runpy, sys
        sys.path.insert(0, {str(EXAMPLES)!r})
        runpy.run_path({script!r}, run_name="__main__")
    """
    run = run_python(program, "--seed", seed, "--out", str(tmp_path / "out"))
    assert run.returncode == 2
    assert f"argument --seed: expected 0 to 4611686018427387903, got {seed}" in run.stderr
    assert not (tmp_path / "out").exists()
