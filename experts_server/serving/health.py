"""Health (grpc.health.v1) of the server and of each expert, and reflection, so that grpcurl works.

The service name of an expert's health is its name; `""` is the whole server. An expert is NOT_SERVING while one
of its calls has been computing for more than `STUCK_S`: others go on, but a call to it would only wait.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from typing import Any

import grpc
from google.protobuf import descriptor_pool
from grpc_health.v1 import health, health_pb2
from grpc_reflection.v1alpha import reflection
from grpc_reflection.v1alpha.reflection_pb2_grpc import add_ServerReflectionServicer_to_server

from experts_server.queues.registry import Registry
from experts_server.serving import open_inference
from experts_server.serving.doorway import Context, Doorway, Passing, only_message
from moe_autograd.wire import methods
from moe_autograd.wire.framing import parse

STUCK_S = 10.0
# Of both, and as many checks; nobody is asked who he is, so they must not use up what the other RPCs live on.
MAX_STREAMS = 1024

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class Health:
    """The health service of one server.

    Not grpc's own, which writes to a watcher under the lock that every change takes: who does not read would hold up a
    stop.

    Threads: the event loop's.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        # those who only watch are to keep no probe out
        self._doorway, self._doorway_of_checks = Doorway(MAX_STREAMS), Doorway(MAX_STREAMS)
        self._services: frozenset[str] = frozenset()  # none is known before the server is ready
        self._stuck: set[str] = set()
        self._is_draining = False
        self._changed = asyncio.Event()  # another one after each change

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register health and reflection."""
        handlers = {
            "Check": grpc.stream_unary_rpc_method_handler(self._check),
            "Watch": grpc.stream_stream_rpc_method_handler(self._watch),
        }
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(health.SERVICE_NAME, handlers),)
        )
        names = (methods.SERVICE, open_inference.SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        add_ServerReflectionServicer_to_server(_ReflectionServicer(self._doorway, names), server)

    def set_ready(self) -> None:
        """Report everything as serving."""
        self._services = frozenset(["", methods.SERVICE, open_inference.SERVICE, *self._registry])
        self._wake_watchers()

    def set_draining(self) -> None:
        """Report everything as not serving, from now on for good."""
        self._is_draining = True
        self._wake_watchers()

    def end_silent(self) -> None:
        """End the RPCs whose clients have kept them waiting for too long; called from time to time."""
        for doorway in (self._doorway, self._doorway_of_checks):
            doorway.end_silent()

    async def look(self) -> None:
        """Report experts that got stuck, and those that came back; called from time to time."""
        stuck_before = time.monotonic() - STUCK_S
        stuck = {
            name
            for name, queue in self._registry.items()
            if (began := queue.computing_since) is not None and began < stuck_before
        }
        if stuck != self._stuck:
            self._stuck = stuck
            self._wake_watchers()

    def _wake_watchers(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _status_of(self, service: str) -> Any:
        if service not in self._services:
            return UNKNOWN
        return NOT_SERVING if self._is_draining or service in self._stuck else SERVING

    async def _check(self, _: Any, context: Context) -> bytes:
        async with self._doorway_of_checks.passing(context, "read") as rpc:
            status = self._status_of(await _service_in(rpc))
            if status == UNKNOWN:
                await rpc.abort(grpc.StatusCode.NOT_FOUND)
            return _answer(status)

    async def _watch(self, _: Any, context: Context) -> None:
        last = None
        async with self._doorway.passing(context, "read") as rpc:
            service = await _service_in(rpc)
            while True:
                changed = self._changed
                status = self._status_of(service)
                if status == last:
                    await changed.wait()
                    continue
                await rpc.write(_answer(status))
                last = status


async def _service_in(rpc: Passing) -> str:
    """Return the service that is asked for."""
    return str(parse(health_pb2.HealthCheckRequest, await only_message(rpc)).service)


def _answer(status: Any) -> bytes:
    return bytes(health_pb2.HealthCheckResponse(status=status).SerializeToString())


class _ReflectionServicer(reflection.aio.ReflectionServicer):  # type: ignore[name-defined,misc]  # the stub lacks `aio`
    def __init__(self, doorway: Doorway, names: Sequence[str]) -> None:
        super().__init__(names, pool=_Pools())
        self._doorway = doorway

    async def ServerReflectionInfo(self, requests: Any, context: Any) -> AsyncIterator[Any]:
        async with self._doorway.passing(context, "read") as rpc:
            async for answer in super().ServerReflectionInfo(rpc.read_all(requests), context):
                yield answer


class _Pools:
    """The descriptors of all services, for reflection: those of this process, and those of `open_inference`'s own."""

    def __getattr__(self, find: str) -> Any:
        first, second = getattr(descriptor_pool.Default(), find), getattr(open_inference.POOL, find)

        def either(*key: Any) -> Any:
            try:
                return first(*key)
            except KeyError:
                return second(*key)

        return either
