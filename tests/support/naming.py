"""A name for servers. These and their addresses are real; only the name server is not: a function takes the place of
`socket.getaddrinfo` and knows more names."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable, Iterator

from torch import nn

from experts_server import ExpertsServer
from experts_server.configuration.config import ServingConfig
from moe_autograd.errors import ConfigError
from tests.support.hosting import sgd


class NameServer:
    """Knows `experts.test`, and passes every other question on; the hosts can be changed at any time.

    Attributes:
        hosts: of `experts.test`.
        hosts_of: further names.
    """

    def __init__(self) -> None:
        self.hosts: list[str] = []
        self.hosts_of: dict[str, list[str]] = {}
        self.num_questions = 0
        self._at: dict[int, Callable[[], object]] = {}
        self._others = socket.getaddrinfo

    def at_question(self, number: int, do: Callable[[], object]) -> None:
        """Have `do` called before the question of this number is answered."""
        self._at[number] = do

    def getaddrinfo(self, host, port, *rest, **options):
        if host in self.hosts_of:
            return self._answer(self.hosts_of[host], port)
        if host != "experts.test":
            return self._others(host, port, *rest, **options)
        self.num_questions += 1
        if self.num_questions in self._at:
            self._at[self.num_questions]()
        return self._answer(self.hosts, port)

    @staticmethod
    def _answer(hosts, port):
        if not hosts:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (host, port)) for host in hosts]


def named(server: ExpertsServer) -> str:
    return f"experts.test:{server.address.rpartition(':')[2]}"


def serve(modules: dict[str, nn.Module], listen: str, config: ServingConfig | None = None) -> ExpertsServer:
    return ExpertsServer(modules, optimizer=sgd, listen=listen, config=config).start()


@contextlib.contextmanager
def move(
    modules: dict[str, nn.Module],
    old: ExpertsServer,
    name_server: NameServer,
    config: ServingConfig | None = None,
) -> Iterator[ExpertsServer]:
    """Start a server of these modules, on the port of one that has stopped and on an address that is free there."""
    port = old.address.rpartition(":")[2]
    for last in range(2, 250):
        try:
            new = serve(modules, f"127.0.0.{last}:{port}", config)
        except ConfigError:
            continue
        name_server.hosts = [f"127.0.0.{last}"]
        try:
            yield new
        finally:
            new.stop()
        return
    raise AssertionError(f"port {port} is taken everywhere")
