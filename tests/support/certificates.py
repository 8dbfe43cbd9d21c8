"""Certificates for a test of TLS, made by openssl in a folder of the test's own."""

from __future__ import annotations

import subprocess
from pathlib import Path

_NEW = ("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1")
_EXPIRED = ("-startdate", "20200101000000Z", "-enddate", "20200102000000Z")
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
        make_certificate(folder, name, _EXPIRED if name == "expired" else ("-days", "1"), host)


def make_certificate(folder: Path, name: str, when: tuple[str, ...], host: str = "localhost") -> None:
    """Write one more, signed by the authority there, for a time in openssl's words."""
    key = ("-keyout", folder / f"{name}.key", "-out", folder / f"{name}.csr")
    openssl(*_NEW, "-subj", "/CN=localhost", *key)
    (folder / f"{name}.ext").write_text(f"subjectAltName=DNS:{host},IP:127.0.0.1\n")
    signed = ("-in", folder / f"{name}.csr", "-out", folder / f"{name}.pem")
    how = ("-config", folder / "ca.conf", "-extfile", folder / f"{name}.ext", "-batch", "-notext", *when)
    openssl("ca", *how, *signed)


def make_authority(folder: Path) -> None:
    """Write `ca.pem` and `ca.key`."""
    openssl(*_NEW, "-x509", "-subj", "/CN=authority", "-keyout", folder / "ca.key", "-out", folder / "ca.pem")


def openssl(*arguments: str | Path) -> None:
    """Run it, and raise if it fails."""
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)
