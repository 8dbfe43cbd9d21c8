"""Names that stand for several servers."""

from __future__ import annotations

import contextlib
import copy
import socket
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

from experts_server import ExpertsServer
from experts_server.configuration.config import SecurityConfig, ServingConfig
from moe_autograd.errors import (
    ConfigError,
    GradientsLostError,
    PermissionDeniedError,
    ServerUnavailableError,
    UntrustedServerError,
)
from moe_autograd.remote import TLS, RemoteOptimizer, RetryPolicy, connect, servers
from tests.support.certificates import make_certificates
from tests.support.hosting import make_modules, sgd
from tests.support.naming import NameServer, move, named, serve

PATIENT = RetryPolicy(patience_s=100.0)


@pytest.fixture
def name_server(monkeypatch):
    server = NameServer()
    monkeypatch.setattr(socket, "getaddrinfo", server.getaddrinfo)
    return server


@pytest.fixture
def started() -> Iterator[Callable[..., list[ExpertsServer]]]:
    """Start servers of the given modules on one port of 127.0.0.1, 127.0.0.2, ..."""
    with contextlib.ExitStack() as stack:

        def start(
            *hosted: dict[str, nn.Module], config: Sequence[ServingConfig] | None = None
        ) -> list[ExpertsServer]:
            configs = config or [None] * len(hosted)
            while True:
                servers = [serve(hosted[0], "127.0.0.1:0", configs[0])]
                port = servers[0].address.rpartition(":")[2]
                try:
                    for index, modules in enumerate(hosted[1:], start=2):
                        servers.append(serve(modules, f"127.0.0.{index}:{port}", configs[index - 1]))
                except ConfigError:  # somebody else has this port there: take another
                    for server in servers:
                        server.stop()
                    continue
                for server in servers:
                    stack.callback(server.stop)
                return servers

        yield start


class TestSeveralServers:
    def test_a_name_stands_for_the_servers_at_all_its_addresses(self, name_server, started):
        first, second = servers = started(make_modules(0, 1), make_modules(1, 2))
        name_server.hosts = ["127.0.0.2", "127.0.0.1"]
        with connect(named(first)) as experts:
            assert {name: {*expert.hosted.addresses} for name, expert in experts.items()} == {
                "ffn.0": {first.address},
                "ffn.1": {server.address for server in servers},
                "ffn.2": {second.address},
            }
            for expert in experts.values():
                assert expert(torch.ones(1, 4)).shape == (1, 4)

    def test_an_address_where_nobody_is_is_no_error_as_long_as_one_answers(self, name_server, started):
        (server,) = started(make_modules(0))
        name_server.hosts = ["127.0.0.9", "127.0.0.1"]
        with connect(named(server)) as experts:
            assert experts["ffn.0"].hosted.addresses == (server.address,)
        name_server.hosts = ["127.0.0.9"]
        with pytest.raises(ServerUnavailableError, match=r"server at 127\.0\.0\.9:"):
            connect(named(server))

    def test_two_addresses_of_one_server_are_one_server(self, name_server):
        trusted = ServingConfig(security=SecurityConfig(insecure=True))
        with ExpertsServer(make_modules(0), listen="0.0.0.0:0", config=trusted) as server:
            name_server.hosts = ["127.0.0.1", "127.0.0.2"]
            with connect(named(server)) as experts:
                port = server.address.rpartition(":")[2]
                assert experts["ffn.0"].hosted.addresses == (f"127.0.0.1:{port}",)

    def test_the_systems_own_names_are_resolved(self, started):
        (server,) = started(make_modules(0))
        with connect(f"localhost:{server.address.rpartition(':')[2]}") as experts:
            assert experts["ffn.0"].hosted.addresses == (server.address,)

    def test_certificates_are_checked_against_the_name(self, name_server, tmp_path):
        make_certificates(tmp_path)
        security = SecurityConfig(tls_cert=tmp_path / "server.pem", tls_key=tmp_path / "server.key")
        with ExpertsServer(make_modules(0), config=ServingConfig(security=security)) as server:
            tls = TLS(tmp_path / "ca.pem")
            with connect(f"localhost:{server.address.rpartition(':')[2]}", tls=tls) as experts:
                assert experts["ffn.0"](torch.ones(1, 4)).shape == (1, 4)
            name_server.hosts = ["127.0.0.1"]
            with pytest.raises(ServerUnavailableError):
                connect(named(server), tls=tls)


class TestCertificatesOfSeveralServers:
    """Each server behind the name has one of its own, of an authority of its own."""

    @staticmethod
    def secured(folder: Path, host: str) -> ServingConfig:
        folder.mkdir()
        make_certificates(folder, host)
        return ServingConfig(
            security=SecurityConfig(tls_cert=folder / "server.pem", tls_key=folder / "server.key")
        )

    @pytest.mark.parametrize(
        ("hosts", "server_name"),
        [(("experts.test", "experts.test"), None), (("shared.test", "shared.test"), "shared.test")],
        ids=["of the name", "of another name"],
    )
    def test_all_are_accepted_that_have_the_name(self, name_server, started, tmp_path, hosts, server_name):
        configs = [self.secured(tmp_path / str(index), host) for index, host in enumerate(hosts)]
        ca_files = [tmp_path / str(index) / "ca.pem" for index in range(2)]
        (tmp_path / "ca.pem").write_text("".join(file.read_text() for file in ca_files))
        first, _ = started(make_modules(0), make_modules(1), config=configs)
        name_server.hosts = ["127.0.0.1", "127.0.0.2"]
        with connect(named(first), tls=TLS(tmp_path / "ca.pem", server_name=server_name)) as experts:
            assert len(experts) == 2
            for expert in experts.values():
                assert expert(torch.ones(1, 4)).shape == (1, 4)

    @pytest.mark.parametrize(
        ("given", "server_name"), [("bücher.test", None), ("experts.test", "bücher.test")]
    )
    def test_a_name_beyond_ascii_is_one_of_the_certificate(
        self, name_server, started, tmp_path, given, server_name
    ):
        config = self.secured(tmp_path / "server", "xn--bcher-kva.test")
        (server,) = started(make_modules(0), config=[config])
        name_server.hosts_of = {given: ["127.0.0.1"]}
        tls = TLS(tmp_path / "server" / "ca.pem", server_name=server_name)
        with connect(f"{given}:{server.address.rpartition(':')[2]}", tls=tls) as experts:
            assert experts["ffn.0"](torch.ones(1, 4)).shape == (1, 4)

    def test_one_that_has_not_is_named_and_not_left_out(self, name_server, started, tmp_path):
        configs = [self.secured(tmp_path / str(index), f"host{index}.test") for index in range(2)]
        ca_files = [tmp_path / str(index) / "ca.pem" for index in range(2)]
        (tmp_path / "ca.pem").write_text("".join(file.read_text() for file in ca_files))
        first, second = started(make_modules(0), make_modules(1), config=configs)
        name_server.hosts = ["127.0.0.1", "127.0.0.2"]
        tls = TLS(tmp_path / "ca.pem", server_name="host0.test")
        with pytest.raises(UntrustedServerError, match=f"{second.address}, info.* one of another name"):
            connect(named(first), tls=tls)
        with connect(named(first), tls=tls, allow_missing=True) as experts:
            assert list(experts) == list(experts.info()) == ["ffn.0"]

    @pytest.mark.parametrize("hosts_of_other", [["127.0.0.1"], []], ids=["known", "unknown"])
    def test_one_at_the_address_of_another_is_called_by_its_own_name(
        self, name_server, started, tmp_path, hosts_of_other
    ):
        names = ["one.test", "two.test"]
        configs = [self.secured(tmp_path / name, name) for name in names]
        ca_files = [tmp_path / name / "ca.pem" for name in names]
        (tmp_path / "ca.pem").write_text("".join(file.read_text() for file in ca_files))
        name_server.hosts_of = {"one.test": ["127.0.0.1"], "two.test": ["127.0.0.2"]}
        one, two = started(make_modules(0), make_modules(1), config=configs)
        given = [f"{name}:{one.address.rpartition(':')[2]}" for name in names]
        with connect(given, timeout_s=120.0, tls=TLS(tmp_path / "ca.pem")) as experts:
            one.stop()
            two.stop()
            name_server.hosts_of = {"one.test": ["127.0.0.2"], "two.test": hosts_of_other}
            with ExpertsServer(make_modules(0), listen=two.address, config=configs[0]):
                assert experts["ffn.0"](torch.ones(1, 4)).shape == (1, 4)
                assert experts.connection.address_of("ffn.0") == two.address

    def test_one_that_refuses_the_token_is_named_and_not_left_out(self, name_server, started, tmp_path):
        configs = []
        for index in range(2):
            file = tmp_path / str(index)
            file.write_text(f"train token-number-{index}-of-two\n")
            configs.append(ServingConfig(security=SecurityConfig(tokens_file=file)))
        first, second = started(make_modules(0), make_modules(1), config=configs)
        name_server.hosts = ["127.0.0.1", "127.0.0.2"]
        with pytest.raises(PermissionDeniedError, match=f"{second.address}, info"):
            connect(named(first), token="token-number-0-of-two")


class TestNoAnswerOfTheNameServer:
    def test_a_name_that_nobody_knows_is_named(self, name_server):
        with pytest.raises(ServerUnavailableError, match=r"server at experts\.test:99: .* service not known"):
            connect("experts.test:99")

    def test_a_name_that_cannot_be_one_is_named(self):
        with pytest.raises(ServerUnavailableError, match=r"server at a\.\.b:99: expected a name"):
            connect("a..b:99")

    def test_a_name_server_that_hangs_has_a_deadline(self, monkeypatch):
        never = threading.Event()

        def hang(*_: object, **__: object) -> list[object]:
            never.wait()
            return []

        monkeypatch.setattr(socket, "getaddrinfo", hang)
        with pytest.raises(
            ServerUnavailableError, match=r"no answer of the resolver in time, after \d+\.\d ms"
        ):
            connect("experts.test:99", timeout_s=0.5)
        never.set()

    def test_while_it_hangs_a_server_that_returns_is_still_found(self, name_server, started, monkeypatch):
        (server,) = started(make_modules(0))
        name_server.hosts = ["127.0.0.1"]
        never = threading.Event()

        def hang(*_: object, **__: object) -> list[object]:
            never.wait()
            return []

        with connect(named(server), timeout_s=120.0, retry=PATIENT) as experts:
            server.stop()
            with ExpertsServer(make_modules(0), optimizer=sgd, listen=server.address):
                monkeypatch.setattr(socket, "getaddrinfo", hang)
                assert experts["ffn.0"](torch.ones(1, 4)).shape == (1, 4)
                never.set()

    def test_while_it_hangs_servers_that_are_known_tell_what_they_host(
        self, name_server, started, monkeypatch
    ):
        (server,) = started(make_modules(0))
        name_server.hosts = ["127.0.0.1"]
        never = threading.Event()

        def hang(*_: object, **__: object) -> list[object]:
            never.wait()
            return []

        with connect(named(server), timeout_s=1000.0) as experts:
            monkeypatch.setattr(servers, "_FIRST_WORD_S", 1.0)
            monkeypatch.setattr(socket, "getaddrinfo", hang)
            assert list(experts.info()) == ["ffn.0"]
        with connect([named(server), server.address], timeout_s=1000.0, allow_missing=True) as experts:
            assert list(experts) == ["ffn.0"]
        never.set()

    def test_the_servers_that_it_named_before_are_still_called(self, name_server, started):
        (server,) = started(make_modules(0))
        name_server.hosts = ["127.0.0.1"]
        with connect(named(server)) as experts:
            name_server.hosts = []
            assert experts["ffn.0"](torch.ones(1, 4)).shape == (1, 4)
            assert list(experts.info()) == ["ffn.0"]


class TestReturnsElsewhere:
    """The server is gone, and the name stands for another address: no restart of the training."""

    def test_a_forward_finds_it(self, name_server, started):
        modules = make_modules(0)
        old, _ = started(modules, {})
        name_server.hosts = ["127.0.0.1"]
        with connect(named(old), timeout_s=120.0, retry=PATIENT) as experts:
            expected = experts["ffn.0"](torch.ones(1, 4))
            old.stop()
            with move(modules, old, name_server) as new:
                assert torch.equal(experts["ffn.0"](torch.ones(1, 4)), expected)
                assert experts.connection.addresses == (new.address,)

    def test_what_belongs_to_addresses_that_are_gone_goes_and_a_backward_from_there_comes_through(
        self, name_server, started
    ):
        modules = make_modules(0)
        (first,) = started(modules)
        name_server.hosts = ["127.0.0.1"]
        x = torch.randn(3, 4, requires_grad=True)
        with connect(named(first), timeout_s=120.0, retry=PATIENT) as experts:
            optimizer, y = RemoteOptimizer(experts), experts["ffn.0"](x)
            servers, placement = experts.connection._finding.servers, experts.connection._finding.placement
            old = first
            for _ in range(3):
                old.stop()
                with move(modules, old, name_server) as old:
                    experts["ffn.0"](x)
            old = serve(modules, old.address)
            try:
                experts["ffn.0"](x)
                assert [*servers._channels] == [*placement._marks] == [*placement._layouts] == [old.address]
                assert [*placement._beside] == [old.address]
                y.sum().backward()
                optimizer.step()
                assert old.num_updates == {"ffn.0": 1}
                assert experts.info().keys() == {"ffn.0"}
                assert [*servers._channels] == [old.address]
                assert [*placement._rests] == []
            finally:
                old.stop()

    def test_a_backward_finds_it_and_training_goes_on(self, name_server, started):
        modules = make_modules(0)
        twin = copy.deepcopy(modules["ffn.0"])
        (old,) = started(modules)
        name_server.hosts = ["127.0.0.1"]
        x = torch.randn(3, 4, requires_grad=True)
        with connect(named(old), timeout_s=120.0, retry=PATIENT) as experts:
            y = experts["ffn.0"](x)
            old.stop()
            with move(modules, old, name_server) as new:
                y.square().sum().backward()
                RemoteOptimizer(experts).step()
                assert new.num_updates == {"ffn.0": 1}
        local = sgd(twin.parameters())
        twin(x).square().sum().backward()
        local.step()
        torch.testing.assert_close(modules["ffn.0"].state_dict(), twin.state_dict())

    @pytest.mark.parametrize("is_known_before", [True, False], ids=["from a list", "by its name"])
    def test_a_step_whose_gradients_did_not_move_along_says_so(self, name_server, started, is_known_before):
        modules = make_modules(0)
        old, spare = started(modules, {})
        name_server.hosts = ["127.0.0.1"]
        given = [old.address, spare.address] if is_known_before else named(old)
        with connect(given, timeout_s=120.0, retry=PATIENT) as experts:
            optimizer = RemoteOptimizer(experts)
            experts["ffn.0"](torch.ones(1, 4)).sum().backward()
            old.stop()
            spare.stop()
            with move(modules, spare, name_server) as new:
                with pytest.raises(GradientsLostError):
                    optimizer.step()
                optimizer.zero_grad()
                experts["ffn.0"](torch.ones(1, 4)).sum().backward()
                optimizer.step()
                assert new.num_updates == {"ffn.0": 1}

    @pytest.mark.parametrize("is_there", [False, True], ids=["absent", "cut short"])
    def test_it_is_called_while_certificates_are_replaced(self, name_server, started, tmp_path, is_there):
        make_certificates(tmp_path)
        files = {name: tmp_path / f"{name}" for name in ("ca.pem", "client.pem", "client.key")}
        security = SecurityConfig(
            tls_cert=tmp_path / "server.pem",
            tls_key=tmp_path / "server.key",
            client_ca=tmp_path / "signers.pem",
        )
        (tmp_path / "signers.pem").write_bytes(files["ca.pem"].read_bytes())
        (old,) = started(make_modules(0), config=[ServingConfig(security=security)])
        name_server.hosts = ["127.0.0.1"]
        tls = TLS(*files.values(), server_name="localhost")
        with connect(named(old), timeout_s=120.0, retry=PATIENT, tls=tls) as experts:
            expected = experts["ffn.0"](torch.ones(1, 4))
            old.stop()
            for file in files.values():
                file.write_bytes(file.read_bytes()[:100]) if is_there else file.unlink()
            with move(make_modules(0), old, name_server, ServingConfig(security=security)):
                assert torch.equal(experts["ffn.0"](torch.ones(1, 4)), expected)

    def test_its_weights_are_found(self, name_server, started):
        modules = make_modules(0)
        (old,) = started(modules)
        name_server.hosts = ["127.0.0.1"]
        with connect(named(old), timeout_s=120.0, retry=PATIENT) as experts:
            old.stop()
            with move(modules, old, name_server):
                torch.testing.assert_close(experts.state_dict()["ffn.0.weight"], modules["ffn.0"].weight.data)
