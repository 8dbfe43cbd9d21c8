"""Certificates for a test of TLS, made by openssl in a folder of the test's own."""

from __future__ import annotations

import datetime
import subprocess
from pathlib import Path

_NEW = ("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1")
EXPIRED = ("-startdate", "20200101000000Z", "-enddate", "20200102000000Z")
NOT_YET = ("-startdate", "20490101000000Z", "-enddate", "20510101000000Z")
ONE_DAY = ("-days", "1")
_AUTHORITY = """
[ca]
default_ca = here
[here]
database = {folder}/index
new_certs_dir = {folder}
certificate = {folder}/ca.pem
private_key = {folder}/ca.key
rand_serial = yes
unique_subject = no
default_md = sha256
policy = any
[any]
commonName = supplied
"""


def make_certificates(folder: Path, host: str = "localhost") -> None:
    """Write an authority (`ca.pem`) and certificates, signed by it, of a `server` (this host) and a `client`.

    And of `expired`, with the name of the server.
    """
    make_authority(folder)
    (folder / "ca.conf").write_text(_AUTHORITY.format(folder=folder))
    (folder / "index").touch()
    for name in ("server", "client", "expired"):
        make_certificate(folder, name, EXPIRED if name == "expired" else ONE_DAY, host)


def make_certificate(
    folder: Path,
    name: str,
    when: tuple[str, ...],
    host: str = "localhost",
    *,
    signed_by: str = "ca",
    is_authority: bool = False,
) -> None:
    """Write one more, for a time in openssl's words.

    Args:
        folder: that `make_certificates` has written to.
        name: of its files.
        when: from when until when it is valid.
        host: that it is for.
        signed_by: an authority there, which may be itself.
        is_authority: whether it may sign others.
    """
    key = ("-keyout", folder / f"{name}.key", "-out", folder / f"{name}.csr")
    openssl(*_NEW, "-subj", f"/CN={name if is_authority else 'localhost'}", *key)
    extension = (
        "basicConstraints=critical,CA:TRUE" if is_authority else f"subjectAltName=DNS:{host},IP:127.0.0.1"
    )
    (folder / f"{name}.ext").write_text(f"{extension}\n")
    signed = (
        "-in",
        folder / f"{name}.csr",
        "-out",
        folder / f"{name}.pem",
        "-keyfile",
        folder / f"{signed_by}.key",
    )
    signer = ("-selfsign",) if signed_by == name else ("-cert", folder / f"{signed_by}.pem")
    how = ("-config", folder / "ca.conf", "-extfile", folder / f"{name}.ext", "-batch", "-notext", *when)
    openssl("ca", *how, *signed, *signer)


def make_authority(folder: Path) -> None:
    """Write `ca.pem` and `ca.key`."""
    openssl(*_NEW, "-x509", "-subj", "/CN=authority", "-keyout", folder / "ca.key", "-out", folder / "ca.pem")


def ends_in(seconds: float) -> tuple[str, str, str, str]:
    """Return a time that began long ago and ends so soon."""
    end = datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=seconds)
    return "-startdate", "20200101000000Z", "-enddate", f"{end:%Y%m%d%H%M%SZ}"


def openssl(*arguments: str | Path) -> None:
    """Run it, and raise if it fails."""
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)
