"""A server's life: starting, ready, draining, stopped. One process, one event loop, and threads for the experts.

    start()   hosts what it was given, opens the port           starting -> ready
    stop()    refuses new calls, finishes those in flight,
              saves, closes                                     ready -> draining -> stopped

`ExpertServer` is this life on an event loop; `embedded.ExpertsServer` is the same behind a `with` statement.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Literal

import grpc
from torch import nn

from experts_server.budget import Budget
from experts_server.checkpoints.saving import Saver
from experts_server.configuration.config import MemoryConfig, ServingConfig
from experts_server.configuration.names import counted
from experts_server.hosting.calls import InspectCall
from experts_server.hosting.failing import FailureLog
from experts_server.hosting.gathered import GatheredGradients
from experts_server.hosting.hosted import HostedExpert, SharedMemory
from experts_server.hosting.kept import KeptForwards
from experts_server.hosting.offloading import OffloadMemory
from experts_server.hosting.sharing import check_shared
from experts_server.hosting.training import Training
from experts_server.queues.batching import ExpertQueue, QueueLimits
from experts_server.queues.executor import WorkerPool
from experts_server.queues.outlasting import check_at_rest
from experts_server.queues.registry import Registry
from experts_server.serving.doorway import Doorway
from experts_server.serving.health import MAX_STREAMS, Health
from experts_server.serving.metrics import MetricsEndpoint, ServerCollector
from experts_server.serving.open_inference import OpenInference
from experts_server.serving.ports import open_port
from experts_server.serving.security import Gate
from experts_server.serving.service import Service
from moe_autograd._intraop import set_team_size
from moe_autograd.errors import CheckpointError
from moe_autograd.wire.addresses import split_address
from moe_autograd.wire.options import SERVER_OPTIONS

logger = logging.getLogger(__name__)

State = Literal["starting", "ready", "draining", "stopped"]
UPKEEP_S = 1.0
CLOSE_S = 0.5  # for calls that are just being turned away


@dataclasses.dataclass(frozen=True)
class Hosting:
    """One expert: a module, how it is trained (`None`: it is not), and how it is called (see `HostedExpert`)."""

    module: nn.Module
    training: Training | None
    saving: MemoryConfig
    can_join: bool = True
    eval_only: bool = False


class ExpertServer:
    """A server on the running event loop.

    Args:
        experts: what to host, by name.
        config: how to serve.
        opened: a context to run users' code in, for whoever holds Ctrl-C back meanwhile (`_interrupts`).

    Raises:
        ConfigError: two experts share a weight or a module, and one is trained, or a call of a server that has stopped
            still computes in one; from `start`, if the address cannot be used.
    """

    def __init__(
        self,
        experts: Mapping[str, Hosting],
        config: ServingConfig,
        opened: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        limits = config.limits
        self.config = config
        self.state: State = "starting"
        self.address = config.listen
        self.memory = _memory_for_all(config)
        self.queue_limits = _queue_limits(config)
        self.failures = FailureLog()
        with contextlib.ExitStack() as if_refused:
            if_refused.callback(self._close_memory)
            self.pool = WorkerPool(max_threads=limits.max_threads)
            if_refused.callback(self.pool.close, 0)
            with opened():
                modules = {name: hosting.module for name, hosting in experts.items()}
                check_shared(modules, [name for name, hosting in experts.items() if hosting.training])
                check_at_rest(modules)
                queues = [self._queue_of(name, hosting) for name, hosting in experts.items()]
            self.registry = Registry(queues, self.pool, self.queue_limits)
            self.saver = Saver(self.registry, config)
            if_refused.callback(self.saver.close)
            self.doorway = Doorway(limits.max_concurrent_passes, Gate(config.security.tokens_file))
            with opened():
                self.service = Service(self.registry, self.doorway, self.saver.save, config)
            if_refused.pop_all()
        self.health = Health(self.registry)
        self.open_inference = OpenInference(
            self.registry, self.doorway, lambda: self.state == "ready", limits.max_tensor_bytes
        )
        self.metrics: MetricsEndpoint | None = None
        self._is_stopping, self._has_stopped = asyncio.Event(), asyncio.Event()
        self._why_unsaved: str | None = None  # once it has stopped, if the last save failed
        self._loop: asyncio.AbstractEventLoop | None = None
        self._grpc: grpc.aio.Server | None = None
        self._upkeep: asyncio.Future[list[None]] | None = None
        self._forgetting: set[str] = set()  # experts that were told to forget what is stale, and have not yet

    def _queue_of(self, name: str, hosting: Hosting) -> ExpertQueue:
        hosted = HostedExpert(
            name,
            hosting.module,
            hosting.training,
            self.memory,
            can_join=hosting.can_join,
            eval_only=hosting.eval_only,
            saving=hosting.saving,
            failures=self.failures,
        )
        return ExpertQueue(hosted, self.pool, self.queue_limits, call_later=self._call_later)

    def __repr__(self) -> str:
        return f"<ExpertServer {self.state} at {self.address}, {len(self.registry)} experts>"

    def load(self) -> None:
        """Load the newest checkpoint, if it is not loaded yet; may take long, and does not yield to the loop.

        Raises:
            CheckpointError: see `start`.
        """
        self.saver.open()

    async def start(self) -> None:
        """Load the newest checkpoint, open the port and serve; `address` is the real one afterwards.

        Raises:
            ConfigError: the address cannot be used.
            CheckpointError: the checkpoint is damaged beyond falling back, or does not fit.
        """
        self._loop = asyncio.get_running_loop()
        try:
            self.load()
            await self.saver.start()
            await self._open()
        except BaseException:
            try:
                if self._grpc is not None:
                    await self._grpc.stop(None)  # which fails if its own start was cancelled
            finally:
                self.close()
            raise

    def close(self) -> None:
        """Let go of what a server has; it serves no more, or never did."""
        self.registry.close()
        self.pool.close(0)
        if self.metrics is not None:
            self.metrics.close()
        self._grpc = None  # with it ends the thread that grpc.aio polls in, which no forked child has
        self.saver.close()
        self._close_memory()

    async def _open(self) -> None:
        self._grpc = self._with_handlers()
        self.address = open_port(self._grpc, self.config)
        if self.config.metrics_listen is not None:
            host, port = split_address(self.config.metrics_listen)
            self.metrics = MetricsEndpoint(host, port, self._collector())
        await self._grpc.start()
        set_team_size(1)  # small calls are computed on the loop's thread (`Registry`): a team would cost more
        self.health.set_ready()
        tasks = (
            self._let_go_of_what_waits_too_long,
            self._end_silent,
            self.health.look,
            self.saver.save_when_due,
            self._serve_again_if_grpc_fell,
        )
        self._upkeep = asyncio.gather(*map(self._keep_up, tasks))
        self.state = "ready"
        logger.info("ready: %s at %s", counted(len(self.registry)), self.address)

    def _with_handlers(self) -> grpc.aio.Server:
        most = 2 * self.config.limits.max_concurrent_passes + 2 * MAX_STREAMS + 64
        server = grpc.aio.server(options=SERVER_OPTIONS, maximum_concurrent_rpcs=most)
        for handlers in (self.service, self.health, self.open_inference):
            handlers.add_to(server)
        return server

    async def _serve_again_if_grpc_fell(self) -> None:
        """Open the port again where grpc has closed it, as it does at a method's name that is no UTF-8, of anybody."""
        assert self._grpc is not None, "it was ready"
        try:
            await self._grpc.wait_for_termination(0)
        except Exception as error:
            if self.state != "ready":
                return
            logger.warning("grpc has stopped serving, and begins anew: %r", error)
            error.with_traceback(None)  # which has the one that fell, and this one has the error
            await self._grpc.stop(None)  # its end may still be on its way
            server = self._with_handlers()
            open_port(server, self.config.model_copy(update={"listen": self.address}))
            await server.start()
            self._grpc = server
            if self._is_stopping.is_set():  # meanwhile
                await server.stop(None)

    async def stop(self) -> None:
        """Refuse new calls, wait for those in flight (at most `drain_timeout_s`), save, and close.

        Cancelled, it closes without the rest; of a save that is being written it waits for the end.
        Beside another one it waits for that one's end, and raises what that one raised.

        Raises:
            CheckpointError: the last save failed; it has stopped all the same.
        """
        if self.state == "draining":
            await self._has_stopped.wait()
            if self._why_unsaved is not None:
                raise CheckpointError(self._why_unsaved)
            return
        if self.state in ("starting", "stopped"):
            if self._loop is None:  # nor was it started
                self.close()
            return
        self.state = "draining"
        try:
            await self._drain_and_save()
        except CheckpointError as error:
            self._why_unsaved = str(error)
            raise
        finally:
            try:
                await self._end_serving(None)
                await self.service.loads.give_up()
                self.registry.close()
                if not await self.saver.in_thread(self.pool.close, 1.0):
                    logger.warning("stopped while an expert still hangs: %s", self.pool)
            finally:
                self._has_stopped.set()  # to be seen after this step of the loop
                self.close()
                self.state = "stopped"
                logger.info("stopped")

    async def _drain_and_save(self) -> None:
        timeout_s = self.config.drain_timeout_s
        until = time.monotonic() + timeout_s
        logger.info("draining: at most %g s", timeout_s)
        self.health.set_draining()
        if not await self.doorway.close(timeout_s):
            logger.warning("cutting off what was still in flight after %g s", timeout_s)
        await self._end_serving(CLOSE_S)
        is_computing = any(queue.computing_since is not None for queue in self.registry.values())
        await self.saver.save_last(until - time.monotonic() if is_computing else None)

    async def _end_serving(self, grace_s: float | None) -> None:
        assert self._grpc is not None
        assert self._upkeep is not None, "it was ready"
        await self._grpc.stop(grace_s)
        self._is_stopping.set()
        self.saver.leave_to_last()
        await asyncio.wait([self._upkeep])

    def _close_memory(self) -> None:
        if self.memory.offload is not None:
            self.memory.offload.close()

    async def _keep_up(self, task: Callable[[], Awaitable[None]]) -> None:
        """Do it from time to time; each by itself, since a save waits for experts that may hang."""
        while not self._is_stopping.is_set():
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._is_stopping.wait(), UPKEEP_S)
            try:
                await task()
            except Exception:  # a bug of ours; without upkeep it would be a server that never saves again
                logger.exception("upkeep failed, and goes on")

    async def _end_silent(self) -> None:
        self.doorway.end_silent()
        self.health.end_silent()

    async def _let_go_of_what_waits_too_long(self) -> None:
        self.memory.kept.let_go_expired()
        for queue in self.registry.values():
            if len(queue):
                queue.let_go_of_late()
        is_crowded = self.memory.gathered.reset_refused()
        lost = {
            name: trainer.gathered
            for name, queue in self.registry.items()
            if (trainer := queue.hosted.trainer) and name not in self._forgetting
            if trainer.gathered.stale(is_crowded=is_crowded)
        }
        self._forgetting.update(lost)

        def call(name: str, gathered: GatheredGradients) -> InspectCall:
            return InspectCall(
                b"",
                lambda call, result: self._forgetting.discard(name),
                lambda hosted: gathered.forget_stale(is_crowded=is_crowded),
                expert=name,
            )

        self.registry.submit([call(name, gathered) for name, gathered in lost.items()])

    def _collector(self) -> ServerCollector:
        memory, queues = self.memory, self.queue_limits
        return ServerCollector(
            self.registry,
            {
                "experts_server_ready": ("1 while ready", lambda: self.state == "ready"),
                "experts_server_kept_forward_bytes": (
                    "forwards that wait for their backward",
                    lambda: memory.kept.num_bytes,
                ),
                "experts_server_kept_forwards_let_go_total": (
                    "forwards let go before their backward",
                    lambda: memory.kept.num_let_go,
                ),
                "experts_server_gathered_gradient_bytes": (
                    "gradients that wait for a step",
                    lambda: memory.gathered.in_use,
                ),
                "experts_server_queued_bytes": (
                    "tensors of calls that are not answered yet",
                    lambda: queues.bytes.in_use,
                ),
                "experts_server_seconds_since_save": (
                    "since the last checkpoint, or the start",
                    lambda: self.saver.age_s,
                ),
            },
        )

    def _call_later(self, delay_s: float, function: Callable[[], None]) -> None:
        assert self._loop is not None, "calls come after start"
        self._loop.call_soon_threadsafe(self._loop.call_later, delay_s, function)


def _memory_for_all(config: ServingConfig) -> SharedMemory:
    limits, offload = config.limits, config.offload
    return SharedMemory(
        KeptForwards(limits.kept_forward_bytes, limits.kept_forward_s),
        Budget(limits.gathered_gradient_bytes, "bytes of gathered gradients", retry_after_s=UPKEEP_S),
        Budget(limits.ledger_reply_bytes, "bytes of kept answers"),
        limits.max_clients,
        limits.gathered_gradient_s,
        None if offload is None else OffloadMemory(offload.max_resident_bytes, offload.store),
    )


def _queue_limits(config: ServingConfig) -> QueueLimits:
    return QueueLimits(
        Budget(config.limits.max_queued_calls, "queued calls"),
        Budget(config.limits.max_queued_bytes, "queued bytes"),
        config.batching.max_batch_tokens,
        config.batching.max_wait_ms / 1000,
    )
