"""Python processes that need not import torch: forked from one that has. Three seconds, a hundred times, are minutes.

A warm process is one of its own in all that most tests are about: pid, main thread, signals, files, and an end that is
Python's. It runs a program as `__main__`, as `python -c` does. What is not its own is what importing leaves: modules,
memory, and environment variables that are read once. A test of the command line, of the environment, of memory, or of
what is imported, starts Python itself.

The process that forks has no threads of Python's and no gRPC. It is started with the first warm one, and ends with us::

    we       what to run, and the files that are to be 0, 1 and 2   ───▶  the one that forks  ───▶  a warm process
             pid, and in the end its status, by a pipe for each     ◀───
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
# What `python -m experts_server` runs.
COMMAND = "from experts_server.command.cli import main; main()"
IMPORTED = ("moe_autograd.remote", "experts_server.command.cli", "tests.support.functions_waiting")
_NUM_BYTES = 8


class WarmProcess:
    """A process that runs a program in our folder, with our environment; its names are those of `subprocess.Popen`.

    Args:
        program: the source of its `__main__`.
        arguments: of `sys.argv`, without the first.
        stdout: a file to write to.
        stderr: likewise.
        stdin: a file to read from; `None`: an empty one.
        raises_warnings: as with `-W error`.
    """

    def __init__(
        self,
        program: str,
        *arguments: str,
        stdout: int,
        stderr: int,
        stdin: int | None = None,
        raises_warnings: bool = False,
    ) -> None:
        self.returncode: int | None = None
        self._told, tells = os.pipe()
        with open(os.devnull) as nothing:
            what = json.dumps([os.getcwd(), dict(os.environ), program, arguments, raises_warnings]).encode()
            files = [nothing.fileno() if stdin is None else stdin, stdout, stderr, tells]
            socket.send_fds(_forking(), [what], files)
        os.close(tells)
        self.pid = _number_from(self._told)

    def __del__(self) -> None:
        os.close(self._told)

    def poll(self) -> int | None:
        """Return its exit status (negative: the signal that killed it); `None` while it runs."""
        if self.returncode is None and select.select([self._told], [], [], 0)[0]:
            self.returncode = _number_from(self._told)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; return its exit status.

        Raises:
            TimeoutError: it has not ended after so many seconds.
        """
        if self.poll() is None:
            select.select([self._told], [], [], timeout)
        if self.poll() is None:
            raise TimeoutError(f"process {self.pid}: expected its end within {timeout} s, got none.")
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: signal.Signals) -> None:
        """Send it a signal, if it has not ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended, and its status is about to be told
                os.kill(self.pid, number)

    def kill(self) -> None:
        """Kill it as a power cut would."""
        self.send_signal(signal.SIGKILL)


@functools.cache
def _forking() -> socket.socket:
    """Start the process that forks; return the socket where it is told what to run."""
    ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with its:
        program = f"from tests.support import warm; exec(warm.what_to_run({its.fileno()}))"
        command = [sys.executable, "-X", "faulthandler", "-c", program]
        # Buffered, as by default.
        buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=buffered,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # in a terminal each line would be flushed
            pass_fds=[its.fileno()],
        )
    atexit.register(process.wait)
    atexit.register(ours.close)  # before that
    return ours


def _number_from(pipe: int) -> int:
    told = os.read(pipe, _NUM_BYTES)
    if not told:
        raise EOFError(
            "warm process: expected its pid or status, got the end of what forks it. Its stderr says why, "
            "unless it was killed."
        )
    return int.from_bytes(told, sys.byteorder, signed=True)


# ---- in the process that forks


def what_to_run(told: int) -> str:
    """Fork when told to; return in each child, with its program, and with an empty one when nobody is there."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # of Ctrl-C in a terminal, whoever started us will tell
    for name in IMPORTED:
        importlib.import_module(name)
    torch = importlib.import_module("torch")  # which imports another second's worth at the first step
    torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0).step()
    if "triton" not in sys.modules:  # of which beside torch 2.15 stderr is told what is left
        gc.collect()
        gc.freeze()  # the modules are not searched for garbage: at each end of a process, that takes a second
    running: dict[int, tuple[int, int]] = {}  # pid and pipe, by the descriptor that tells of the end
    with socket.socket(fileno=told) as work:
        while True:
            ready, _, _ = select.select([work, *running], [], [])
            for ended in running.keys() & set(ready):
                _tell_end(ended, *running.pop(ended))
            if work in ready:
                what, files, _, _ = socket.recv_fds(work, 1 << 20, 4)
                if not what:
                    return ""
                pid = os.fork()
                if pid == 0:
                    for pidfd, (_, pipe) in running.items():
                        os.close(pidfd)
                        os.close(pipe)
                    break
                *others, pipe = files
                for file in others:
                    os.close(file)
                _tell(pipe, pid)
                running[os.pidfd_open(pid)] = pid, pipe
    return _became(files, *json.loads(what))


def _became(
    files: list[int],
    folder: str,
    environment: dict[str, str],
    program: str,
    arguments: list[str],
    raises_warnings: bool,
) -> str:
    """Make this process the one that was asked for; return its program."""
    for number, file in enumerate(files):
        if number < 3:
            os.dup2(file, number)
        os.close(file)
    _open_anew("stdout", 1, buffering=-1)
    _open_anew("stderr", 2, buffering=1)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.argv[1:] = arguments
    if raises_warnings:
        warnings.simplefilter("error")
        sys.warnoptions.append("error")  # processes that it starts are started likewise
    return program


def _open_anew(name: str, number: int, buffering: int) -> None:
    """Let Python see what kind of file its stream is now: that of the process that forks was another one."""
    before = getattr(sys, name)
    now = open(number, "w", buffering, before.encoding, before.errors, closefd=False)  # noqa: SIM115
    setattr(sys, name, now)
    setattr(sys, f"__{name}__", now)


def _tell(pipe: int, number: int) -> None:
    os.write(pipe, number.to_bytes(_NUM_BYTES, sys.byteorder, signed=True))


def _tell_end(pidfd: int, pid: int, pipe: int) -> None:
    _, status = os.waitpid(pid, 0)
    _tell(pipe, os.waitstatus_to_exitcode(status))
    os.close(pidfd)
    os.close(pipe)
