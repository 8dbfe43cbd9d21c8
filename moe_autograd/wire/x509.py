"""What certificates say of themselves: when they are valid, who signed them, and what key they have.

The standard library tells of these only for the other side's certificate in a handshake, so they are read from their
DER.
"""

from __future__ import annotations

import base64
import datetime
import math
import re
import time
from typing import NamedTuple

_PEM = re.compile(rb"-----BEGIN (?:TRUSTED |X509 )?CERTIFICATE-----(.*?)-----END", re.DOTALL)
_VERSION = 0xA0  # the tag of a field that may be missing
_ISSUER, _VALIDITY, _SUBJECT, _KEY = 2, 3, 4, 5  # of the fields after it
_FULL_YEAR = 0x18  # the tag of a time of which the year has four digits, and not two


class Item(NamedTuple):
    """A piece of DER."""

    tag: int
    contents: bytes


class Certificate(NamedTuple):
    """A part of what is in one; times are in seconds since the epoch."""

    issuer: bytes
    subject: bytes
    begins_at: float
    ends_at: float
    key: bytes

    def lacks_now(self) -> str | None:
        """Return why it is not valid, by the clock of this machine and in words of OpenSSL, or None if it is."""
        now = time.time()
        if now > self.ends_at:
            return "certificate has expired"
        return "certificate is not yet valid" if now < self.begins_at else None


def certificates_in(pem: bytes) -> list[Certificate]:
    """Return the certificates in a file that OpenSSL has read before."""
    return [_certificate(base64.b64decode(found)) for found in _PEM.findall(pem)]


def chain_in(pem: bytes) -> list[Certificate]:
    """Return the first certificate in a file, and those after it that it hangs on.

    Others there may be of the same name, as an authority that was renewed: then the one that ends last counts.
    """
    chain, others = certificates_in(pem)[:1], certificates_in(pem)[1:]
    while chain:
        signers = [other for other in others if other.subject == chain[-1].issuer and other not in chain]
        if not signers:
            break
        chain.append(max(signers, key=lambda signer: signer.ends_at))
    return chain


def items_in(der: bytes) -> list[Item]:
    """Return what follows each other on one level."""
    items, at = [], 0
    while at < len(der):
        tag, size = der[at], der[at + 1]
        at += 2
        if size & 0x80:  # then so many bytes have the size
            width = size & 0x7F
            size = int.from_bytes(der[at : at + width], "big")
            at += width
        items.append(Item(tag, der[at : at + size]))
        at += size
    return items


def _certificate(der: bytes) -> Certificate:
    fields = items_in(items_in(items_in(der)[0].contents)[0].contents)
    fields = fields[fields[0].tag == _VERSION :]
    begin, end = items_in(fields[_VALIDITY].contents)
    return Certificate(
        fields[_ISSUER].contents,
        fields[_SUBJECT].contents,
        _seconds(begin, otherwise=-math.inf),
        _seconds(end, otherwise=math.inf),
        fields[_KEY].contents,
    )


def _seconds(moment: Item, otherwise: float) -> float:
    """Return a time; of a form that authorities may not use, `otherwise`: whoever connects finds it."""
    text = moment.contents.decode("ascii", "replace")
    if moment.tag != _FULL_YEAR:
        text = ("19" if text >= "50" else "20") + text
    try:
        return datetime.datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=datetime.UTC).timestamp()
    except ValueError:
        return otherwise
