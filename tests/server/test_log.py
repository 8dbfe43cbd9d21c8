"""The log of a server whose reader stops reading: a pager that is suspended, a terminal after Ctrl-S, a slow disk."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import grpc
import pytest

from tests.support.certificates import make_certificates
from tests.support.servers import ROOT, START_S, ServerProcess, WireClient, tokens
from tests.support.subprocesses import run_command, run_python
from tests.support.warm import COMMAND, WarmProcess

FLAGS = ("--expert", "ffn", "--d-model", "4", "--listen", "127.0.0.1:0")


@contextmanager
def full_pipe() -> Iterator[tuple[int, int, int]]:
    """Yield a pipe that takes nothing more, and how much is in it."""
    reading, writing = os.pipe()
    size = fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, 4096)
    os.write(writing, b"." * size)
    try:
        yield reading, writing, size
    finally:
        with suppress(OSError):  # closed by the test
            os.close(writing)
        os.close(reading)


@contextmanager
def serving(stderr: int, *more: str) -> Iterator[tuple[WarmProcess, str]]:
    """Yield a server that logs to `stderr`, and its address."""
    reading, writing = os.pipe()
    with open(reading) as told:
        process = WarmProcess(COMMAND, "serve", *FLAGS, *more, stdout=writing, stderr=stderr)
        os.close(writing)
        watchdog = threading.Timer(START_S, process.kill)
        watchdog.start()
        try:
            yield process, told.readline().strip().rpartition(" ")[-1]
        finally:
            watchdog.cancel()
            process.kill()


def test_a_server_serves_and_stops_while_nobody_reads_its_log() -> None:
    with full_pipe() as (_, writing, _), serving(writing) as (process, address):
        assert address, "it waited for its log"
        with WireClient(address) as client:
            assert client.forward("ffn.0", tokens(2, 4)).code == "OK"
        process.send_signal(signal.SIGTERM)
        assert process.wait(START_S) == 0


def test_who_fails_to_shake_hands_writes_nothing_into_the_log(tmp_path: Path) -> None:
    """gRPC would write a line for each, on its own threads, and nobody reads it."""
    make_certificates(tmp_path)
    config = tmp_path / "server.toml"
    config.write_text(f'[security]\ntls_cert = "{tmp_path}/server.pem"\ntls_key = "{tmp_path}/server.key"\n')
    trusted = grpc.ssl_channel_credentials((tmp_path / "ca.pem").read_bytes())
    with (
        full_pipe() as (reading, writing, size),
        serving(writing, "--config", str(config)) as (process, address),
    ):
        host, _, port = address.rpartition(":")
        for _ in range(100):
            with socket.create_connection((host, int(port)), START_S) as connection:
                connection.sendall(b"GET / HTTP/1.0\r\n\r\n")
                assert connection.recv(1 << 16) != b"HTTP", "it has seen that this is no handshake"
        with WireClient(address, credentials=trusted) as client:
            assert client.forward("ffn.0", tokens(2, 4)).code == "OK"
        process.send_signal(signal.SIGTERM)
        os.close(writing)
        with open(reading, closefd=False) as log:
            told = log.read()[size:]
        assert process.wait(START_S) == 0
    assert "ready: 1 expert" in told
    assert "andshake" not in told


def test_commands_that_do_not_trust_a_server_say_so_in_one_line(
    tmp_path: Path,
) -> None:
    """gRPC wrote lines of its own before it."""
    other = tmp_path / "other"
    other.mkdir()
    for folder in (tmp_path, other):
        make_certificates(folder)
    config = tmp_path / "server.toml"
    config.write_text(f'[security]\ntls_cert = "{tmp_path}/server.pem"\ntls_key = "{tmp_path}/server.key"\n')
    with ServerProcess(*FLAGS, "--config", str(config)) as server:
        commands = (["info", server.address], ["save", server.address])
        for command in commands:
            shown = run_command(*command, "--ca", str(other / "ca.pem"), "--timeout-s", "30")
            assert shown.returncode == 1
            (line,) = shown.stderr.decode().splitlines()
            assert line.startswith("Error: server at ")


@pytest.mark.parametrize("is_blocking", [True, False])
def test_what_waited_for_a_reader_comes_in_order_once_he_reads(is_blocking: bool) -> None:
    with full_pipe() as (reading, writing, size):
        os.set_blocking(writing, is_blocking)  # whoever shares a terminal may have set it
        with serving(writing) as (process, address):
            assert address, "it waited for its log"
            os.close(writing)
            assert os.read(reading, size) == b"." * size
            process.send_signal(signal.SIGTERM)
            with open(reading, closefd=False) as log:
                lines = log.read().splitlines()
            assert process.wait(START_S) == 0
    told = [line.split("server: ")[-1] for line in lines if "serving.server: " in line]
    assert told[0].startswith("ready: 1 expert at ")
    assert told[1:] == ["draining: at most 30 s", "stopped"]


def test_lines_that_find_no_room_are_counted() -> None:
    command = (
        "import logging, os, sys; from experts_server.command import logs; logs.MAX_WAITING = 2;"
        "logs.start_logging('info', as_json=False); log = logging.getLogger('a');"
        "[log.info('%d', n) for n in range(10)]; print(flush=True); sys.stdin.readline(); logging.shutdown();"
        "log.info('on'); logging.shutdown()"
    )
    with (
        full_pipe() as (reading, writing, size),
        subprocess.Popen(
            [sys.executable, "-c", command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=writing,
            cwd=ROOT,
        ) as process,
    ):
        os.close(writing)
        assert process.stdout is not None
        assert process.stdout.readline() == b"\n"
        assert os.read(reading, size) == b"." * size
        process.communicate(b"\n", timeout=START_S)
        with open(reading, closefd=False) as log:
            lines = [line.split("INFO ")[-1].split("ERROR ")[-1] for line in log.read().splitlines()]
    numbers = [line for line in lines if line.startswith("a: ")]
    assert numbers[:2] == ["a: 0", "a: 1"]
    assert numbers[-1] == "a: on"
    num_lost = 10 - len(numbers) + 1
    assert f"experts_server.command.logs: {num_lost} lines found no room: nobody read the log" in lines


def test_what_was_logged_before_a_crash_is_in_the_log() -> None:
    command = (
        "import logging, os; from experts_server.command import logs; logs.start_logging('info', as_json=False);"
        "log = logging.getLogger('a'); [log.info('%d', n) for n in range(10)]; os._exit(3)"
    )
    done = run_python(command)
    assert done.returncode == 3
    assert [line.split("a: ")[-1] for line in done.stderr.splitlines()] == [str(n) for n in range(10)]


def test_a_handler_of_an_experts_file_that_cannot_be_flushed_does_not_hinder_the_end(tmp_path) -> None:
    (tmp_path / "own_log.py").write_text(
        "import logging, os, torch\n"
        "with open(os.devnull, 'w') as stream:\n"
        "    handler = logging.StreamHandler(stream)\n"
        "handler.setLevel(logging.CRITICAL)\n"
        "logging.getLogger().addHandler(handler)\n"
        "Expert = torch.nn.Identity\n"
    )
    with ServerProcess("--expert", "own_log:Expert", path=tmp_path) as server:
        assert server.stop() == 0
