"""Certificates for a test of TLS, made by openssl in a folder of the test's own."""

from __future__ import annotations

import subprocess
from pathlib import Path

_NEW = ("req", "-newkey", "rsa:2048", "-nodes", "-days", "1")


def make_certificates(folder: Path) -> None:
    """Write an authority (`ca.pem`) and certificates, signed by it, of a `server` (localhost) and a `client`."""
    make_authority(folder)
    for name in ("server", "client"):
        key = ("-keyout", folder / f"{name}.key", "-out", folder / f"{name}.csr")
        openssl(*_NEW, "-subj", "/CN=localhost", *key)
        (folder / f"{name}.ext").write_text("subjectAltName=DNS:localhost,IP:127.0.0.1\n")
        signed = ("-in", folder / f"{name}.csr", "-out", folder / f"{name}.pem", "-days", "1")
        authority = ("-CA", folder / "ca.pem", "-CAkey", folder / "ca.key", "-CAcreateserial")
        openssl("x509", "-req", *signed, *authority, "-extfile", folder / f"{name}.ext")


def make_authority(folder: Path) -> None:
    """Write `ca.pem` and `ca.key`."""
    openssl(*_NEW, "-x509", "-subj", "/CN=authority", "-keyout", folder / "ca.key", "-out", folder / "ca.pem")


def openssl(*arguments: str | Path) -> None:
    """Run it, and raise if it fails."""
    subprocess.run(["openssl", *map(str, arguments)], check=True, capture_output=True)
