"""Health (grpc.health.v1) of the server and of each expert, and reflection, so that grpcurl works.

The service name of an expert's health is its name; `""` is the whole server. An expert is NOT_SERVING while one
of its calls has been computing for more than `STUCK_S`: others go on, but a call to it would only wait.
"""

from __future__ import annotations

import time
from typing import Any

import grpc
from google.protobuf import descriptor_pool
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from experts_server import open_inference
from experts_server.registry import Registry
from moe_autograd.wire import methods

STUCK_S = 10.0

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class Health:
    """The health service of one server.

    Threads: the event loop's.
    """

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._servicer = health.aio.HealthServicer()  # type: ignore[attr-defined]  # not in the stubs
        self._stuck: set[str] = set()

    def add_to(self, server: grpc.aio.Server) -> None:
        """Register health and reflection."""
        health_pb2_grpc.add_HealthServicer_to_server(self._servicer, server)
        names = (methods.SERVICE, open_inference.SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server, _Pools())  # type: ignore[arg-type]  # asked as one

    async def set_ready(self) -> None:
        """Report everything as serving."""
        for name in ("", methods.SERVICE, open_inference.SERVICE, *self._registry):
            await self._servicer.set(name, SERVING)

    async def set_draining(self) -> None:
        """Report everything as not serving, from now on for good."""
        await self._servicer.enter_graceful_shutdown()

    async def look(self) -> None:
        """Report experts that got stuck, and those that came back; called from time to time."""
        stuck_before = time.monotonic() - STUCK_S
        for name, queue in self._registry.items():
            began = queue.computing_since
            is_stuck = began is not None and began < stuck_before
            if is_stuck != (name in self._stuck):
                await self._servicer.set(name, NOT_SERVING if is_stuck else SERVING)
                (self._stuck.add if is_stuck else self._stuck.discard)(name)


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
