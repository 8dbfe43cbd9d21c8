"""What commands do with stdout and stdin: full ones, closed ones, and `-` as the name of a file."""

from __future__ import annotations

import contextlib
import os
import pty
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
import torch
from safetensors.torch import load, save
from torch import nn

from experts_server import ExpertsServer
from experts_server.configuration.config import ServingConfig
from moe_autograd.remote import connect
from tests.support.servers import ROOT, START_S, WireClient, wait_until
from tests.support.subprocesses import run_command

FULL = (
    "stdout: expected to be written to, got 'No space left on device'. Look at where it goes, and try again."
)


class Größe(nn.Linear):
    """Has a name that not every encoding has."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ExpertsServer]:
    config = ServingConfig(checkpoint_dir=tmp_path_factory.mktemp("c"), metrics_listen="127.0.0.1:0")
    with ExpertsServer({"e": nn.Linear(2, 2), "o": Größe(2, 2)}, config=config) as server:
        yield server


def buffered() -> dict[str, str]:
    """Return an environment in which Python writes at its end what could not be written before."""
    own = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return {**own, "PYTHONPATH": str(ROOT)}


@pytest.mark.parametrize(
    "command", ["info", "info --json", "save", "export", "top", "config", "--help", "info --help"]
)
def test_a_stdout_that_takes_nothing_is_one_line_and_exits_1(
    server: ExpertsServer, command: str, tmp_path: Path
) -> None:
    (tmp_path / "c.toml").write_text('[experts.e]\nclass = "identity"\n')
    assert server.metrics_address is not None
    rest = {
        "export": [server.address, "e", "-"],
        "top": ["--looks", "1", server.metrics_address],
        "config": ["--check", str(tmp_path / "c.toml")],
    }
    arguments = rest.get(command, [] if "--help" in command else [server.address])
    with open("/dev/full", "wb") as full:
        ended = run_command(*command.split(), *arguments, stdout=full.fileno())
    assert (ended.returncode, ended.stderr.decode()) == (1, f"Error: {FULL}\n")


@pytest.mark.parametrize("command", ["info", "config"])
def test_what_the_encoding_of_stdout_does_not_have_is_a_question_mark(
    server: ExpertsServer, command: str, tmp_path: Path
) -> None:
    file = tmp_path / "→.toml"
    file.write_text('[experts.e]\nclass = "identity"\n')
    arguments = [server.address] if command == "info" else ["--check", str(file)]
    encoding = "ascii" if command == "info" else "latin-1"  # of ascii, click makes UTF-8 by itself
    ended = subprocess.run(
        [sys.executable, "-m", "experts_server", command, *arguments],
        capture_output=True,
        timeout=START_S,
        check=False,
        env={**buffered(), "PYTHONIOENCODING": encoding},
    )
    assert (ended.returncode, ended.stderr.decode()) == (0, "")
    assert ("|Gr??e |" if command == "info" else "/?.toml: 1 expert") in ended.stdout.decode(encoding)


def test_serve_goes_on_with_a_stdout_that_takes_nothing_and_exits_0() -> None:
    flags = ("serve", "--expert", "identity", "--listen", "127.0.0.1:0")
    with (
        open("/dev/full", "wb") as full,
        subprocess.Popen(
            [sys.executable, "-m", "experts_server", *flags],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env=buffered(),
        ) as process,
    ):
        assert process.stderr is not None
        told = next(line for line in process.stderr if "expected somebody to read stdout" in line)
        process.terminate()
        log = process.stderr.read()
    assert "No space left on device" in told
    assert (process.returncode, log.splitlines()[-1].endswith("stopped")) == (0, True), log


def test_serve_serves_and_stops_though_nobody_reads_a_full_pipe() -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writing, b"x" * 4096)
    os.set_blocking(writing, True)  # again, as pipes are
    flags = ("serve", "--expert", "identity", "--listen", "127.0.0.1:0")
    with subprocess.Popen(
        [sys.executable, "-m", "experts_server", *flags], stdout=writing, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stderr is not None
        said = next(found for line in process.stderr if (found := re.search(r"ready: .* at (\S+)", line)))
        try:
            with connect(said[1]) as experts:
                assert len(experts) == 1
            process.terminate()
            assert process.wait(START_S) == 0
        finally:
            process.kill()
    os.close(reading)
    os.close(writing)


def test_the_file_called_minus_is_stdout_and_stdin(
    server: ExpertsServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ended = run_command("export", server.address, "e", "-")
    assert (ended.returncode, ended.stderr) == (0, b"")
    state = load(ended.stdout)
    doubled = save({key: 2 * tensor for key, tensor in state.items()})
    ended = run_command("import", server.address, "e", "-", stdin=doubled)
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, b"", b"")
    with WireClient(server.address) as client:
        assert torch.equal(client.get_state()["e"]["weight"], 2 * state["weight"])
    assert list(tmp_path.iterdir()) == []


def test_weights_are_not_written_to_a_terminal(server: ExpertsServer) -> None:
    screen, inner = pty.openpty()
    ended = run_command("export", server.address, "e", "-", stdout=inner)
    os.close(inner)
    os.close(screen)
    said = "export: expected a file or a pipe for the weights, got a terminal. Name a file, or pipe them on."
    assert (ended.returncode, ended.stderr.decode()) == (1, f"Error: {said}\n")


@pytest.mark.parametrize(("command", "stream", "number"), [("export", "stdout", 1), ("import", "stdin", 0)])
def test_minus_where_that_is_closed_says_so(
    server: ExpertsServer, command: str, stream: str, number: int
) -> None:
    shell = f"exec {sys.executable} -m experts_server {command} {server.address} e - {number}>&-"
    ended = subprocess.run(
        ["sh", "-c", shell], capture_output=True, text=True, timeout=START_S, check=False, cwd=ROOT
    )
    assert (
        ended.stderr
        == f"Error: {stream}: expected an open one, got a closed one. Name a file, or leave it open.\n"
    )
    assert ended.returncode == 1


def test_a_server_that_is_started_with_closed_streams_gives_their_numbers_to_nothing_of_its_own(
    tmp_path: Path,
) -> None:
    """A library that writes to stderr would have written into a client's connection, or a checkpoint."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
    flags = ("--expert", "ffn", "--d-model", "4", "--checkpoint-dir", str(tmp_path), "--listen", address)
    command = [sys.executable, "-m", "experts_server", "serve", *flags]
    process = subprocess.Popen(
        ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *command], cwd=ROOT, env=buffered()
    )
    try:
        wait_until(lambda: is_served(address) or process.poll() is not None)
        where = [Path(f"/proc/{process.pid}/fd/{number}").readlink() for number in range(3)]
        # Importing `ctypes` may open libffi's own file before us, which is only read, and stays.
        assert {path.name.partition(".")[0] for path in where} <= {"null", "libffi"}
        process.terminate()
        assert process.wait(START_S) == 0
    finally:
        process.kill()
        process.wait(START_S)


def is_served(address: str) -> bool:
    try:
        with WireClient(address) as client:
            return bool(client.info().experts)
    except grpc.RpcError:
        return False
