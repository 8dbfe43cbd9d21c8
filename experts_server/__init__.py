"""A standalone server that hosts and trains experts; `experts-server serve` runs it, `ExpertsServer` embeds it."""

from experts_server.embedded import ExpertsServer

__all__ = ["ExpertsServer"]
