"""Which kinds of keys a certificate may have: those that gRPC's clients take, which are fewer than OpenSSL's.

gRPC's BoringSSL serves certificates with Ed25519 and P-521 as well, while none of its clients can connect then, and
nothing tells why. The standard library does not tell the kind of a certificate's key, so it is read from its DER.
"""

from __future__ import annotations

import base64
import re
from typing import NamedTuple

TAKEN = "RSA, or ECDSA with P-256 or P-384"
_TAKEN = {"2a864886f70d010101", "2a8648ce3d030107", "2b81040022"}
_ECDSA = "2a8648ce3d0201"
_NAMES = {
    "2a864886f70d01010a": "RSA-PSS",
    "2b6570": "Ed25519",
    "2b6571": "Ed448",
    "2b8104000a": "secp256k1",
    "2b81040021": "P-224",
    "2b81040023": "P-521",
}
_VERSION = 0xA0  # the tag of a field that may be missing
_KEY = 5  # of the fields after it
_PEM = re.compile(rb"-----BEGIN (?:TRUSTED |X509 )?CERTIFICATE-----(.*?)-----END", re.DOTALL)


def kind_not_taken(pem: bytes) -> str | None:
    """Return the kind of the first certificate's key, if gRPC's clients do not take it; OpenSSL has read it before."""
    found = _PEM.search(pem)
    if found is None:
        return None
    kind = _kind_of(base64.b64decode(found[1]))
    return None if kind in _TAKEN else _NAMES.get(kind, f"another kind, of object identifier {kind}")


class _Item(NamedTuple):
    tag: int
    contents: bytes


def _kind_of(certificate: bytes) -> str:
    """Return the object identifier of the key's algorithm, or of its curve."""
    fields = _items(_items(_items(certificate)[0].contents)[0].contents)
    key = fields[_KEY + (fields[0].tag == _VERSION)]
    algorithm, *rest = _items(_items(key.contents)[0].contents)
    kind = algorithm.contents.hex()
    return rest[0].contents.hex() if kind == _ECDSA and rest else kind


def _items(der: bytes) -> list[_Item]:
    """Return what follows each other on one level."""
    items, at = [], 0
    while at < len(der):
        tag, size = der[at], der[at + 1]
        at += 2
        if size & 0x80:  # then so many bytes have the size
            width = size & 0x7F
            size = int.from_bytes(der[at : at + width], "big")
            at += width
        items.append(_Item(tag, der[at : at + size]))
        at += size
    return items
