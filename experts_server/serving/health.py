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
from google.protobuf.message import DecodeError
from grpc_health.v1 import health, health_pb2
from grpc_reflection.v1alpha import reflection
from grpc_reflection.v1alpha.reflection_pb2_grpc import add_ServerReflectionServicer_to_server

from experts_server.queues.registry import Registry
from experts_server.serving import open_inference
from experts_server.serving.doorway import Context, Doorway, Passing, only_message
from moe_autograd.errors import CorruptDataError
from moe_autograd.wire import methods

STUCK_S = 10.0
# Of both, and as many checks; nobody is asked who he is, so they must not use up what the other RPCs live on.
MAX_STREAMS = 1024

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class Health:
    """The health service of one server.

    Threads: the event loop's.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        # those who only watch are to keep no probe out
        self._doorway, self._doorway_of_checks = Doorway(MAX_STREAMS), Doorway(MAX_STREAMS)
        self._servicer = _HealthServicer(self._doorway, self._doorway_of_checks)
        self._stuck: set[str] = set()

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register health and reflection."""
        self._servicer.add_to(server)
        names = (methods.SERVICE, open_inference.SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        add_ServerReflectionServicer_to_server(_ReflectionServicer(self._doorway, names), server)

    def set_ready(self) -> None:
        """Report everything as serving."""
        for name in ("", methods.SERVICE, open_inference.SERVICE, *self._registry):
            self._servicer.set(name, SERVING)

    def set_draining(self) -> None:
        """Report everything as not serving, from now on for good."""
        self._servicer.set_draining()

    def end_silent(self) -> None:
        """End the RPCs whose clients have kept them waiting for too long; called from time to time."""
        for doorway in (self._doorway, self._doorway_of_checks):
            doorway.end_silent()

    async def look(self) -> None:
        """Report experts that got stuck, and those that came back; called from time to time."""
        stuck_before = time.monotonic() - STUCK_S
        for name, queue in self._registry.items():
            began = queue.computing_since
            is_stuck = began is not None and began < stuck_before
            if is_stuck != (name in self._stuck):
                self._servicer.set(name, NOT_SERVING if is_stuck else SERVING)
                (self._stuck.add if is_stuck else self._stuck.discard)(name)


class _HealthServicer:
    """grpc's own writes to a watcher under the lock that every change takes: one who does not read held up a stop."""

    def __init__(self, doorway: Doorway, doorway_of_checks: Doorway) -> None:
        self._doorway, self._doorway_of_checks = doorway, doorway_of_checks
        self._status_of: dict[str, Any] = {}
        self._changed = asyncio.Event()  # another one after each change
        self._is_draining = False

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register the handlers."""
        handlers = {
            "Check": grpc.stream_unary_rpc_method_handler(self._check),
            "Watch": grpc.stream_stream_rpc_method_handler(self._watch),
        }
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler(health.SERVICE_NAME, handlers),)
        )

    def set(self, name: str, status: Any) -> None:
        """Report a service from now on, unless all are draining."""
        if not self._is_draining:
            self._status_of[name] = status
            self._wake_watchers()

    def set_draining(self) -> None:
        """Report all of them as not serving, for good."""
        self._is_draining = True
        self._status_of = dict.fromkeys(self._status_of, NOT_SERVING)
        self._wake_watchers()

    async def _check(self, _: Any, context: Context) -> bytes:
        async with self._doorway_of_checks.passing(context, "read") as rpc:
            status = self._status_of.get(await _service_in(rpc))
            if status is None:
                await rpc.abort(grpc.StatusCode.NOT_FOUND)
            return _answer(status)
        raise AssertionError("abort raises")

    async def _watch(self, _: Any, context: Context) -> None:
        last = None
        async with self._doorway.passing(context, "read") as rpc:
            service = await _service_in(rpc)
            while True:
                changed = self._changed
                status = self._status_of.get(service, UNKNOWN)
                if status == last:
                    await changed.wait()
                    continue
                await rpc.write(_answer(status))
                last = status

    def _wake_watchers(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


async def _service_in(rpc: Passing) -> str:
    """Return the service that is asked for."""
    sent = await only_message(rpc)
    try:
        return str(health_pb2.HealthCheckRequest.FromString(sent).service)
    except DecodeError as error:
        raise CorruptDataError(f"message: expected a HealthCheckRequest, got {error}.") from error


def _answer(status: Any) -> bytes:
    return bytes(health_pb2.HealthCheckResponse(status=status).SerializeToString())


class _ReflectionServicer(reflection.aio.ReflectionServicer):  # type: ignore[name-defined,misc]  # nor this
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
