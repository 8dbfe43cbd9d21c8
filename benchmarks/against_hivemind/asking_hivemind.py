"""hivemind, in an interpreter of its own (`peer.py`), asked for one turn after the other."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import torch

SHUTDOWN_S = 20.0
ANSWER_S = 600.0  # a whole turn takes seconds; a peer that hangs is ended with all its processes


class Peer:
    """hivemind, in the other interpreter; a turn is a line there and a line back."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        told = self._answer()
        print(f"hivemind {told['hivemind']} with torch {told['torch']}; ours with torch {torch.__version__}")

    @property
    def num_processes(self) -> int:
        """Of its server and its client, without the one that measures."""
        return len(psutil.Process(self._process.pid).children(recursive=True))

    def turn(self) -> dict[str, float]:
        assert self._process.stdin is not None
        self._process.stdin.write("turn\n")
        self._process.stdin.flush()
        return {"s": float(self._answer()["s"])}

    def _answer(self) -> dict[str, object]:
        assert self._process.stdout is not None
        watchdog = threading.Timer(ANSWER_S, os.killpg, (self._process.pid, signal.SIGKILL))
        watchdog.start()
        try:
            for line in self._process.stdout:
                if line.startswith("{"):  # its libraries print too
                    answer: dict[str, object] = json.loads(line)
                    return answer
        finally:
            watchdog.cancel()
        raise SystemExit(
            f"hivemind: expected an answer, got the end of its process ({self._process.wait()})."
        )


@contextmanager
def peer(python: str, name: str) -> Iterator[Peer]:
    command = [python, "-W", "ignore", str(Path(__file__).with_name("peer.py")), name]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            yield Peer(process)
        finally:
            assert process.stdin is not None
            process.stdin.close()
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(SHUTDOWN_S)
            with contextlib.suppress(ProcessLookupError):  # some of its processes now and then do not end
                os.killpg(process.pid, signal.SIGKILL)
