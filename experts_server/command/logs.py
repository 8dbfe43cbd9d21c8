"""The server's log: one line an event, for people or for programs, on stderr. It holds no token and no tensor.

A thread of its own writes it. A pager that is suspended, a terminal after Ctrl-S and a disk that hangs take no line for
as long as they like, and whoever logs would wait for them: the event loop, and so all clients. Others take a line at
once, and are waited for: what was logged before a crash tells of it.

gRPC's core writes to stderr as well, past this, on the threads by which it serves: a line for each TLS handshake that
fails, of anybody who can connect, or to which a command has connected, beside the error that says so. So it is told to
be silent, unless `GRPC_VERBOSITY` says otherwise.
"""

from __future__ import annotations

import importlib
import json
import logging
import os
import queue
import select
import sys
import threading
from datetime import UTC, datetime
from typing import Any

logger = logging.getLogger(__name__)

MAX_WAITING = 10_000  # lines
PATIENCE_S = 0.05
FLUSH_S = 2.0
STDERR = 2
_GRPC_VERBOSITY = "GRPC_VERBOSITY"


class JsonFormatter(logging.Formatter):
    """Writes an event as one JSON object on one line."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        event = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            event["exception"] = self.formatException(record.exc_info)
        return json.dumps(event)


class LineWriter(logging.Handler):
    """Writes lines in their order, and lets nobody wait for long.

    Who logs waits until his line is out. Once one has taken too long nobody does, until all of them are out.

    It writes past `sys.stderr`: that has a lock, which a thread that waits for a reader would hold while Python ends.

    Args:
        descriptor: where to.

    Threads: any. In a forked child, which has no such thread, lines are written at once.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._process = os.getpid()
        # not `queue.Queue`: a warning of an object that is collected may come within `put`
        self._waiting: queue.SimpleQueue[str | threading.Event] = queue.SimpleQueue()
        self._num_lost = 0
        self._is_behind = False
        threading.Thread(target=self._write_all, name="experts-server-log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        """Have a line written; where too many wait, it is lost, and counted."""
        try:
            line = f"{self.format(record)}\n"
        except Exception:
            self.handleError(record)
            return
        if os.getpid() != self._process:
            self._write(line)
        elif self._waiting.qsize() < MAX_WAITING:
            self._waiting.put(line)
            if not self._is_behind:
                self._is_behind = not self._are_out_in(PATIENCE_S)
        else:
            self._num_lost += 1

    def flush(self) -> None:
        """Wait until all lines so far are written, or nobody has read any for so long."""
        if os.getpid() == self._process:
            self._are_out_in(FLUSH_S)

    def _are_out_in(self, patience_s: float) -> bool:
        is_written = threading.Event()
        self._waiting.put(is_written)
        return is_written.wait(patience_s)

    def _write_all(self) -> None:
        while True:
            next_one = self._waiting.get()
            if isinstance(next_one, str):
                self._write(next_one)
            if self._waiting.empty():
                self._is_behind = False
                self._tell_of_lost()
            if isinstance(next_one, threading.Event):
                next_one.set()

    def _tell_of_lost(self) -> None:
        num_lost, self._num_lost = self._num_lost, 0
        if num_lost:  # past `logger`, whose lock may be held by who waits for this thread
            told = f"{num_lost} lines found no room: nobody read the log"
            record = logger.makeRecord(logger.name, logging.ERROR, __file__, 0, told, (), None)
            self._write(f"{self.format(record)}\n")

    def _write(self, line: str) -> None:
        rest = line.encode(errors="backslashreplace")
        while rest:
            try:
                rest = rest[os.write(self._descriptor, rest) :]
            except BlockingIOError:
                select.select([], [self._descriptor], [])
            except OSError:  # the reader has gone, or the disk is full, and there is nowhere to say so
                return


def start_logging(level: str, *, as_json: bool) -> None:
    """Send the log of this process to stderr, and warnings with it."""
    if sys.stderr is None:  # closed, and its number may be another file's
        handler: logging.Handler = logging.NullHandler()
    else:
        handler = LineWriter(STDERR)
    text = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(JsonFormatter() if as_json else text)
    logging.basicConfig(level=level.upper(), handlers=[handler])
    logging.captureWarnings(True)


def silence_grpc() -> None:
    """Let gRPC's core write nothing, unless the environment says otherwise."""
    os.environ.setdefault(_GRPC_VERBOSITY, "NONE")
    core: Any = importlib.import_module("grpc._cython.cygrpc")
    read_again = getattr(core, "reset_grpc_config_vars", None)
    if read_again is not None:  # gRPC read it when it was imported
        read_again()


def flush_log() -> None:
    """Let what has been logged come out before what follows: the end of the process, or what is said of it."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, LineWriter):  # others are of an expert's file, and may raise, or wait
            handler.flush()
