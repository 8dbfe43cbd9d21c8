"""Start real servers in a moment, to kill them again: `python -m tests.support.forked_servers CONFIG`.

Importing torch takes seconds, and a hundred servers take a hundred times as long. So this process imports everything
and forks a server for each line on its stdin. It starts neither threads nor gRPC itself: each server has its own. On
stdout come, a line each: the server's process id, the line with its address, and in the end its exit status.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import torch

from experts_server.command.daemon import run
from experts_server.configuration.settings import load_config
from tests.support.subprocesses import ROOT


class ForkedServers:
    """Starts servers of one configuration, each when the one before has ended; use it in a `with` statement."""

    def __init__(self, config: Path) -> None:
        self._pid = 0  # of the server that runs
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.forked_servers", str(config)],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def start(self) -> str:
        """Return a server's address once it serves. Its configuration is read anew."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write("start\n")
        self._process.stdin.flush()
        self._pid, ready = int(self._process.stdout.readline()), self._process.stdout.readline()
        assert ready.startswith("experts-server: serving"), f"it did not come up: {ready!r}"
        return ready.split()[-1]

    def signal(self, number: signal.Signals) -> None:
        """Send the server a signal."""
        os.kill(self._pid, number)

    def wait(self) -> int:
        """Return the server's exit status (negative: the signal that killed it)."""
        assert self._process.stdout is not None
        status, self._pid = int(self._process.stdout.readline()), 0
        return status

    def kill(self) -> None:
        """Kill the server as a power cut would."""
        self.signal(signal.SIGKILL)
        assert self.wait() == -signal.SIGKILL

    def kill_if_running(self) -> None:
        """Kill the server, if one runs."""
        if self._pid:
            self.kill()

    def __enter__(self) -> ForkedServers:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill_if_running()
        self._process.communicate(timeout=60)  # closes its stdin, which ends it


def main(config: Path) -> int:
    # torch imports a second's worth of modules at the first step: once here, not in each server
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0).step()
    while sys.stdin.readline():
        pid = os.fork()
        if pid == 0:
            os._exit(asyncio.run(run(load_config(config))))
        print(pid, flush=True)
        _, status = os.waitpid(pid, 0)
        print(os.waitstatus_to_exitcode(status), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
