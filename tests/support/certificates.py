"""Certificates for a test of TLS, made by openssl in a folder of the test's own."""

from __future__ import annotations

import subprocess
from pathlib import Path

_NEW = ("req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1")


def make_certificates(folder: Path, host: str = "localhost") -> None:
    """Write an authority (`ca.pem`) and certificates, signed by it, of a `server` (this host) and a `client`.

    And of `expired`, with the name of the server.
    """
    make_authority(folder)
    for name in ("server", "client", "expired"):
        key = ("-keyout", folder / f"{name}.key", "-out", folder / f"{name}.csr")
        openssl(*_NEW, "-subj", "/CN=localhost", *key)
        (folder / f"{name}.ext").write_text(f"subjectAltName=DNS:{host},IP:127.0.0.1\n")
        days = "-1" if name == "expired" else "1"
        signed = ("-in", folder / f"{name}.csr", "-out", folder / f"{name}.pem", "-days", days)
        authority = ("-CA", folder / "ca.pem", "-CAkey", folder / "ca.key", "-CAcreateserial")
        openssl("x509", "-req", *signed, *authority, "-extfile", folder / f"{name}.ext")


def make_authority(folder: Path) -> None:
    """Write `ca.pem` and `ca.key`."""
    openssl(*_NEW, "-x509", "-subj", "/CN=authority", "-keyout", folder / "ca.key", "-out", folder / "ca.pem")


def openssl(*arguments: str | Path) -> None:
    """Run it, and raise if it fails."""
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)
