"""How a signal, or the end of its terminal, ends `experts-server serve`: real processes, real signals."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import pty
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from torch import nn

from tests.support.servers import ROOT, START_S, ServerProcess, WireClient, tokens, wait_until

FLAGS = ("--expert", "ffn", "--num-experts", "3", "--d-model", "8", "--optimizer", "adam", "--lr", "1e-3")


@contextlib.contextmanager
def children_begin_with(number: signal.Signals, handler: signal.Handlers) -> Iterator[None]:
    """Whatever these tests themselves were started with, as by nohup."""
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGHUP], ids=["ctrl-c", "terminal closed"])
def test_serve_stops_on_these_too(number: signal.Signals) -> None:
    with children_begin_with(signal.SIGHUP, signal.SIG_DFL), ServerProcess(*FLAGS, is_warm=False) as server:
        server.signal(number)
        assert server.wait() == 0
    assert any("stopped" in line for line in server.log)


class LongAtExit(nn.Linear):
    """Keeps the interpreter from its end until a signal comes."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        atexit.register(signal.pause)
        atexit.register(print, "at exit", file=sys.stderr, flush=True)


def test_a_second_ctrl_c_ends_the_process_at_once_also_at_its_exit() -> None:
    with ServerProcess("--expert", f"{__name__}:LongAtExit") as server:
        server.signal(signal.SIGINT)
        wait_until(lambda: "at exit\n" in server.log)
        server.signal(signal.SIGINT)
        assert server.wait() == -signal.SIGINT
    assert "Traceback (most recent call last):\n" not in server.log


def test_serve_saves_when_the_terminal_of_its_shell_is_closed(tmp_path: Path) -> None:
    """The system tells the server, and the shell does so again."""
    screen, inner = pty.openpty()
    with children_begin_with(signal.SIGHUP, signal.SIG_DFL):
        shell = subprocess.Popen(
            ["setsid", "--ctty", "bash", "--norc", "-i"],
            stdin=inner,
            stdout=inner,
            stderr=inner,
            cwd=ROOT,
            env={**os.environ, "HISTFILE": ""},
        )
    os.close(inner)
    command = [sys.executable, "-m", "experts_server", "serve", "--listen", "127.0.0.1:0", *FLAGS]
    os.write(screen, f"{shlex.join([*command, '--checkpoint-dir', str(tmp_path)])}\n".encode())
    said = b""
    while b"serving 3 experts at" not in said:
        said += os.read(screen, 1 << 16)
    os.close(screen)
    with (tmp_path / "lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # free when the server has ended
    shell.wait(START_S)
    generations = sorted(path.name for path in tmp_path.glob("generation-*"))
    assert generations == ["generation-00000001", "generation-00000002"]


def test_serve_goes_on_without_its_terminal_under_nohup() -> None:
    with (
        children_begin_with(signal.SIGHUP, signal.SIG_IGN),
        ServerProcess(*FLAGS, is_warm=False) as server,
        WireClient(server.address) as client,
    ):
        server.signal(signal.SIGHUP)
        assert client.forward("ffn.2", tokens(4, 8)).code == "OK"
        assert server.stop() == 0
