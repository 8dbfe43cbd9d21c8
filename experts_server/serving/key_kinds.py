"""Which kinds of keys a certificate may have: those that gRPC's clients take, which are fewer than OpenSSL's.

gRPC's BoringSSL serves certificates with Ed25519 and P-521 as well, while none of its clients can connect then, and
nothing tells why.
"""

from __future__ import annotations

from moe_autograd.wire.x509 import certificates_in, items_in

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


def kind_not_taken(pem: bytes) -> str | None:
    """Return the kind of the first certificate's key, if gRPC's clients do not take it; OpenSSL has read it before."""
    certificates = certificates_in(pem)
    if not certificates:
        return None
    kind = _kind_of(certificates[0].key)
    return None if kind in _TAKEN else _NAMES.get(kind, f"another kind, of object identifier {kind}")


def _kind_of(key: bytes) -> str:
    """Return the object identifier of the key's algorithm, or of its curve."""
    algorithm, *rest = items_in(items_in(key)[0].contents)
    kind = algorithm.contents.hex()
    return rest[0].contents.hex() if kind == _ECDSA and rest else kind
