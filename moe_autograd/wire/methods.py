"""The RPCs by name, for both sides.

Messages cross gRPC as plain bytes (no serializer): streams carry packets (`parcels`), the others messages
with a checksum (`framing.seal`, `framing.unseal`), so that damage is answered as damage and not as a crash
of a deserializer. A server registers them so::

    handlers = {
        "Info": grpc.stream_unary_rpc_method_handler(info),           # on the wire the same as unary_unary
        "Forward": grpc.stream_stream_rpc_method_handler(forward),
        ...
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))

and a client calls `channel.stream_stream(path("Forward"))`.
"""

from __future__ import annotations

SERVICE = "moe_autograd.v1.Experts"

UNARY = ("Info", "Step", "ZeroGrad", "Save", "Expect", "Forget")
REQUEST_STREAM = ("SetState",)
REPLY_STREAM = ("GetState",)
BOTH_STREAM = ("Forward", "Backward")


def path(rpc: str) -> str:
    """Return the full name of an RPC, as gRPC wants it."""
    return f"/{SERVICE}/{rpc}"
