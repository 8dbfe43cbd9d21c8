"""What certificates say of themselves: when they are valid, and which of a file's others they hang on.

The standard library tells of these only for the other side's certificate in a handshake.
"""

from __future__ import annotations

import datetime
import re

from cryptography.x509 import Certificate, InvalidVersion, load_pem_x509_certificate

_PEM = re.compile(rb"-----BEGIN (?:X509 )?CERTIFICATE-----.*?-----END (?:X509 )?CERTIFICATE-----", re.DOTALL)


def certificates_in(pem: bytes) -> list[Certificate]:
    """Return the certificates in a file, without those of a form that they may not have: who connects finds these."""
    found = []
    for block in _PEM.findall(pem):
        try:
            found.append(load_pem_x509_certificate(block))
        except (ValueError, InvalidVersion, Warning):  # of a serial number, where warnings are errors
            continue
    return found


def chain_in(pem: bytes) -> list[Certificate]:
    """Return the first certificate in a file, and those after it that it hangs on.

    Others there may be of the same name, as an authority that was renewed: then the one that ends last counts.
    """
    found = certificates_in(pem)
    chain, others = found[:1], found[1:]
    while chain:
        signers = [other for other in others if other.subject == chain[-1].issuer and other not in chain]
        if not signers:
            break
        chain.append(max(signers, key=ends_at))
    return chain


def ends_at(certificate: Certificate) -> float:
    """Return when it ends, in seconds since the epoch."""
    return certificate.not_valid_after_utc.timestamp()


def lacks_now(certificate: Certificate) -> str | None:
    """Return why it is not valid, by the clock of this machine and in words of OpenSSL, or None if it is."""
    now = datetime.datetime.now(datetime.UTC)
    if now > certificate.not_valid_after_utc:
        return "certificate has expired"
    return "certificate is not yet valid" if now < certificate.not_valid_before_utc else None
