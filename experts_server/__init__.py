"""A standalone server that hosts and trains experts; `experts-server serve` runs it, `ExpertsServer` embeds it.

Its rooms, each of which knows only those below it::

    command          the command line
    serving          ports, RPCs, streams, credentials, health, metrics
    checkpoints      all experts on disk
    queues           whose turn it is: batches and workers
    hosting          one expert: module, optimizer, forwards, backwards
    configuration    what is hosted, and how
    budget, locks, spec
"""

try:
    import click  # noqa: F401
    import cryptography  # noqa: F401
    import google.protobuf  # noqa: F401
    import grpc  # noqa: F401
    import grpc_health  # noqa: F401
    import grpc_reflection  # noqa: F401
    import prometheus_client  # noqa: F401
    import pydantic  # noqa: F401
    import rich  # noqa: F401
    import safetensors  # noqa: F401
    import xxhash  # noqa: F401
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"experts_server: expected what a server needs, got {str(error)!r}. Install moe-autograd with its extra "
        "'server': pip install '.[server]' where its pyproject.toml is.",
        name=error.name,
    ) from error

from experts_server.serving.embedded import ExpertsServer

__all__ = ["ExpertsServer"]
