"""A mapped layer in `DistributedDataParallel` over two gloo processes has the gradients of one process."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.subprocesses import ROOT


@pytest.mark.parametrize(("find_unused", "defers"), [(False, False), (True, False), (True, True)])
def test_two_processes_have_the_gradients_of_one(find_unused: bool, defers: bool, tmp_path: Path) -> None:
    """Also with an expert that is not used, which plain PyTorch serves with `find_unused_parameters=True`."""
    command = [sys.executable, "-m", "tests.support.distributed_program"]
    processes = [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path / "store"), str(find_unused), str(defers)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        for process in processes:
            out, err = process.communicate(timeout=120)
            assert process.returncode == 0, err
            assert out.split() == ["equal"]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
