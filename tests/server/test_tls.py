"""TLS with and without certificates of clients; certificates that nobody could use are refused, or told of."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any

import grpc
import pytest
from click.testing import CliRunner

from experts_server import ExpertsServer
from experts_server.command.cli import main
from experts_server.configuration.config import SecurityConfig, ServingConfig
from moe_autograd.errors import ConfigError
from moe_autograd.moe.experts import FeedForwardExpert
from tests.support.certificates import (
    EXPIRED,
    NOT_YET,
    ONE_DAY,
    ends_in,
    make_authority,
    make_certificate,
    make_certificates,
    openssl,
)
from tests.support.servers import WireClient, tokens, wait_until

D = 8


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An authority, and certificates of a server and a client signed by it."""
    folder = tmp_path_factory.mktemp("certificates")
    make_certificates(folder)
    return folder


def test_over_tls_the_right_authority_is_served_and_plain_text_is_not(certificates: Path) -> None:
    security = SecurityConfig(tls_cert=certificates / "server.pem", tls_key=certificates / "server.key")
    with ExpertsServer({"e": FeedForwardExpert(D)}, config=ServingConfig(security=security)) as server:
        credentials = grpc.ssl_channel_credentials((certificates / "ca.pem").read_bytes())
        with WireClient(server.address, credentials=credentials) as client:
            assert client.forward("e", tokens(2, D)).code == "OK"
        with WireClient(server.address) as plain, pytest.raises(grpc.RpcError) as refused:
            plain.info()
        assert refused.value.code() == grpc.StatusCode.UNAVAILABLE
        shown = CliRunner().invoke(
            main, ["info", server.address, "--ca", str(certificates / "ca.pem"), "--json"]
        )
        assert shown.exit_code == 0, shown.output


def test_commands_find_a_server_by_a_name_beyond_ascii(certificates: Path) -> None:
    security = SecurityConfig(tls_cert=certificates / "server.pem", tls_key=certificates / "server.key")
    secured = ServingConfig(security=security)
    for config, options in ((None, []), (secured, ["--ca", str(certificates / "ca.pem")])):
        with ExpertsServer({"e": FeedForwardExpert(D)}, config=config) as server:
            name = f"ｌocalhost:{server.address.rpartition(':')[2]}"  # in ASCII, as IDNA has it: localhost
            shown = CliRunner().invoke(main, ["info", name, "--json", *options])
        assert shown.exit_code == 0, shown.output


def test_with_a_client_ca_only_clients_with_its_certificate_are_served(
    certificates: Path, tmp_path: Path
) -> None:
    security = SecurityConfig(
        tls_cert=certificates / "server.pem",
        tls_key=certificates / "server.key",
        client_ca=certificates / "ca.pem",
    )
    ca = (certificates / "ca.pem").read_bytes()
    known = grpc.ssl_channel_credentials(
        ca, (certificates / "client.key").read_bytes(), (certificates / "client.pem").read_bytes()
    )
    with ExpertsServer({"e": FeedForwardExpert(D)}, config=ServingConfig(security=security)) as server:
        with WireClient(server.address, credentials=known) as client:
            assert client.forward("e", tokens(2, D)).code == "OK"
        for name, status in (("client", 0), ("none", 1)):
            own = [f"--{kind}={certificates / name}.{end}" for kind, end in (("cert", "pem"), ("key", "key"))]
            shown = CliRunner().invoke(
                main, ["info", server.address, f"--ca={certificates / 'ca.pem'}", *own]
            )
            assert shown.exit_code == status, shown.output
        make_certificates(tmp_path)
        stranger = (tmp_path / "client.key").read_bytes(), (tmp_path / "client.pem").read_bytes()
        for own in ((), stranger):
            unknown = WireClient(server.address, credentials=grpc.ssl_channel_credentials(ca, *own))
            with unknown, pytest.raises(grpc.RpcError) as refused:
                unknown.info()
            assert refused.value.code() == grpc.StatusCode.UNAVAILABLE


def test_a_command_says_that_its_certificate_has_expired_or_which_authority_did_not_sign(
    certificates: Path, tmp_path: Path
) -> None:
    make_authority(tmp_path)
    paths = {"tls_cert": "server.pem", "tls_key": "server.key", "client_ca": "ca.pem"}
    security = SecurityConfig(**{key: certificates / name for key, name in paths.items()})
    own = ["--cert", str(certificates / "expired.pem"), "--key", str(certificates / "expired.key")]
    with ExpertsServer({"e": FeedForwardExpert(D)}, config=ServingConfig(security=security)) as server:
        for ca, said in (
            (certificates / "ca.pem", "By the clock here this client's certificate has expired"),
            (tmp_path / "ca.pem", f"The ca_file is '{tmp_path / 'ca.pem'}'."),
        ):
            shown = CliRunner().invoke(main, ["info", server.address, "--ca", str(ca), *own])
            assert (shown.exit_code, said in shown.output) == (1, True), shown.output


@pytest.mark.parametrize(
    ("files", "text"),
    [
        (("none", "server.key", None), "key 'security.tls_cert': expected a readable file"),
        (("noise", "server.key", None), "key 'security.tls_cert': expected a certificate and its key"),
        (("server.pem", "noise", None), "key 'security.tls_cert': expected a certificate and its key"),
        (("server.pem", "client.key", None), "(KEY_VALUES_MISMATCH)"),
        (("server.pem", "server.key", "noise"), "key 'security.client_ca': expected certificates as PEM"),
    ],
    ids=["no file", "no certificate", "no key", "key of another", "no authority"],
)
def test_certificates_that_are_none_are_refused_by_the_check_and_by_the_server(
    certificates: Path, files: tuple[str, str, str | None], text: str, tmp_path: Path
) -> None:
    (certificates / "noise").write_text("noise")
    names = ("tls_cert", "tls_key", "client_ca")
    paths = {name: certificates / file for name, file in zip(names, files, strict=True) if file is not None}
    with pytest.raises(ConfigError) as refused:
        ExpertsServer(
            {"e": FeedForwardExpert(D)}, config=ServingConfig(security=SecurityConfig(**paths))
        ).start()
    assert text in str(refused.value)
    lines = [f'{name} = "{path}"\n' for name, path in paths.items()]
    (tmp_path / "s.toml").write_text(f'[experts.e]\nclass = "identity"\n[security]\n{"".join(lines)}')
    checked = CliRunner().invoke(main, ["config", "--check", str(tmp_path / "s.toml")])
    assert (checked.exit_code, text in checked.output) == (1, True), checked.output


KINDS: dict[str, tuple[Any, ...]] = {
    "RSA": (True, "rsa:2048"),
    "P-256": (True, "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
    "P-384": (True, "ec", "-pkeyopt", "ec_paramgen_curve:P-384"),
    "P-521": (False, "ec", "-pkeyopt", "ec_paramgen_curve:P-521"),
    "P-224": (False, "ec", "-pkeyopt", "ec_paramgen_curve:P-224"),
    "secp256k1": (False, "ec", "-pkeyopt", "ec_paramgen_curve:secp256k1"),
    "Ed25519": (False, "ed25519"),
    "Ed448": (False, "ed448"),
    "RSA-PSS": (False, "rsa-pss"),
    "brainpoolP384r1": (False, "ec", "-pkeyopt", "ec_paramgen_curve:brainpoolP384r1"),
    "another kind": (False, "ec", "-pkeyopt", "ec_paramgen_curve:brainpoolP384t1"),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_certificate_of_a_kind_that_no_client_takes_is_refused(kind: str, tmp_path: Path) -> None:
    """By a server and by the check; others are served."""
    is_taken, *how = KINDS[kind]
    cert, key = tmp_path / "server.pem", tmp_path / "server.key"
    subject = ("-subj", "/CN=localhost", "-addext", "subjectAltName=IP:127.0.0.1")
    openssl("req", "-x509", "-newkey", *how, "-nodes", *subject, "-keyout", key, "-out", cert)
    (tmp_path / "s.toml").write_text(
        f'security = {{ tls_cert = "{cert}", tls_key = "{key}" }}\nexperts.e.class = "identity"\n'
    )
    checked = CliRunner().invoke(main, ["config", "--check", str(tmp_path / "s.toml")])
    config = ServingConfig(security=SecurityConfig(tls_cert=cert, tls_key=key))
    server = ExpertsServer({"e": FeedForwardExpert(D)}, config=config)
    if is_taken:
        assert checked.exit_code == 0, checked.output
        with server:
            credentials = grpc.ssl_channel_credentials(cert.read_bytes())
            with WireClient(server.address, credentials=credentials) as client:
                assert client.forward("e", tokens(2, D)).code == "OK"
    else:
        text = f"(RSA, or ECDSA with P-256 or P-384), got {str(cert)!r} with {kind}"
        assert (checked.exit_code, text in checked.output) == (1, True), checked.output
        with pytest.raises(ConfigError, match=re.escape(text)):
            server.start()


@pytest.mark.parametrize(
    ("name", "text"),
    [("expired", "expired.pem' (certificate has expired). Renew"), ("client", "no mistakes")],
)
def test_a_certificate_that_has_expired_is_found_by_the_check_and_told_by_the_server(
    certificates: Path, name: str, text: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    paths = {"tls_cert": certificates / f"{name}.pem", "tls_key": certificates / f"{name}.key"}
    lines = [f'{key} = "{path}"\n' for key, path in paths.items()]
    (tmp_path / "s.toml").write_text(f'[experts.e]\nclass = "identity"\n[security]\n{"".join(lines)}')
    checked = CliRunner().invoke(main, ["config", "--check", str(tmp_path / "s.toml")])
    assert (checked.exit_code, text in checked.output) == (int(name == "expired"), True), checked.output
    config = ServingConfig(security=SecurityConfig(**paths))
    with ExpertsServer({"e": FeedForwardExpert(D)}, config=config):
        assert ("certificate has expired" in caplog.text) == (name == "expired")


def write_bundle(folder: Path, name: str, *parts: str) -> Path:
    """Write the certificates of these names into one file."""
    bundle = folder / f"{name}.pem"
    bundle.write_text("".join((folder / f"{part}.pem").read_text() for part in parts))
    return bundle


@pytest.mark.parametrize(
    ("signers", "lacks"),
    [
        (("old",), "certificate has expired"),
        (("next",), "certificate is not yet valid"),
        (("old", "next"), "certificate is not yet valid"),
        (("old", "ca"), None),
        (("ca", "next"), None),
    ],
    ids=["old", "not yet", "old and not yet", "old and new", "new and not yet"],
)
def test_authorities_of_clients_of_which_none_is_valid_are_found_by_the_check_and_told_by_the_server(
    signers: tuple[str, ...], lacks: str | None, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """All clients were refused, and nothing told why."""
    make_certificates(tmp_path)
    for name, when in (("old", EXPIRED), ("next", NOT_YET)):
        make_certificate(tmp_path, name, when, signed_by=name, is_authority=True)
    own = {"tls_cert": tmp_path / "server.pem", "tls_key": tmp_path / "server.key"}
    paths = {**own, "client_ca": write_bundle(tmp_path, "clients", *signers)}
    lines = [f'{key} = "{path}"\n' for key, path in paths.items()]
    (tmp_path / "s.toml").write_text(f'[experts.e]\nclass = "identity"\n[security]\n{"".join(lines)}')
    checked = CliRunner().invoke(main, ["config", "--check", str(tmp_path / "s.toml")])
    config = ServingConfig(security=SecurityConfig(**paths))
    with ExpertsServer({"e": FeedForwardExpert(D)}, config=config):
        pass
    if lacks is None:
        assert checked.exit_code == 0, checked.output
        assert "clients.pem" not in caplog.text
    else:
        expected = "key 'security.client_ca': expected an authority whose clients can be trusted, got "
        said = f"{expected}'{paths['client_ca']}' ({lacks}). Renew it."
        assert (checked.exit_code, said in checked.output) == (1, True), checked.output
        assert said in caplog.text


@pytest.mark.parametrize("ending", ["server", "chain", "clients"])
def test_what_expires_while_the_server_serves_is_told_of_once(
    ending: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A certificate, one that it hangs on, the authority of clients: nothing had been, until a restart."""
    make_certificates(tmp_path)

    def write(*when: str) -> Path:
        """Write what expires, and what hangs on it; return the server's certificate."""
        if ending == "clients":
            make_certificate(tmp_path, ending, when, signed_by=ending, is_authority=True)
            make_certificate(tmp_path, "client", ONE_DAY, signed_by=ending)
        elif ending == "chain":
            make_certificate(tmp_path, "between", when, is_authority=True)
            make_certificate(tmp_path, "server", ONE_DAY, signed_by="between")
            return write_bundle(tmp_path, "chain", "server", "between")
        else:
            make_certificate(tmp_path, ending, when)
        return tmp_path / "server.pem"

    def ask() -> WireClient:
        files = [(tmp_path / name).read_bytes() for name in ("ca.pem", "client.key", "client.pem")]
        return WireClient(server.address, credentials=grpc.ssl_channel_credentials(*files))

    def is_told() -> bool:
        with ask() as client, contextlib.suppress(grpc.RpcError):
            client.info()
        return f"{ending}.pem' (certificate has expired). Renew it." in caplog.text

    paths = {"tls_cert": write(*ends_in(4)), "tls_key": tmp_path / "server.key"}
    if ending == "clients":
        paths["client_ca"] = tmp_path / "clients.pem"
    with ExpertsServer(
        {"e": FeedForwardExpert(D)}, config=ServingConfig(security=SecurityConfig(**paths))
    ) as server:
        wait_until(is_told)
        assert is_told()
        assert caplog.text.count("certificate has expired") == 1
        write(*ONE_DAY)
        with ask() as client:
            assert client.forward("e", tokens(2, D)).code == "OK"
