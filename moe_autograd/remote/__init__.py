"""Experts that live on other machines, as modules in this one.

::

    from moe_autograd.remote import connect, RemoteOptimizer

    with connect("127.0.0.1:31415") as experts:
        layer = MixtureOfExperts(TopKRouter(64, len(experts), top_k=2), experts)
        optimizer = RemoteOptimizer(experts)

Needs the extra `moe-autograd[remote]`: cryptography, grpc, protobuf and xxhash.

Begin with `nodes`, where calls of a server become nodes of the graph. A pass goes down through these files, and its
results come up again::

    modules and optimizers  experts, expert, optimizer, state, turns, updates
    the graph               nodes, parts, inputs, expecting, leaving
    what connect is given   checking, config
    one connection          connection, operations, cancelling, deadline, numbering, awaiting, closing
    which server            finding, placement, servers, addresses
    getting there           delivery, requests, jobs, fanout, pool, retry, hedging
    one server              calls, asking, streaming, ends, channel, link, compression, security, forking, interrupts
"""

try:
    import cryptography  # noqa: F401
    import google.protobuf  # noqa: F401
    import grpc  # noqa: F401
    import xxhash  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"moe_autograd.remote: expected cryptography, grpc, protobuf and xxhash, got {str(error)!r}. Install "
        "moe-autograd with its extra 'remote': pip install '.[remote]' where its pyproject.toml is.",
        name=error.name,
    ) from error

from moe_autograd.remote.awaiting import in_thread
from moe_autograd.remote.compression import Compression
from moe_autograd.remote.expert import RemoteExpert
from moe_autograd.remote.experts import RemoteExperts, connect
from moe_autograd.remote.hedging import HedgePolicy
from moe_autograd.remote.optimizer import RemoteOptimizer
from moe_autograd.remote.placement import HostedExpert
from moe_autograd.remote.retry import RetryPolicy
from moe_autograd.remote.security import TLS

__all__ = [
    "TLS",
    "Compression",
    "HedgePolicy",
    "HostedExpert",
    "RemoteExpert",
    "RemoteExperts",
    "RemoteOptimizer",
    "RetryPolicy",
    "connect",
    "in_thread",
]
