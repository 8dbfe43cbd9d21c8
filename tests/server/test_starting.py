"""A server that is being built, or loads, ends at any signal that would stop it; also as the first of a container."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import NoReturn

import pytest
from torch import nn

from experts_server.command.daemon import SIGNALS
from tests.support.servers import ROOT, START_S

FIRST_OF_ITS_OWN = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child")


class NeverBuilt(nn.Module):
    """Says that it is being built, and goes on with that."""

    def __init__(self) -> None:
        super().__init__()
        print("building", flush=True)
        self.wait()

    def wait(self) -> NoReturn:
        while True:
            threading.Event().wait()


def may_have_a_namespace() -> bool:
    return subprocess.run([*FIRST_OF_ITS_OWN, "true"], capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize("number", SIGNALS)
@pytest.mark.parametrize("before", [(), FIRST_OF_ITS_OWN], ids=["as usual", "in a container"])
def test_a_signal_ends_a_server_that_does_not_serve_yet(
    before: tuple[str, ...], number: signal.Signals
) -> None:
    if before and not may_have_a_namespace():
        pytest.skip("needs namespaces of users and processes")
    expert = f"{__name__}:NeverBuilt"
    command = [*before, sys.executable, "-m", "experts_server", "serve", "--expert", expert]
    # Whatever these tests were started with, as by nohup.
    handler = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    try:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
    finally:
        signal.signal(signal.SIGHUP, handler)
    with process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "building\n"
            server = process.pid
            if before:
                server = int(Path(f"/proc/{server}/task/{server}/children").read_text())
            os.kill(server, number)
            said, log = process.communicate(timeout=START_S / 4)
        finally:
            process.kill()
    assert process.returncode == (128 + number if before else -number)
    assert (said, log) == ("", "")
