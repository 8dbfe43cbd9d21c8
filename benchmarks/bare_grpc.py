"""A server of bare gRPC, the peer of several benchmarks: our options, somebody's handlers, and nothing of ours."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Mapping

import grpc

from moe_autograd.wire.options import SERVER_OPTIONS


def serve_bare(handlers: Mapping[str, grpc.RpcMethodHandler]) -> None:
    """Serve these methods of `Bare`, print the address, and end when the input is closed."""

    async def main() -> None:
        server = grpc.aio.server(options=SERVER_OPTIONS)
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("Bare", handlers),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        print(f"127.0.0.1:{port}", flush=True)
        await asyncio.to_thread(sys.stdin.read)
        await server.stop(0)

    asyncio.run(main())
