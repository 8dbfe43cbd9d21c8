"""Certificates and tokens that are read in an unlucky moment: half replaced, or without a descriptor."""

from __future__ import annotations

import errno
import os
import shutil
import ssl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from experts_server.serving.certificates import _Certificates
from experts_server.serving.security import Gate
from moe_autograd.errors import PermissionDeniedError
from moe_autograd.wire.certificates import channel_credentials
from tests.support.certificates import make_certificates

OLD, NEW = "token-of-yesterday", "token-of-tomorrow-which-is-longer"
HALF = 200


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("certificates")
    make_certificates(folder)
    return folder


@pytest.fixture
def in_use(certificates: Path, tmp_path: Path) -> Path:
    """A folder with the server's files, which are to be replaced by those of the client."""
    for name in ("ca.pem", "server.pem", "server.key"):
        shutil.copy(certificates / name, tmp_path)
    return tmp_path


def serve(folder: Path) -> _Certificates:
    served = _Certificates(folder / "server.pem", folder / "server.key", None)
    served.check(served.read())
    return served


def cut(whole: Path, file: Path) -> None:
    file.write_bytes(whole.read_bytes()[:HALF])


def before_openssl_reads(patch: pytest.MonkeyPatch, do: Callable[[], object]) -> None:
    """Do something else just before each time."""
    for name in ("load_cert_chain", "load_verify_locations"):
        read = getattr(ssl.SSLContext, name)

        def read_later(*args: Any, read: Callable[..., None] = read, **options: Any) -> None:
            do()
            read(*args, **options)

        patch.setattr(ssl.SSLContext, name, read_later)


def fail() -> None:
    raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))


def fail_to_read(path: Path) -> bytes:
    fail()
    return b""


def test_a_server_shows_no_certificate_that_was_cut_short_when_it_was_read(
    certificates: Path, in_use: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And whole when OpenSSL looked: grpc would refuse each who connects."""
    served = serve(in_use)
    shutil.copy(certificates / "client.key", in_use / "server.key")
    cut(certificates / "client.pem", in_use / "server.pem")
    before_openssl_reads(monkeypatch, lambda: shutil.copy(certificates / "client.pem", in_use / "server.pem"))
    assert served.renewed() is None
    assert served.renewed() is not None
    assert served.renewed() is None


def test_a_certificate_that_could_not_be_looked_at_is_looked_at_again_and_told_of_once(
    certificates: Path,
    in_use: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    served = serve(in_use)
    for end in ("pem", "key"):
        shutil.copy(certificates / f"client.{end}", in_use / f"server.{end}")
    with monkeypatch.context() as now:
        before_openssl_reads(now, fail)
        assert [served.renewed(), served.renewed()] == [None, None]
    assert len(caplog.records) == 1
    assert "certificates stay as they were" in caplog.text
    assert served.renewed() is not None


def test_tokens_that_could_not_be_read_are_read_again_and_told_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "tokens"
    file.write_text(f"train {OLD}")
    gate = Gate(file)
    file.write_text(f"train {NEW}")
    with monkeypatch.context() as now:
        now.setattr(Path, "read_bytes", fail_to_read)
        for _ in range(2):
            with pytest.raises(PermissionDeniedError):
                gate.check([("authorization", f"Bearer {NEW}")], "train")
    assert len(caplog.records) == 1
    assert "tokens stay as they were" in caplog.text
    assert "(Too many open files)" in caplog.text
    gate.check([("authorization", f"Bearer {NEW}")], "train")
    with pytest.raises(PermissionDeniedError):
        gate.check([("authorization", f"Bearer {OLD}")], "train")


def test_a_client_uses_no_certificate_that_was_cut_short_when_it_was_read(
    certificates: Path, in_use: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut(certificates / "ca.pem", in_use / "ca.pem")
    before_openssl_reads(monkeypatch, lambda: shutil.copy(certificates / "ca.pem", in_use / "ca.pem"))
    with pytest.raises(ValueError, match=r"stay as they are while they are read, got some that are replaced"):
        channel_credentials(in_use / "ca.pem", None, None)
    channel_credentials(in_use / "ca.pem", None, None)


def test_a_client_names_the_file_that_has_gone_since_it_was_read(
    in_use: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before_openssl_reads(monkeypatch, (in_use / "ca.pem").unlink)
    with pytest.raises(ValueError, match=r"got '.*ca\.pem' \(.*No such file or directory\)"):
        channel_credentials(in_use / "ca.pem", None, None)
