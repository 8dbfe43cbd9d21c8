"""Experts that live on other machines, as modules in this one.

::

    from moe_autograd.remote import connect, RemoteOptimizer

    with connect("127.0.0.1:31415") as experts:
        layer = MixtureOfExperts(TopKRouter(64, len(experts), top_k=2), experts)
        optimizer = RemoteOptimizer(experts)

Needs the extra `moe-autograd[remote]`: grpc, protobuf and xxhash.
"""

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
