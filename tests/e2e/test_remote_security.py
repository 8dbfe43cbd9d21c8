"""Encrypted connections, certificates on both sides, and tokens, from the client's side."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from torch import nn

from experts_server import ExpertsServer
from experts_server.configuration.config import SecurityConfig, ServingConfig
from moe_autograd.errors import PermissionDeniedError, ServerUnavailableError
from moe_autograd.remote import TLS, RemoteOptimizer, RetryPolicy, connect
from tests.support.certificates import make_authority, make_certificates
from tests.support.proxy import Proxy
from tests.support.servers import num_kept, wait_until

TRAIN, READ = "train-token-0123456789", "read-token-0123456789"
AT_ONCE = RetryPolicy(patience_s=0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """An authority, and certificates of a server (localhost) and a client signed by it."""
    folder = tmp_path_factory.mktemp("certificates")
    make_certificates(folder)
    (folder / "tokens").write_text(f"train {TRAIN}\nread {READ}\n")
    return folder


def serve(security: SecurityConfig) -> ExpertsServer:
    return ExpertsServer(
        {"ffn.0": nn.Linear(4, 4)},
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        config=ServingConfig(security=security),
    )


def train_once(address: str, **credentials) -> int:
    with connect(address, retry=AT_ONCE, **credentials) as experts:
        experts["ffn.0"](torch.ones(1, 4)).sum().backward()
        RemoteOptimizer(experts).step()
        experts.load_state_dict(experts.state_dict())
        return experts.info()["ffn.0"].num_updates


class TestTokens:
    @pytest.fixture
    def address(self, folder):
        with serve(SecurityConfig(tokens_file=folder / "tokens")) as server:
            yield server.address

    def test_the_right_token_may_train(self, address):
        assert train_once(address, token=TRAIN) == 1

    @pytest.mark.parametrize("token", [None, "wrong-token-0123456789"])
    def test_no_token_and_a_wrong_one_are_refused(self, address, token):
        with pytest.raises(PermissionDeniedError, match=f"server at {address}, info"):
            connect(address, token=token)

    def test_a_read_token_reads_and_changes_nothing(self, address):
        with connect(address, token=READ) as experts:
            y = experts["ffn.0"](torch.ones(1, 4))
            assert len(experts.state_dict()) == 2
            with pytest.raises(PermissionDeniedError, match=r"expert 'ffn\.0' at .*, backward"):
                y.sum().backward()
            with pytest.raises(PermissionDeniedError):
                experts.load_state_dict(experts.state_dict())

    def test_a_forward_that_has_no_backward_any_more_is_forgotten(self, folder):
        security = SecurityConfig(tokens_file=folder / "tokens")
        with serve(security) as server, connect(server.address, token=TRAIN) as experts:
            y = experts["ffn.0"](torch.ones(1, 4))
            assert num_kept(server) == 1
            del y
            with torch.no_grad():
                experts["ffn.0"](torch.ones(1, 4))  # with which it is told so
            wait_until(lambda: num_kept(server) == 0)


class TestTLS:
    @pytest.fixture
    def address(self, folder):
        security = SecurityConfig(tls_cert=folder / "server.pem", tls_key=folder / "server.key")
        with serve(security) as server:
            yield server.address

    def test_a_trusted_certificate_is_accepted(self, address, folder):
        assert train_once(address, tls=TLS(folder / "ca.pem", server_name="localhost")) == 1

    def test_a_certificate_of_another_name_is_refused(self, address, folder):
        with pytest.raises(
            ServerUnavailableError, match=r"got one of another name.*TLS\(server_name=\.\.\.\)"
        ):
            train_once(address, tls=TLS(folder / "ca.pem", server_name="elsewhere"))

    def test_an_authority_that_did_not_sign_it_is_refused(self, address, folder, tmp_path):
        make_authority(tmp_path)
        with pytest.raises(
            ServerUnavailableError,
            match=r"can be trusted, got .* local issuer.* The ca_file is '.*/ca\.pem'\.\Z",
        ):
            train_once(address, tls=TLS(tmp_path / "ca.pem", server_name="localhost"))

    def test_that_no_authority_was_named_is_said(self, address):
        with pytest.raises(ServerUnavailableError, match=r"can be trusted, got .* There is no ca_file: only"):
            train_once(address, tls=TLS(server_name="localhost"))

    def test_a_certificate_that_has_expired_is_refused(self, folder):
        security = SecurityConfig(tls_cert=folder / "expired.pem", tls_key=folder / "expired.key")
        with (
            serve(security) as server,
            pytest.raises(ServerUnavailableError, match="certificate has expired"),
        ):
            train_once(server.address, tls=TLS(folder / "ca.pem"))

    def test_a_plain_connection_is_refused(self, address):
        with pytest.raises(ServerUnavailableError, match="do both use TLS or neither"):
            connect(address, retry=AT_ONCE)

    def test_a_server_without_it_is_refused(self, folder):
        with (
            serve(SecurityConfig()) as server,
            pytest.raises(ServerUnavailableError, match="expected TLS, got something else"),
        ):
            connect(server.address, retry=AT_ONCE, tls=TLS(folder / "ca.pem"))


class TestMutualTLS:
    @pytest.fixture
    def address(self, folder):
        security = SecurityConfig(
            tls_cert=folder / "server.pem", tls_key=folder / "server.key", client_ca=folder / "ca.pem"
        )
        with serve(security) as server:
            yield server.address

    def test_a_client_with_its_certificate_is_accepted(self, address, folder):
        own = (folder / "client.pem", folder / "client.key")
        assert train_once(address, tls=TLS(folder / "ca.pem", *own, server_name="localhost")) == 1

    def test_a_client_without_one_is_refused(self, address, folder):
        with pytest.raises(ServerUnavailableError, match="does it want a certificate of yours"):
            train_once(address, tls=TLS(folder / "ca.pem", server_name="localhost"))

    def test_a_client_whose_certificate_is_of_another_authority_is_refused(self, address, folder, tmp_path):
        make_certificates(tmp_path)
        own = (tmp_path / "client.pem", tmp_path / "client.key")
        with pytest.raises(ServerUnavailableError, match=r"does it want a certificate of yours\?\Z"):
            train_once(address, tls=TLS(folder / "ca.pem", *own))


class TestRenewal:
    """Files are replaced while client and server run: nothing is restarted for it."""

    NAMES = ("ca.pem", "server.pem", "server.key", "client.pem", "client.key")

    @pytest.fixture
    def files(self, folder, tmp_path):
        """The files in use, and how to replace some of them by those of another authority."""
        (tmp_path / "new").mkdir()
        make_certificates(tmp_path / "new")

        def take(source, *names):
            for name in names:
                shutil.copy(source / name, tmp_path / name)

        take(folder, *self.NAMES)
        take.folder, take.new = tmp_path, tmp_path / "new"
        return take

    def test_a_server_shows_its_new_certificate_once_it_is_whole(self, files):
        security = SecurityConfig(tls_cert=files.folder / "server.pem", tls_key=files.folder / "server.key")
        old, new = TLS(files.folder / "ca.pem"), TLS(files.new / "ca.pem")
        with serve(security) as server:
            train_once(server.address, tls=old)
            files(files.new, "server.pem")
            assert train_once(server.address, tls=old) == 2
            files(files.new, "server.key")
            assert train_once(server.address, tls=new) == 3
            with pytest.raises(ServerUnavailableError, match="certificate that can be trusted"):
                connect(server.address, tls=old)

    def test_a_client_takes_its_new_certificates_when_it_has_to_connect_again(self, files):
        security = SecurityConfig(
            tls_cert=files.folder / "server.pem",
            tls_key=files.folder / "server.key",
            client_ca=files.folder / "ca.pem",
        )
        tls = TLS(files.folder / "ca.pem", files.folder / "client.pem", files.folder / "client.key")
        with serve(security) as server, Proxy(server.address, is_encrypted=True) as proxy:
            with connect(proxy.address, tls=tls, retry=RetryPolicy(patience_s=60.0)) as experts:
                experts["ffn.0"](torch.ones(1, 4)).sum().backward()
                files(files.new, *self.NAMES)
                proxy.cut()
                RemoteOptimizer(experts).step()
                assert experts.info()["ffn.0"].num_updates == 1
            with pytest.raises(ServerUnavailableError, match="certificate of yours"):
                connect(server.address, tls=TLS(files.folder / "ca.pem"))

    def test_certificates_are_renewed_though_the_process_has_left_their_folder(self, files, monkeypatch):
        security = SecurityConfig(
            tls_cert=files.folder / "server.pem",
            tls_key=files.folder / "server.key",
            client_ca=files.folder / "ca.pem",
        )
        with serve(security) as server, Proxy(server.address, is_encrypted=True) as proxy:
            (files.folder / "placement.toml").write_text(
                f'addresses = ["{proxy.address}"]\n'
                '[tls]\nca_file = "ca.pem"\ncert_file = "client.pem"\nkey_file = "client.key"\n'
            )
            monkeypatch.chdir(files.folder)
            with connect("placement.toml") as experts:
                monkeypatch.chdir("/")
                files(files.new, *self.NAMES)
                proxy.cut()
                assert experts["ffn.0"](torch.ones(1, 4)).shape == (1, 4)

    def test_a_token_is_renewed_though_the_process_has_left_its_folder(self, tmp_path, monkeypatch):
        (tmp_path / "tokens").write_text(f"train {TRAIN}\n")
        (tmp_path / "token").write_text(TRAIN)
        monkeypatch.chdir(tmp_path)
        with (
            serve(SecurityConfig(tokens_file=Path("tokens"))) as server,
            connect(server.address, token=Path("token")) as experts,
        ):
            monkeypatch.chdir("/")
            (tmp_path / "token").write_text("train-token-of-tomorrow")
            (tmp_path / "tokens").write_text("train train-token-of-tomorrow\n")
            wait_until_refused(server.address, TRAIN)
            assert experts["ffn.0"](torch.ones(1, 4)).shape == (1, 4)

    def test_a_client_says_what_is_wrong_with_files_that_stay_broken(self, files):
        security = SecurityConfig(
            tls_cert=files.folder / "server.pem",
            tls_key=files.folder / "server.key",
            client_ca=files.folder / "ca.pem",
        )
        tls = TLS(files.folder / "ca.pem", files.folder / "client.pem", files.folder / "client.key")
        patience = RetryPolicy(patience_s=0.2)
        with (
            serve(security) as server,
            Proxy(server.address, is_encrypted=True) as proxy,
            connect(proxy.address, tls=tls, retry=patience) as experts,
        ):
            files(files.new, "client.pem")
            proxy.cut()
            assert experts["ffn.0"](torch.ones(1, 4)).shape == (1, 4)
            files(files.new, "ca.pem", "server.pem", "server.key")
            proxy.cut()
            with pytest.raises(
                ServerUnavailableError, match=r"certificates in use are those of before: .*client\.pem"
            ):
                experts["ffn.0"](torch.ones(1, 4))
            files(files.new, "client.key")
            assert experts["ffn.0"](torch.ones(1, 4)).shape == (1, 4)

    def test_tokens_are_renewed_in_their_files(self, tmp_path):
        theirs, ours = tmp_path / "tokens", tmp_path / "token"
        theirs.write_text(f"train {TRAIN}\n")
        ours.write_text(f"{TRAIN}\n")
        with (
            serve(SecurityConfig(tokens_file=theirs)) as server,
            connect(server.address, token=ours) as experts,
        ):
            y = experts["ffn.0"](torch.ones(1, 4))
            ours.write_text("train-token-of-tomorrow")
            theirs.write_text("train train-token-of-tomorrow\n")
            wait_until_refused(server.address, TRAIN)
            y.sum().backward()
            RemoteOptimizer(experts).step()
            ours.write_text("train-token-of-the-day-after")
            theirs.write_text("train train-token-of-the-day-after\n")
            wait_until_refused(server.address, "train-token-of-tomorrow")
            assert experts.info()["ffn.0"].num_updates == 1
            theirs.write_text("train another-token-0123456789\n")
            wait_until_refused(server.address, "train-token-of-the-day-after")
            for content in ("", "train-token-of-the-day-after"):
                ours.write_text(content)
                with pytest.raises(PermissionDeniedError, match=r"token that it knows"):
                    experts["ffn.0"](torch.ones(1, 4))

    def test_a_training_goes_on_with_a_renewed_token_though_the_retry_budget_is_used_up(self, tmp_path):
        theirs, ours = tmp_path / "tokens", tmp_path / "token"
        theirs.write_text(f"train {TRAIN}\n")
        ours.write_text(TRAIN)
        with (
            serve(SecurityConfig(tokens_file=theirs)) as server,
            connect(server.address, token=ours, retry=RetryPolicy(budget=0.0)) as experts,
        ):
            ours.write_text("train-token-of-tomorrow")
            theirs.write_text("train train-token-of-tomorrow\n")
            wait_until_refused(server.address, TRAIN)
            experts["ffn.0"](torch.ones(1, 4)).sum().backward()
            RemoteOptimizer(experts).step()
            assert experts.info()["ffn.0"].num_updates == 1

    def test_while_a_tokens_file_is_replaced_tokens_stay_as_they_were(self, tmp_path):
        tokens = tmp_path / "tokens"
        tokens.write_text(f"train {TRAIN}\n")
        with (
            serve(SecurityConfig(tokens_file=tokens)) as server,
            connect(server.address, token=TRAIN) as experts,
        ):
            tokens.write_text(f"train {READ}\ntrain sho")
            with pytest.raises(PermissionDeniedError):
                connect(server.address, token=READ)
            assert experts["ffn.0"](torch.ones(1, 4)).shape == (1, 4)
            tokens.unlink()
            with pytest.raises(PermissionDeniedError):
                connect(server.address, token=READ)
            tokens.write_text(f"train {READ}\n")
            wait_until_refused(server.address, TRAIN)


def wait_until_refused(address: str, token: str) -> None:
    """Wait until a server has seen that a token is gone from its file; it looks once a second."""

    def is_refused() -> bool:
        try:
            connect(address, token=token).close()
        except PermissionDeniedError:
            return True
        return False

    wait_until(is_refused)


def test_a_certificate_without_its_key_is_refused(folder):
    with pytest.raises(ValueError, match="expected cert_file and key_file together"):
        TLS(cert_file=folder / "client.pem")


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, "readable text file"),
        ("", "got an empty file"),
        ("two words", "without blanks, got ' ' at position 3"),
    ],
)
def test_a_token_file_that_holds_none_is_refused_before_anything_connects(tmp_path, content, expected):
    if content is not None:
        (tmp_path / "token").write_text(content)
    with pytest.raises(ValueError, match=expected):
        connect("127.0.0.1:1", token=tmp_path / "token")


def test_the_name_of_a_file_is_not_taken_for_a_token(tmp_path):
    file = tmp_path / "token"
    file.write_text("a-token-of-the-server")
    with pytest.raises(ValueError, match=r"got the name of a file, '.*token'\. Pass Path\('.*token'\)\."):
        connect("127.0.0.1:1", token=str(file))


def test_a_token_file_whose_name_is_none_is_refused():
    with pytest.raises(ValueError, match=r"expected a readable text file, got none \(embedded null byte\)"):
        connect("127.0.0.1:1", token=Path("a\0b"))


def test_files_that_are_no_certificates_are_refused_by_name_before_anything_connects(folder):
    with pytest.raises(ValueError, match=r"TLS: expected certificates as PEM, got '.*client\.key'"):
        connect("127.0.0.1:1", tls=TLS(folder / "client.key"))
    with pytest.raises(
        ValueError, match=r"expected a certificate and its key.*server\.key'.*belong together"
    ):
        connect("127.0.0.1:1", tls=TLS(cert_file=folder / "client.pem", key_file=folder / "server.key"))
