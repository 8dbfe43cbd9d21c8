"""The peer of the fan-out: bare gRPC servers that take as long, and a client that asks all at the same time.

One thread asks all of them, and then takes their answers: on two cores a thread for each takes 1 to 3 ms longer.

What goes to a server is one ready-made message of as many bytes, and comes back as it is: no tensor, no expert, no
graph. So what this takes beyond the delay is what the machine needs for so many processes and their connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator

import grpc
from grpc.experimental import ChannelOptions

from benchmarks.bare_grpc import serve_bare
from moe_autograd.wire.options import CHANNEL_OPTIONS


def serve(latency_ms: float) -> None:
    """Be a server that sends each message back after a while, until the input is closed."""

    async def echo(requests, context):
        async for message in requests:
            await asyncio.sleep(latency_ms / 1000)
            yield message

    serve_bare({"Echo": grpc.stream_stream_rpc_method_handler(echo)})


@contextlib.contextmanager
def asking(num_servers: int, latency_ms: float, num_bytes: int) -> Iterator[Callable[[], object]]:
    """Run servers; yields what asks all of them at the same time, with so many bytes each."""
    options = (*CHANNEL_OPTIONS, (ChannelOptions.SingleThreadedUnaryStream, 1))
    with contextlib.ExitStack() as stack:
        ask = []
        for _ in range(num_servers):
            command = [sys.executable, "-m", "benchmarks.remote_fanout.bare", str(latency_ms)]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            stack.enter_context(process)
            stack.callback(process.stdin.close)
            channel = grpc.insecure_channel(process.stdout.readline().strip(), options)
            stack.enter_context(channel)
            ask.append(channel.unary_stream("/Bare/Echo"))
        message = bytes(num_bytes)
        yield lambda: [list(answers) for answers in [one(message, timeout=60) for one in ask]]


if __name__ == "__main__":
    serve(float(sys.argv[1]))
