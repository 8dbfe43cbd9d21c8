"""`experts-server serve`: one server in the foreground of a process, until a signal."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import resource
import signal
import sys
import threading
from collections.abc import Sequence
from types import FrameType

from experts_server.command.logs import flush_log
from experts_server.configuration.config import ServerConfig
from experts_server.configuration.names import counted
from experts_server.serving.configured import from_config
from experts_server.serving.server import ExpertServer
from moe_autograd.autograd.offload.freed_memory import give_back_freed_memory, limit_heaps
from moe_autograd.errors import CheckpointError

logger = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# Threads share the interpreter lock; a worker in pure Python gives it up to the event loop after so long.
SWITCH_INTERVAL_S = 0.001
# A heap for each thread keeps what is free in it from the others: in 20 minutes of `make soak`, 37 MB and growing.
NUM_HEAPS = 1
LOOK_FOR_MODULES_S = 5.0
REST_S = 10.0  # without a call; then what was freed is given back
MAX_DESCRIPTORS = 1 << 16  # some systems allow a billion, and some programs look at each


def ready_line(num_experts: int, address: str) -> str:
    """Return the line on stdout that says the server serves; its last word is the address."""
    return f"experts-server: serving {counted(num_experts)} at {address}"


async def run(config: ServerConfig) -> int:
    """Serve until the first signal, then drain and stop; return the exit status. A second signal exits at once.

    The status is 0, or 1 if the last save failed.
    """
    numbers = _let_signals_end_it()  # until it serves, and from when it has
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    limit_heaps(NUM_HEAPS)
    _allow_descriptors()
    server = from_config(config)
    server.load()
    stopping = _stop_at(numbers)
    await server.start()
    beside = [
        asyncio.ensure_future(one)
        for one in (_leave_modules_out_of_collections(), give_back_memory_at_rest(server))
    ]
    if config.checkpoint_dir is None and any(queue.hosted.training for queue in server.registry.values()):
        logger.info("no checkpoint_dir: what the experts learn ends with this process")
    _say_ready(server)
    await stopping.wait()
    for one in beside:
        one.cancel()
    status = 0
    try:
        await server.stop()
    except CheckpointError as error:
        logger.error("the last save failed: %s", error)
        status = 1
    finally:
        _take_no_more(numbers)
    if server.pool.has_threads:  # an expert hangs; the interpreter would wait for it, or crash in it
        sys.stdout.flush()
        flush_log()
        os._exit(status)
    return status


def _allow_descriptors() -> None:
    """Allow this process as many descriptors as it may allow itself: most systems begin with 1024.

    Each client has one at least, those that only connect as well, and nobody else could: `limits` has room for more.
    """
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_DESCRIPTORS if most == resource.RLIM_INFINITY else min(most, MAX_DESCRIPTORS)
    if allowed != resource.RLIM_INFINITY and allowed < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def _stop_at(numbers: Sequence[signal.Signals]) -> asyncio.Event:
    """Return what the first signal sets; a second one ends the process at once."""
    stopping, loop = asyncio.Event(), asyncio.get_running_loop()

    def take(number: signal.Signals) -> None:
        # The end of a terminal is told twice, by the system and by its shell: that is no second wish.
        if stopping.is_set() and number is not signal.SIGHUP:
            flush_log()
            os._exit(128 + number)
        stopping.set()

    for number in numbers:
        loop.add_signal_handler(number, take, number)
    return stopping


def _take_no_more(numbers: Sequence[signal.Signals]) -> None:
    """Let signals end the process again; asyncio would leave a Ctrl-C to raise wherever the interpreter then ends."""
    loop = asyncio.get_running_loop()
    for number in numbers:
        loop.remove_signal_handler(number)
    _let_signals_end_it()


def _say_ready(server: ExpertServer) -> None:
    if server.metrics is not None:
        logger.info("metrics at http://%s/metrics", server.metrics.address)
    if sys.stdout is not None:  # it is closed
        line = ready_line(len(server.registry), server.address)
        threading.Thread(target=_write_to_stdout, args=(f"{line}\n".encode(),), daemon=True).start()


def _write_to_stdout(line: bytes) -> None:
    """Write past Python's buffer, which would be locked for ever, on a thread that nobody waits for.

    A pipe that nobody reads may be full, and a terminal suspended: that is no reason not to serve, or not to stop.
    """
    try:
        os.write(sys.stdout.fileno(), line)
    except OSError as error:  # its terminal has just gone; how to stop is a signal's business
        logger.warning("expected somebody to read stdout, got %s", error)


def _let_signals_end_it() -> list[signal.Signals]:
    """Let the signals that stop a server end it at once, until others take them; return which these are.

    asyncio would keep a Ctrl-C for when something is awaited. And the first process of a container gets no signal at
    all that it has no handler for: it would be waited for, in vain, and killed.
    """
    is_first = os.getpid() == 1
    is_nohup = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    numbers = [number for number in SIGNALS if not (is_nohup and number is signal.SIGHUP)]
    for number in numbers:
        signal.signal(number, _end_at_once if is_first else signal.SIG_DFL)
    return numbers


def _end_at_once(number: int, frame: FrameType | None) -> None:
    os._exit(128 + number)


async def _leave_modules_out_of_collections() -> None:
    """Freeze what modules have brought, now and whenever some were loaded late.

    Whole collections come when a quarter of all objects is new. Beside torch's that takes hundreds of thousands, and
    the errors of damaged streams, each a cycle with its traceback, pile up. (The first step of any of torch's
    optimizers loads 800 modules more: torch._dynamo, SymPy.)
    """
    num_modules = 0
    try:
        while True:
            if len(sys.modules) > num_modules:
                num_modules = len(sys.modules)
                gc.collect()
                gc.freeze()
                gc.collect()  # counts what is left
            await asyncio.sleep(LOOK_FOR_MODULES_S)
    finally:
        if "triton" in sys.modules:  # torch 2.15's writes on stderr what of it is left at exit
            gc.unfreeze()  # only then: Python looks through all of it again, for a second


async def give_back_memory_at_rest(server: ExpertServer) -> None:
    """Give what was freed back to the system, once after each time of work; does not return.

    The C library keeps it for the next calls: after a flood of them gigabytes, of which nothing was held.
    """
    before = given_back = now = _work_of(server)
    while True:
        await asyncio.sleep(REST_S)
        before, now = now, _work_of(server)
        if now == before != given_back and server.doorway.num_inside == 0:
            given_back = now
            await asyncio.to_thread(give_back_freed_memory)


def _work_of(server: ExpertServer) -> tuple[int, int, int]:
    """Return what changes as long as a server works, or lets go of what clients have left."""
    return server.doorway.num_entered, server.memory.kept.num_bytes, server.memory.gathered.in_use
