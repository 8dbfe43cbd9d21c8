"""What is read from certificates: when they are valid, and which of a file's others they hang on."""

from __future__ import annotations

import base64
import datetime
import re
from pathlib import Path

import pytest

from moe_autograd.wire.x509 import certificates_in, chain_in, ends_at, lacks_now
from tests.support.certificates import EXPIRED, NOT_YET, ONE_DAY, make_certificate, make_certificates


def seconds(year: int, day: int = 1) -> float:
    return datetime.datetime(year, 1, day, tzinfo=datetime.UTC).timestamp()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificates of a server, and of authorities that have expired, are valid, and are not yet."""
    folder = tmp_path_factory.mktemp("certificates")
    make_certificates(folder)
    make_certificate(folder, "other", EXPIRED, is_authority=True)
    for edition, when in (("old", EXPIRED), ("next", NOT_YET), ("now", ONE_DAY)):
        make_certificate(folder, "between", when, is_authority=True)
        (folder / f"{edition}.pem").write_bytes((folder / "between.pem").read_bytes())
    make_certificate(folder, "server", ONE_DAY, signed_by="between")
    return folder


def read(folder: Path, *names: str) -> bytes:
    return b"".join((folder / f"{name}.pem").read_bytes() for name in names)


def test_times_are_compared_with_the_clock(folder):
    old, now, soon = certificates_in(read(folder, "old", "now", "next"))
    assert [ends_at(old), ends_at(soon)] == [seconds(2020, day=2), seconds(2051)]
    lacking = [lacks_now(each) for each in (old, now, soon)]
    assert lacking == ["certificate has expired", None, "certificate is not yet valid"]


def test_a_certificate_of_another_form_is_left_to_those_who_connect(folder):
    pem = read(folder, "next")
    der = base64.b64decode(re.sub(rb"-----.*?-----", b"", pem))
    for begin, other in ((b"490101000000Z", b"49010100+0000"), (b"20510101000000Z", b"2051010100+0000")):
        der = der.replace(begin, other)
    lines = base64.encodebytes(der)
    odd = b"-----BEGIN CERTIFICATE-----\n" + lines + b"-----END CERTIFICATE-----\n"
    assert certificates_in(odd) == []
    assert certificates_in(odd + pem) == certificates_in(pem)
    version_2 = der.replace(bytes.fromhex("a003020102"), bytes.fromhex("a003020101"))
    odd = b"-----BEGIN CERTIFICATE-----\n" + base64.encodebytes(version_2) + b"-----END CERTIFICATE-----\n"
    assert certificates_in(pem + odd) == certificates_in(pem)


def test_a_chain_has_what_the_first_hangs_on_and_nothing_else(folder):
    server, now, ca = certificates_in(read(folder, "server", "now", "ca"))
    assert chain_in(read(folder, "server", "other", "ca", "now")) == [server, now, ca]
    assert chain_in(read(folder, "ca", "server")) == [ca], "that signed itself"
    assert chain_in(read(folder, "ca", "ca")) == [ca]
    assert chain_in(b"") == []


def test_of_two_of_one_name_that_which_ends_last_counts(folder):
    server, now = certificates_in(read(folder, "server", "now"))
    assert chain_in(read(folder, "server", "old", "now")) == [server, now]
    assert chain_in(read(folder, "server", "now", "old")) == [server, now]
