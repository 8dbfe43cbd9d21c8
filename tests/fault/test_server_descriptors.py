"""A server that can open no file and take no connection goes on with those it has, and saves when it can again."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import socket
import threading
from pathlib import Path

import grpc
import pytest
import torch

from experts_server.command import daemon
from tests.support.servers import ServerProcess, WireClient, wait_until


def test_a_server_without_a_descriptor_left_computes_and_tells_what_it_hosts(tmp_path: Path) -> None:
    flags = ("--expert", "ffn", "--d-model", "4", "--checkpoint-dir", str(tmp_path))
    with ServerProcess(*flags) as server, WireClient(server.address) as client:
        client.forward("ffn.0", torch.ones(1, 4))
        process = server.process.pid
        limits = resource.prlimit(process, resource.RLIMIT_NOFILE)
        num_open = len(os.listdir(f"/proc/{process}/fd"))
        resource.prlimit(process, resource.RLIMIT_NOFILE, (num_open, limits[1]))

        assert [expert.name for expert in client.info().experts] == ["ffn.0"]
        assert client.forward("ffn.0", torch.ones(1, 4), call_id=2).code == "OK"
        assert client.backward("ffn.0", torch.ones(1, 4), call_id=2).code == "OK"
        client.step("ffn.0")
        with pytest.raises(grpc.RpcError, match="Too many open files"):
            client.save()

        resource.prlimit(process, resource.RLIMIT_NOFILE, limits)
        assert client.save() == "generation-00000002"
        with WireClient(server.address, client_id=b"another") as another:
            assert another.num_updates() == {"ffn.0": 1}
        assert server.stop() == 0


@pytest.mark.parametrize(
    ("limits", "wanted"),
    [
        # some systems allow a billion, and some programs look at each
        ((1024, resource.RLIM_INFINITY), 1 << 16),
        ((1024, 1 << 30), 1 << 16),
        ((1024, 4096), 4096),
        ((4096, 4096), None),
        ((1 << 17, 1 << 20), None),
        ((resource.RLIM_INFINITY, resource.RLIM_INFINITY), None),
    ],
)
def test_it_allows_itself_as_many_as_it_may_and_no_more_than_it_can_need(
    monkeypatch: pytest.MonkeyPatch, limits: tuple[int, int], wanted: int | None
) -> None:
    changes: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda which: limits)
    monkeypatch.setattr(resource, "setrlimit", lambda which, new: changes.append(new))
    daemon._allow_descriptors()
    assert changes == ([] if wanted is None else [(wanted, limits[1])])


def test_more_clients_than_a_system_allows_by_default_are_let_in() -> None:
    """They only connect: nobody asks them for a token for that."""
    allowed, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    # A process that is started from here inherits it.
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, most))
    try:
        server = ServerProcess("--expert", "ffn", "--d-model", "4", is_warm=False).start()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, most))
    with contextlib.ExitStack() as leaving:
        leaving.callback(server.kill)
        host, _, port = server.address.rpartition(":")
        for _ in range(400):
            leaving.enter_context(socket.create_connection((host, int(port)), timeout=30))
        wait_until(lambda: len(os.listdir(f"/proc/{server.process.pid}/fd")) > 400)
        with WireClient(server.address) as client:
            assert client.forward("ffn.0", torch.ones(1, 4)).code == "OK"


def test_a_reader_of_metrics_that_it_cannot_let_in_costs_it_no_core() -> None:
    def cpu_s() -> float:
        fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    flags = ("--expert", "ffn", "--d-model", "4", "--metrics-listen", "127.0.0.1:0")
    with ServerProcess(*flags) as server:
        process = server.process.pid
        wait_until(lambda: any("metrics at http://" in line for line in server.log))
        (address,) = re.findall(r"http://(\S+)/metrics", "".join(server.log))
        host, _, port = address.rpartition(":")
        limits = resource.prlimit(process, resource.RLIMIT_NOFILE)
        num_open = len(os.listdir(f"/proc/{process}/fd"))
        resource.prlimit(process, resource.RLIMIT_NOFILE, (num_open, limits[1]))
        with socket.create_connection((host, int(port))) as reader:
            before = cpu_s()
            threading.Event().wait(1.0)
            assert cpu_s() - before < 0.5
            resource.prlimit(process, resource.RLIMIT_NOFILE, limits)
            reader.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
            assert reader.recv(15) == b"HTTP/1.0 200 OK"
        assert server.stop() == 0
