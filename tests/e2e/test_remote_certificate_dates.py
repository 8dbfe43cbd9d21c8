"""A connection that failed while a certificate of the client's is not valid: the error says which, as a hint."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from torch import nn

from experts_server import ExpertsServer
from experts_server.configuration.config import SecurityConfig, ServingConfig
from moe_autograd.errors import ServerUnavailableError, UntrustedServerError
from moe_autograd.remote import TLS, RetryPolicy, connect
from tests.support.certificates import EXPIRED, NOT_YET, ONE_DAY, make_certificate, make_certificates


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificates that are valid now, have expired, are not yet valid, or hang on one that has expired."""
    folder = tmp_path_factory.mktemp("certificates")
    make_certificates(folder)
    make_certificate(folder, "next", NOT_YET)
    make_certificate(folder, "old", EXPIRED, signed_by="old", is_authority=True)
    make_certificate(folder, "of-old", ONE_DAY, signed_by="old")
    make_certificate(folder, "between", EXPIRED, is_authority=True)
    make_certificate(folder, "chain", ONE_DAY, signed_by="between")
    with (folder / "chain.pem").open("a") as chain:
        chain.write((folder / "between.pem").read_text())
    return folder


def serve(folder: Path, name: str, client_ca: Path | None = None) -> ExpertsServer:
    cert, key = own(folder, name)
    security = SecurityConfig(tls_cert=cert, tls_key=key, client_ca=client_ca)
    return ExpertsServer({"ffn.0": nn.Linear(4, 4)}, config=ServingConfig(security=security))


def ask(server: ExpertsServer, tls: TLS) -> list[str]:
    with connect(server.address, tls=tls, retry=RetryPolicy(patience_s=0.0)) as experts:
        return list(experts.info())


def own(folder: Path, name: str) -> tuple[Path, Path]:
    return folder / f"{name}.pem", folder / f"{name}.key"


@pytest.mark.parametrize(
    ("name", "lacks"),
    [
        ("expired", "this client's certificate has expired ({}). Renew it."),
        ("next", "this client's certificate is not yet valid ({}). Renew it."),
        (
            "chain",
            "an authority's certificate has expired in {}, on which this client's hangs: a server that has no other "
            "one refuses it.",
        ),
    ],
)
def test_a_client_whose_certificate_is_not_valid_now_is_told_which(folder, name, lacks):
    """Nothing said that it was its certificate."""
    cert, key = own(folder, name)
    said = f"certificate of yours? By the clock here {lacks.format(repr(str(cert)))}"
    with (
        serve(folder, "server", client_ca=folder / "ca.pem") as server,
        pytest.raises(ServerUnavailableError, match=rf"{re.escape(said)}\Z"),
    ):
        ask(server, TLS(folder / "ca.pem", cert, key))


def test_a_server_that_does_not_ask_for_it_serves_a_client_whose_certificate_has_expired(folder):
    with serve(folder, "server") as server:
        assert ask(server, TLS(folder / "ca.pem", *own(folder, "expired"))) == ["ffn.0"]


def test_an_authority_of_the_server_that_has_expired_is_named(folder):
    said = f"The ca_file is '{folder / 'old.pem'}', of which by the clock here each certificate has expired."
    with (
        serve(folder, "of-old") as server,
        pytest.raises(UntrustedServerError, match=rf"{re.escape(said)}\Z"),
    ):
        ask(server, TLS(folder / "old.pem"))
