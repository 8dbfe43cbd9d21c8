"""Worker threads that take turns: a long turn holds up no short one, and one that hangs holds up nobody.

What is guaranteed:

1. A turn runs on exactly one worker, once for each time it was put in, and turns of one lane begin in order.
2. Turns have three lanes, by their own `expected_s`, so that a longer turn never holds up a shorter one. *Short* ones
   (up to `SHORT_S`) share one worker: to hand 20 us of Python to a second thread costs more than it saves. Of
   *middling* ones (up to `MIDDLING_S`) and of *long* ones at most `num_computing` compute at once.
3. A turn that waits instead of computing (its thread uses no processor time for `STALL_S`) stops counting, so
   it costs a thread and nothing else, up to `max_threads` of them. A turn that was thought shorter and lasts
   counts as long from then on.
4. A worker that nobody needs for `IDLE_S` ends; one always stays.
5. Where the system has no thread to give, turns wait for the workers that there are, or for it to have one again.

Knows nothing of experts, tensors or grpc. One lock guards all state; turns run without it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVarTuple

from moe_autograd._intraop import num_cores, set_team_size

logger = logging.getLogger(__name__)

SHORT_S = 0.0003
MIDDLING_S = 0.002
STALL_S = 0.01
WAITING_SHARE = 0.02  # a turn that uses less than this share of one core waits
LATE_S = 0.005  # a watcher so late fights for a core or the interpreter, and so may the turns
SURELY_S = 1.0  # a turn that has lasted so long is judged by a late watcher, too
IDLE_S = 10.0  # a worker that nobody needs for so long ends, if it is not the last one
DOZE_S = 0.1  # the watcher goes on looking for so long, so that the next turns need not wake it


Args = TypeVarTuple("Args")


class Turn(Protocol):
    """Something that a worker can do; it reports its own failures."""

    @property
    def expected_s(self) -> float:
        """How long it may take."""

    def run(self) -> None:
        """Do it."""


def take(run: Callable[[*Args], None], *args: *Args) -> None:
    """Take a turn; never raises."""
    try:
        run(*args)
    except BaseException:  # a turn reports its own failures: this is a bug of ours
        logger.critical("a turn raised", exc_info=True)


def _lane_of(turn: Turn) -> str:
    if turn.expected_s < SHORT_S:
        return "short"
    return "middling" if turn.expected_s < MIDDLING_S else "long"


class _Worker(threading.Thread):
    """A thread and what it does; `lane` is `None` while it is idle, and then it sleeps on `bell`, which is held."""

    def __init__(self, pool: WorkerPool, index: int) -> None:
        super().__init__(name=f"expert-worker-{index}", daemon=True)
        self.pool = pool
        self.lane: str | None = None
        self.turn: Turn | None = None
        self.since = 0.0  # when the turn began
        self.is_waiting = False
        self.team_size = 0
        self.cpu_clock = 0
        self.cpu_s = 0.0  # when last looked at
        self.bell = threading.Lock()
        self.bell.acquire()

    def run(self) -> None:
        self.cpu_clock = time.pthread_getcpuclockid(threading.get_ident())
        self.pool._work(self)


def turns_of_closed_pools() -> list[Turn]:
    """Return the turns that are still under way in pools of this process that were closed: they hang, or take long."""
    workers = [thread for thread in threading.enumerate() if isinstance(thread, _Worker)]
    turns = [worker.turn for worker in workers if worker.pool.is_closed]
    return [turn for turn in turns if turn is not None]


class WorkerPool:
    """Threads for the turns of experts.

    Args:
        num_computing: how many long turns may compute at once; by default the number of cores.
        max_threads: the most threads that waiting turns can use up.

    Threads: `put` may be called from any thread and never blocks.
    """

    def __init__(self, num_computing: int | None = None, max_threads: int = 64) -> None:
        self.num_computing = num_computing or num_cores()
        self.max_threads = max(max_threads, self.num_computing + 1)
        self._lock = threading.Lock()
        self._needs_watching = threading.Condition(self._lock)
        self._lanes: dict[str, deque[Turn]] = {"short": deque(), "middling": deque(), "long": deque()}
        self._limits = {"short": 1, "middling": self.num_computing, "long": self.num_computing}
        self._workers: list[_Worker] = []
        self._idle: list[_Worker] = []  # the last to rest is the first to be woken: its caches are warm
        self._num_woken = 0  # workers that were woken or started and have not looked yet
        self._num_started = 0
        self._lacks_threads = False
        self._is_closed = False
        self._is_watching = False
        self._watcher = threading.Thread(target=self._watch, name="expert-watcher", daemon=True)
        self._watcher.start()
        with self._lock:
            self._try_start_worker()

    def __repr__(self) -> str:
        with self._lock:
            queued = {lane: len(turns) for lane, turns in self._lanes.items()}
            return f"<WorkerPool queued={queued} busy={len(self._workers) - len(self._idle)} idle={len(self._idle)}>"

    def put(self, turns: Sequence[Turn]) -> None:
        """Let workers run `turns`, each once."""
        with self._lock:
            if self._is_closed:
                raise RuntimeError(
                    "worker pool: expected an open one, got a closed one. Start another server."
                )
            for turn in turns:
                self._lanes[_lane_of(turn)].append(turn)
            self._call_workers()
            if not self._is_watching:
                self._is_watching = True
                self._needs_watching.notify()

    def close(self, timeout_s: float) -> bool:
        """Run what is left, then stop; return whether all workers came to an end within `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        with self._lock:
            self._is_closed = True
            while self._idle:
                self._wake_one()
            self._needs_watching.notify_all()
            workers = list(self._workers)
        for thread in [*workers, self._watcher]:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for thread in workers)

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._is_closed

    @property
    def has_threads(self) -> bool:
        """Whether any worker is alive; after `close`, one whose turn hangs."""
        with self._lock:
            return bool(self._workers)

    # ---- what follows runs with the lock held, except the turns themselves

    def _num_in(self, lane: str) -> int:
        num = 0
        for worker in self._workers:
            num += worker.lane == lane and not worker.is_waiting
        return num

    def _call_workers(self) -> None:
        """Wake or start workers until each lane has as many as it may and can use."""
        num_wanted = 0
        for lane, turns in self._lanes.items():
            if turns:
                # More long ones may compute than their lane takes: some came through another one.
                num_wanted += min(len(turns), max(0, self._limits[lane] - self._num_in(lane)))
        for _ in range(num_wanted - self._num_woken):
            if self._idle:
                self._wake_one()
            elif len(self._workers) >= self.max_threads or not self._try_start_worker():
                return

    def _wake_one(self) -> None:
        self._num_woken += 1
        self._idle.pop().bell.release()

    def _try_start_worker(self) -> bool:
        worker = _Worker(self, self._num_started + 1)
        try:
            worker.start()
        except RuntimeError as error:  # the watcher tries again
            if not self._lacks_threads:
                logger.error(
                    "workers: expected another thread, got %r. Calls wait; raise the limit of threads.", error
                )
            self._lacks_threads = True
            return False
        self._lacks_threads = False
        self._num_woken += 1
        self._num_started += 1
        self._workers.append(worker)
        return True

    def _work(self, worker: _Worker) -> None:
        with self._lock:
            self._num_woken -= 1
            while (turn := self._next_turn(worker)) is not None:
                worker.turn = turn
                team_size = self._team_size(worker)
                self._lock.release()
                try:
                    if team_size != worker.team_size:
                        set_team_size(team_size)
                        worker.team_size = team_size
                    take(turn.run)
                finally:
                    turn = worker.turn = None  # an idle worker holds no tensor
                    self._lock.acquire()
            self._workers.remove(worker)

    def _next_turn(self, worker: _Worker) -> Turn | None:
        """Wait for a turn that this worker may take; `None`: it shall end."""
        if worker.lane == "short" and (short := self._lanes["short"]):  # it keeps its place
            worker.since = time.monotonic()
            return short.popleft()
        worker.lane, worker.is_waiting = None, False
        while True:
            for lane, turns in self._lanes.items():
                if turns and (self._is_closed or self._num_in(lane) < self._limits[lane]):
                    worker.lane, worker.since, worker.cpu_s = lane, time.monotonic(), -1.0
                    return turns.popleft()
            if self._is_closed:
                return None
            self._idle.append(worker)
            self._lock.release()
            try:
                is_rung = worker.bell.acquire(timeout=IDLE_S)
            finally:
                self._lock.acquire()
            if not is_rung:
                if worker in self._idle:
                    self._idle.remove(worker)
                    if len(self._workers) == 1:
                        continue
                    return None
                worker.bell.acquire()  # it was rung just then
            self._num_woken -= 1

    def _team_size(self, worker: _Worker) -> int:
        """All cores for a turn that is alone, one each for those side by side."""
        if worker.lane != "long":
            return 1
        return max(1, self.num_computing // (self._num_in("long") + len(self._lanes["long"]) or 1))

    def _watch(self) -> None:
        """Look at turns that last long, for as long as others wait for a worker."""
        dozes_until = 0.0
        with self._lock:
            while not self._is_closed:
                begun = time.monotonic()
                if any(self._lanes.values()):
                    dozes_until = begun + DOZE_S
                self._is_watching = begun < dozes_until
                self._needs_watching.wait(STALL_S if self._is_watching else None)
                if any(self._lanes.values()):
                    is_late = time.monotonic() - begun > STALL_S + LATE_S
                    for worker in self._workers:
                        self._look_at(worker, is_late)
                    self._call_workers()

    def _look_at(self, worker: _Worker, is_late: bool) -> None:
        """Note whether the turn of `worker` is a long one, and whether it computes or waits."""
        elapsed_s = time.monotonic() - worker.since
        if worker.lane is None or elapsed_s < STALL_S:
            return
        worker.lane = "long"
        cpu_s = time.clock_gettime(worker.cpu_clock)
        if worker.cpu_s >= 0 and (elapsed_s > SURELY_S or not is_late):
            worker.is_waiting = cpu_s - worker.cpu_s < WAITING_SHARE * STALL_S
        worker.cpu_s = cpu_s
